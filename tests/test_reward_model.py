"""The reward model against transformers' ForSequenceClassification, and terms of the user's own."""
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from reward import TERM_NAMES, compute_rewards, load_extra_terms, parse_weights, reward_model_scores
from support import InputError
from support.chat import load_tokenizer
from support.checkpoint import load_checkpoint, save_checkpoint
from support.prompts import Prompt
from test_model import close, randomize

BASE = Path(__file__).parent.parent / "data/arithmetic/base"
VOCABULARY = load_tokenizer(BASE).tokenizer.get_vocab_size()
CONVERSATIONS = [[{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "7"}],
                 [{"role": "user", "content": "12 - 5"}, {"role": "assistant", "content": "12-5=7, so 7"},
                  {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "yes, it is 7."}],
                 [{"role": "user", "content": "1"}, {"role": "assistant", "content": ""}]]


def reward_folder(folder, kind, **changes):
    """A reward model that transformers wrote, with the embedded tokenizer -> transformers' model of it."""
    sizes = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=8, intermediate_size=48, max_position_embeddings=256,
                 num_labels=1, pad_token_id=load_tokenizer(BASE).pad_id)
    config = getattr(transformers, kind + "Config")(**{**sizes, **changes})
    hf = randomize(getattr(transformers, kind + "ForSequenceClassification")(config), seed=2)
    hf.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (BASE / name).exists():
            shutil.copy(BASE / name, folder)
    return hf


