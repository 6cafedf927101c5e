"""What the student completes in distill.py, and what a new student is made of. Its losses: test_losses.py."""
import pytest
import torch

from distill import complete_by_student, new_student, parse_args
from model import MiniMind, MiniMindConfig
from support import InputError
from support.chat import chat_labels, completion_labels
from support.checkpoint import load_checkpoint


def test_the_student_completes_the_prompt_of_the_last_turn(chat):
    torch.manual_seed(0)
    student = MiniMind(MiniMindConfig(vocab_size=320, hidden_size=16, num_hidden_layers=1,
                                      num_attention_heads=2, num_key_value_heads=1))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
             {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]
    rows = [chat_labels(chat, turns), completion_labels(chat, "1 + 1 = ?", "2", 2)]
    noise = torch.rand(2, 5, dtype=torch.float64)
    written = complete_by_student(student, chat, rows, 5, 1.0, noise)
    for (old_ids, old_labels), (ids, labels) in zip(rows, written):
        start = len(labels) - sum(label != -100 for label in labels)
        assert ids[:start] == old_ids[:start] and old_labels[start - 1] == -100 and old_labels[start] != -100
        assert labels[start:] == ids[start:] and 1 <= len(ids) - start <= 5
        assert all(label == -100 for label in labels[:start])


def test_a_student_of_the_first_layers_holds_the_teachers_own_weights(chat):
    teacher = load_checkpoint(parse_args([]).teacher)
    student = new_student(parse_args(["--first_layers", "1"]), chat)
    theirs, ours = teacher.state_dict(), student.state_dict()
    assert {n for n in theirs if "layers.1." in n} and not {n for n in ours if "layers.1." in n}
    assert {n for n in theirs if not any(f"layers.{i}." in n for i in range(1, 100))} == ours.keys()
    assert all(torch.equal(t, theirs[n]) for n, t in ours.items())
    layers = teacher.config.num_hidden_layers
    with pytest.raises(InputError, match=f"--first_layers 99: the teacher has {layers} layers"):
        new_student(parse_args(["--first_layers", "99"]), chat)


def test_a_student_from_scratch_has_the_sizes_of_the_command_line_and_the_tokenizers_ids(chat):
    sizes = "--hidden_size 48 --num_hidden_layers 3 --num_attention_heads 6 --num_key_value_heads 3 --seed "
    student, same, other = (new_student(parse_args((sizes + seed).split()), chat) for seed in "778")
    c = student.config
    assert (c.hidden_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads) == (48, 3, 6, 3)
    assert c.vocab_size == chat.tokenizer.get_vocab_size() and (c.eos_token_id, c.pad_token_id) == (2, 0)
    a, b, d = (m.model.embed_tokens.weight for m in (student, same, other))
    assert torch.equal(a, b) and not torch.equal(a, d)          # the seed alone makes the weights
    with pytest.raises(InputError, match="num_key_value_heads 2"):
        new_student(parse_args(["--num_attention_heads", "3"]), chat)
