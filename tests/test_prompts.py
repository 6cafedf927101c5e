"""Rows of data become the prompts and the training rows that they should; a bad one is named by its line."""
import json
import math
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from support import InputError
from support.chat import load_tokenizer, render_chat
from support.prompts import parse_prompt, prompt_room, read_eval_prompts, read_jsonl, read_prompts, read_rows
from test_chat import FAMILIES, said, system, user, write_folder


@pytest.fixture(scope="module")
def minimind(tmp_path_factory):
    """The tokenizer of a folder with MiniMind's template: (ours, transformers')."""
    template, special, names, ends = FAMILIES["minimind"]
    folder = write_folder(tmp_path_factory.mktemp("minimind"), None, special, names, ends,
                          chat_template=template)
    return load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)


# ---------------------------------------------------------------- prompts

@pytest.mark.parametrize("row, messages, answer", [
    ({"prompt": "2 + 2", "answer": " 4 "}, [user("2 + 2")], "4"),
    ({"prompt": "2 + 2", "answer": 4}, [user("2 + 2")], "4"),
    ({"prompt": "hello"}, [user("hello")], None),
    ({"question": "Q", "answer": "6 * 7 = <<6*7=42>>42\n#### 1,042"}, [user("Q")], "1,042"),
    ({"question": "Q", "answer": "five"}, [user("Q")], "five"),
    ({"conversations": [user("a"), said("")]}, [user("a")], None),
    ({"conversations": [system("s"), user("a"), said("b"), user("c")], "answer": 3},
     [system("s"), user("a"), said("b"), user("c")], "3"),
    ({"conversations": [user("a"), said("b"), user("c"), said("placeholder")]},
     [user("a"), said("b"), user("c")], None),
], ids=range(8))
def test_the_three_formats_of_a_data_row(row, messages, answer):
    assert parse_prompt("f:1", row) == (messages, answer)