def rendered(conversations):
    """The ids as transformers itself renders and encodes them."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(BASE)
    return [tokenizer(tokenizer.apply_chat_template(c, tokenize=False), add_special_tokens=False)["input_ids"]
            for c in conversations]


@pytest.mark.parametrize("kind", ["Qwen3", "Llama", "Qwen2"])
@pytest.mark.parametrize("tied", [True, False])
def test_scores_are_transformers_scores(kind, tied, tmp_path):
    hf = reward_folder(tmp_path, kind, tie_word_embeddings=tied)
    model, chat = load_checkpoint(tmp_path, score_head=True).eval(), load_tokenizer(tmp_path)
    rows = rendered(CONVERSATIONS)
    with torch.no_grad():
        alone = torch.cat([hf(torch.tensor([ids])).logits for ids in rows])[:, 0]
        assert alone.unique().numel() == 3
        for side in ("left", "right"):
            T = max(map(len, rows))
            ids, mask = (torch.tensor([pad * (T - len(r)) + r if side == "left" else r + pad * (T - len(r))
                                       for r in content])
                         for pad, content in (([chat.pad_id], rows), ([0], [[1] * len(r) for r in rows])))
            last = [T - 1 if side == "left" else len(r) - 1 for r in rows]
            theirs = hf(ids, attention_mask=mask).logits[:, 0]
            ours = model(ids, mask)[torch.arange(3), torch.tensor(last), 0]
            close(theirs, alone, 1e-4)
            close(ours, alone, 1e-4)
    for budget in (1, 100, 10000):      # one by one, some together, all together
        close(reward_model_scores(model, chat, CONVERSATIONS, budget), alone, 1e-4)


def test_a_reward_model_is_saved_as_one(tmp_path):
    hf = reward_folder(tmp_path / "theirs", "Qwen3")
    save_checkpoint(load_checkpoint(tmp_path / "theirs", score_head=True), tmp_path / "ours")
    back = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").eval()
    assert back.config.num_labels == 1
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    close(back(ids).logits, hf(ids).logits, 1e-4)


def test_language_and_reward_models_are_not_taken_for_each_other(tmp_path):
    with pytest.raises(InputError, match="a reward model .* is needed here"):
        load_checkpoint(BASE, score_head=True)
    reward_folder(tmp_path, "Qwen3")
    with pytest.raises(InputError, match="a language model is needed here"):
        load_checkpoint(tmp_path)


def test_a_classifier_with_two_labels_is_refused(tmp_path):
    reward_folder(tmp_path, "Qwen3", num_labels=2)
    with pytest.raises(InputError, match=r"size mismatch for score.weight: .*\[2, 32\].*\[1, 32\]"):
        load_checkpoint(tmp_path, score_head=True)


def test_a_conversation_longer_than_the_reward_models_positions_is_an_input_error(tmp_path):
    reward_folder(tmp_path, "Qwen3", max_position_embeddings=30)
    model, chat = load_checkpoint(tmp_path, score_head=True).eval(), load_tokenizer(tmp_path)
    longest = max(map(len, rendered(CONVERSATIONS)))
    with pytest.raises(InputError, match=f"{longest} tokens exceed its max_position_embeddings 30") as error:
        reward_model_scores(model, chat, CONVERSATIONS)
    assert len(str(error.value).splitlines()) == 1


# ---------------------------------------------------------------- the terms

OPEN = "<|im_start|>user\n3 + 4<|im_end|>\n<|im_start|>assistant\n<think>\n"
PROMPTS = [Prompt([{"role": "user", "content": "3 + 4"}], "7", OPEN, [1])] * 3
COMPLETIONS = ["thinking</think>\n\n7", "another thought</think>7", "no end of it"]


def scorers(reward_model="", reward_fn="", clip=3.0):
    return load_extra_terms(str(reward_model), reward_fn, clip, "cpu", torch.float32, 1000)


def test_the_model_reads_the_messages_without_the_think_block(tmp_path):
    hf = reward_folder(tmp_path, "Llama")
    with torch.no_grad():
        hf.score.weight.mul_(0.2)
        hf.save_pretrained(tmp_path)
    raw = scorers(tmp_path, clip=1e9)["model"](PROMPTS, COMPLETIONS)
    seen = [PROMPTS[0].messages + [{"role": "assistant", "content": answer}] for answer in ("7", "7", "")]
    with torch.no_grad():
        alone = [hf(torch.tensor([ids])).logits.item() for ids in rendered(seen)]
    assert raw == pytest.approx(alone, abs=1e-4) and raw[0] == pytest.approx(raw[1]) and raw[0] != raw[2]
    clip = min(abs(x) for x in raw) / 2     # every score lies beyond it
    clipped = scorers(tmp_path, clip=clip)["model"](PROMPTS, COMPLETIONS)
    assert clipped == pytest.approx([clip if x > 0 else -clip for x in raw])


def test_a_score_that_is_not_a_number_is_refused_by_name(tmp_path):
    hf = reward_folder(tmp_path, "Llama")
    with torch.no_grad():
        hf.score.weight.fill_(float("nan"))
        hf.save_pretrained(tmp_path)
    extra_terms = {"model": scorers(tmp_path)["model"](PROMPTS, COMPLETIONS)}
    with pytest.raises(InputError, match="'model' is nan for the completion 'thinking"):
        compute_rewards(COMPLETIONS, ["7"] * 3, [OPEN] * 3, None, extra_terms)


FUNCTIONS = '''import json

def length(messages, completion, answer):
    assert messages == [{"role": "user", "content": "3 + 4"}] and answer == "7"
    return len(completion) / 100

def lengths(messages, completions, answers):
    assert len(messages) == len(completions) == len(answers) == 3 and answers[0] == "7"
    return [len(c) / 100 for c in completions]

def fails(messages, completion, answer):
    return 1 / completion.count("</think>")

def fail(messages, completions, answers):
    return [1 / c.count("</think>") for c in completions]

def deep(messages, completions, answers):
    return json.loads(answers[0] + "}")

def too_few(messages, completions, answers):
    return [1.0]

def words(messages, completion, answer):
    return "good"
'''


@pytest.fixture
def functions(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return f"{tmp_path}/mine.py"


@pytest.mark.parametrize("name", ["length", "lengths"])
def test_a_function_of_ones_own_is_one_more_term(name, functions):
    values = scorers(reward_fn=f"{functions}:{name}")["fn"](PROMPTS, COMPLETIONS)
    assert values == [0.19, 0.24, 0.12]
    names = (*TERM_NAMES, "fn")
    plain, _ = compute_rewards(COMPLETIONS, ["7"] * 3, [OPEN] * 3)
    rewards, terms = compute_rewards(COMPLETIONS, ["7"] * 3, [OPEN] * 3, parse_weights("fn=10", names),
                                     {"fn": values})
    close(rewards - plain, torch.tensor([1.9, 2.4, 1.2]), 1e-5)
    assert [row["fn"] for row in terms] == values and tuple(terms[0]) == names


def line_of(text):
    """The number of the one line of FUNCTIONS that holds this."""
    numbers = [number for number, line in enumerate(FUNCTIONS.splitlines(), 1) if text in line]
    assert len(numbers) == 1
    return numbers[0]


@pytest.mark.parametrize("name, line, message", [
    ("fails", "return 1 / completion.count", "ZeroDivisionError: division by zero"),
    ("fail", "return [1 / c.count", "ZeroDivisionError: division by zero"),
    ("deep", "return json.loads", "JSONDecodeError: Extra data"),           # raised in a library: its caller
])
def test_an_error_in_it_is_shown_with_the_line_of_the_users_own_file(name, line, message, functions):
    score = scorers(reward_fn=f"{functions}:{name}")["fn"]
    with pytest.raises(InputError) as error:
        score(PROMPTS, COMPLETIONS)
    assert str(error.value).startswith(f"--reward_fn {functions}:{name}: "
                                       f"{functions}:{line_of(line)}: {message}")
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["fails", "fail"])
def test_the_line_is_shown_for_a_relative_path_too(name, functions, monkeypatch):
    monkeypatch.chdir(Path(functions).parent)
    with pytest.raises(InputError, match=r"mine\.py:\d+: ZeroDivisionError: division by zero"):
        scorers(reward_fn=f"mine.py:{name}")["fn"](PROMPTS, COMPLETIONS)


@pytest.mark.parametrize("text, shown", [
    ("x = 1\n\ny = x / 0\n", "{}:3: ZeroDivisionError: division by zero"),
    ("def f(messages, completion, answer):\n    return absent\n\nf(1, 2, 3)\n", "{}:2: NameError: name 'abs"),
    ("import no_such_module\n", "{}:1: ModuleNotFoundError: "),
    ("x = 1\nx = = 2\n", "SyntaxError: invalid syntax (mine.py, line 2)"),
], ids=["division", "name", "import", "syntax"])
def test_an_error_while_the_file_is_loaded_is_shown_with_its_line(text, shown, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        scorers(reward_fn=f"{file}:f")
    assert str(error.value).startswith(f"--reward_fn {file}:f: must be FILE.py:FUNCTION")
    assert f"({shown.format(file)}" in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name, message", [("too_few", "1 values for 3 completions"),
                                           ("absent", "no attribute 'absent'")])
def test_too_few_values_or_no_such_function_are_refused_by_name(name, message, functions):
    with pytest.raises(InputError, match=message) as error:
        scorers(reward_fn=f"{functions}:{name}")["fn"](PROMPTS, COMPLETIONS)
    assert f"{functions}:{name}" in str(error.value)


def test_what_is_no_number_or_no_file_is_refused(functions, tmp_path):
    extra_terms = {"fn": scorers(reward_fn=f"{functions}:words")["fn"](PROMPTS, COMPLETIONS)}
    with pytest.raises(InputError, match="'fn' is 'good', not a number, for the completion 'thinking"):
        compute_rewards(COMPLETIONS, ["7"] * 3, [OPEN] * 3, None, extra_terms)
    for where in (f"{tmp_path}/nowhere.py:f", "nothing", f"{tmp_path}:f"):
        with pytest.raises(InputError, match="FILE.py:FUNCTION"):
            scorers(reward_fn=where)
    with pytest.raises(InputError, match="terms are answer, length, thinking, repetition, weights"):
        parse_weights("fn=1")