@pytest.mark.parametrize("line, message", [
    (b'{"prompt": ', "not valid JSON"), (b'["prompt"]', "object"), (b'{"text": "a"}', "conversations"),
    (b'{"prompt": "  "}', "empty"), (b'{"prompt": 5}', "text"), (b'{"question": null}', "text"),
    (b'{"conversations": []}', "conversations"), (b'{"conversations": "a"}', "conversations"),
    (b'{"conversations": [{"role": "user"}]}', "content"), (b'{"conversations": ["a"]}', "role"),
    (b'{"conversations": [{"role": "assistant", "content": "a"}]}', "prompt"),
    (b'{"conversations": [{"role": "user", "content": ""}]}', "empty"),
    (b'{"prompt": "a", "answer": [1]}', "answer"), (b'{"prompt": "a", "answer": true}', "answer"),
    (b'{"prompt": "\xff"}', "(?i)utf-?8"), (b'{"prompt": "\\ud83d"}', "."),
    (b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}", "."),
], ids=lambda x: ascii(x)[:40] if isinstance(x, bytes) else None)
def test_a_bad_data_row_is_named_by_file_and_line(line, message, chat, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n\n' + line + b"\n")
    with pytest.raises(InputError, match=message) as error:
        read_prompts(path, chat, 100, 320)
    assert f"{path}:3" in str(error.value)


@pytest.mark.parametrize("row", [{"conversations": [{"role": "system", "content": "Be brief."}]},
                                 {"prompt": "1 / 0", "answer": math.inf},
                                 {"prompt": "1 / 0", "answer": math.nan}], ids=str)
def test_a_prompt_without_a_question_or_with_an_endless_answer_is_refused(row):
    with pytest.raises(InputError, match="f:1"):
        parse_prompt("f:1", row)


def test_prompts_are_rendered_counted_and_checked_against_the_vocabulary(chat, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1 + 1", "answer": 2}\n{"prompt": "' + "9" * 40 + '"}\n{"prompt": "3"}\n')
    prompts, too_long = read_prompts(path, chat, 30, 320)
    assert too_long == 1 and [p.messages for p in prompts] == [[user("1 + 1")], [user("3")]]
    assert [(p.text, p.ids) for p in prompts] == [render_chat(chat, [user(x)]) for x in ("1 + 1", "3")]
    assert [p.answer for p in prompts] == ["2", None]
    longest = max(len(p.ids) for p in prompts)
    for limit, left_out in ((longest, 1), (longest - 1, 2)):        # a prompt of just the limit stays
        assert read_prompts(path, chat, limit, 320)[1] == left_out
    with pytest.raises(InputError, match="longer than 5"):
        read_prompts(path, chat, 5, 320)
    with pytest.raises(InputError, match="data.jsonl:1: token id"):
        read_prompts(path, chat, 99, 50)
    silent = read_prompts(path, chat, 99, 320, thinking_ratio=0.0)[0]
    assert all(p.text.endswith("</think>\n\n") for p in silent)
    for p in read_prompts(path, chat, 99, 320, system="Be brief.")[0]:
        assert p.messages[0] == {"role": "system", "content": "Be brief."} and "Be brief." in p.text
    with pytest.raises(InputError, match="nowhere.jsonl"):
        list(read_jsonl(tmp_path / "nowhere.jsonl"))


def test_minimind_rows_become_the_prompts_of_their_talk_without_the_placeholder(minimind, tmp_path):
    chat, oracle = minimind
    talks = [[user("a"), said("b", reasoning_content="r"), user("c", tools=None), said("")],
             [system("s", tools='[{"name": "f"}]'), user("a", reasoning_content=None), said("Fill me.")]]
    path = tmp_path / "rlaif.jsonl"
    path.write_text("".join(json.dumps({"conversations": t}) + "\n" for t in talks))
    for ratio, thinking in ((1.0, True), (0.0, False)):
        prompts = read_prompts(path, chat, 500, 500, "Be brief.", ratio)[0]
        given = [[system("Be brief."), *talks[0][:-1]], talks[1][:-1]]      # a system turn of its own stays
        assert [p.text for p in prompts] == [oracle.apply_chat_template(
            t, tokenize=False, add_generation_prompt=True, open_thinking=thinking) for t in given]
        assert [(p.answer, p.messages[-1]["content"]) for p in prompts] == [(None, "c"), (None, "a")]


def test_thinking_ratio_is_a_share_of_the_lines_and_the_same_in_every_run(minimind, tmp_path):
    chat = minimind[0]
    for name in ("one", "two"):
        (tmp_path / name).write_text('{"prompt": "x"}\n' * 2000)
    opened = {}
    for ratio in (0.3, 0.9):
        for name in ("one", "two"):
            prompts = read_prompts(tmp_path / name, chat, 99, 500, thinking_ratio=ratio)[0]
            opened[name, ratio] = [p.text.endswith("<think>\n") for p in prompts]
        assert abs(sum(opened["one", ratio]) / 2000 - ratio) < 0.041        # four standard deviations at .3
        assert opened["one", ratio] == opened["two", ratio]
    assert all(b for a, b in zip(opened["one", 0.3], opened["one", 0.9]) if a)


def test_held_out_prompts_need_answers_and_may_be_none(chat, tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text('{"prompt": "1 + 1", "answer": 2}\n{"prompt": "3"}\n')
    with pytest.raises(InputError, match="test.jsonl: every held-out row needs an answer"):
        read_eval_prompts(path, chat, 30, 320)
    path.write_text('{"prompt": "1 + 1", "answer": 2}\n')
    assert read_eval_prompts(path, chat, 30, 320) == read_prompts(path, chat, 30, 320)[0]
    assert read_eval_prompts("", chat, 30, 320) == []


def test_a_prompt_has_the_positions_that_its_completion_leaves():
    config = SimpleNamespace(max_position_embeddings=64)
    assert (prompt_room(config, 24), prompt_room(config, 63)) == (40, 1)
    with pytest.raises(InputError, match="--max_new_tokens 64 .*max_position_embeddings is 64"):
        prompt_room(config, 64)


# ---------------------------------------------------------------- rows to train on

def test_rows_too_long_or_without_a_trained_token_are_counted(tmp_path, chat):
    file = tmp_path / "sft.jsonl"
    file.write_text('{"prompt": "1", "completion": "2"}\n{"prompt": "1", "completion": "' + "2" * 100 + '"}\n'
                    '{"conversations": [{"role": "user", "content": "only a question"}]}\n')
    rows, left_out = read_rows(file, chat, 60, 320)
    assert (len(rows), left_out) == (1, 2)


@pytest.mark.parametrize("line, message", [
    ('{"prompt": "1"}', "completion"), ('{"prompt": "1", "completion": " "}', "not empty"),
    ('{"prompt": 1, "completion": "2"}', "text"), ('{"conversations": [{"role": "user"}]}', "content"),
    ('{"conversations": []}', "list"), ('[1]', "object"), ('{"prompt": ', "JSON")])
def test_bad_rows_name_file_and_line(line, message, tmp_path, chat):
    file = tmp_path / "sft.jsonl"
    file.write_text('{"prompt": "1", "completion": "2"}\n' + line + "\n")
    with pytest.raises(InputError, match=f"sft.jsonl:2: .*{message}"):
        read_rows(file, chat, 60, 320)
