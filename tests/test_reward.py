"""The reward terms at their edges, what a model may write, how the terms add up, the held-out accuracy."""
import builtins
import math
import random
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import reward as reward_module
from reward import (
    TERM_NAMES,
    answer_reward,
    completion_texts,
    compute_rewards,
    evaluate,
    length_reward,
    parse_weights,
    repetition_penalty,
    reward_metrics,
    reward_terms,
    split_thinking,
    thinking_reward,
)
from support import InputError
from support.prompts import Prompt
from test_answers import ANSWERS, REAL

OPEN = "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
NEITHER = "<|im_start|>user\n2 + 2<|im_end|>\n<|im_start|>assistant\n"
THOUGHT = "Two and two make four, as everybody knows."          # 42 characters


# ---------------------------------------------------------------- length

@pytest.mark.parametrize("length, expected", [(0, -0.5), (19, -0.5), (20, 0.5), (800, 0.5), (801, -0.5)])
def test_length_reward_at_its_edges(length, expected):
    assert length_reward("x" * length) == expected
    assert length_reward("  \n" + "x" * length + "\n\t ") == expected      # white space around costs nothing
    assert length_reward("数" * length) == expected                         # characters, not bytes


def test_length_bounds_and_value_are_arguments():
    assert [length_reward("x" * n, low=3, high=5, value=2.0) for n in (2, 3, 5, 6)] == [-2, 2, 2, -2]


# ---------------------------------------------------------------- the think block

@pytest.mark.parametrize("prompt, head", [(OPEN, ""), (NEITHER, "<think>\n"), (NEITHER, ""), ("", "<think>")])
@pytest.mark.parametrize("length, expected", [(0, -0.25), (19, -0.25), (20, 1.25), (300, 1.25), (301, -0.25)])
def test_thinking_reward_at_its_edges(length, expected, prompt, head):
    """1.0 for a thought of 20..300 characters, else -0.5; and 0.25 for exactly one `</think>`."""
    assert thinking_reward(head + "x" * length + "\n</think>\n\n4", prompt) == expected
    assert thinking_reward(head + "\n " + "x" * length + " \n</think>4 \n", prompt) == expected


def test_thinking_bounds_and_values_are_arguments():
    options = dict(prompt=OPEN, low=2, high=3, good=8.0, bad=-4.0, once=2.0)
    assert [thinking_reward("x" * n + "</think>4", **options) for n in (1, 2, 3, 4)] == [-2, 10, 10, -2]
    assert thinking_reward("xx</think>4</think>", **options) == 6


def test_case_19_think_tags():
    one = thinking_reward(THOUGHT + "</think>4", OPEN)
    assert one == 1.25
    assert thinking_reward(THOUGHT + "</think>4</think>", OPEN) == 0.75
    assert thinking_reward(THOUGHT + "</think></think>4", OPEN) == 0.75
    assert thinking_reward(THOUGHT, OPEN) == 0                              # never closed
    assert thinking_reward("<think>" + THOUGHT, NEITHER) == 0
    assert thinking_reward("4", NEITHER) == 0                               # no block at all
    for empty in ("", " \n", "</think>", " </think>\n"):                    # nothing follows the block
        assert thinking_reward(THOUGHT + "</think>" + empty, OPEN) <= -0.25 < one


@pytest.mark.parametrize("completion", [THOUGHT + "</think>4", "</think>", "4</think>",
                                        "<think>" + THOUGHT + "</think>4"])
def test_behind_a_closed_block_another_think_tag_earns_nothing(completion):
    assert thinking_reward(completion, CLOSED) == 0
    assert thinking_reward(completion, CLOSED.rstrip()) == 0


def test_case_20_line_breaks_and_trailing_white_space_cost_nothing():
    best = {"answer": 1.0, "length": 0.5, "thinking": 1.25, "repetition": 0.0}
    plain = THOUGHT + "</think>The sum of two and two is 4."
    broken = THOUGHT.replace(", ", ",\n") + "\n</think>\n\nThe sum of two and two is 4."
    for text in (plain, broken, plain + "  \n\n", "\n\n" + plain, "<think>\n" + plain):
        assert reward_terms(text, "4", OPEN) == best


def test_thought_and_answer_part_by_kind_of_prompt():
    both = "so\n</think>\n\n4"
    assert split_thinking(both, OPEN) == split_thinking(both, NEITHER) == ("so", "4")
    assert split_thinking(both, CLOSED) == (None, both)
    assert split_thinking("4", OPEN) == (None, "")                          # still inside the thought
    assert split_thinking("<think>4", NEITHER) == (None, "")
    assert split_thinking("4", NEITHER) == split_thinking("4", CLOSED) == (None, "4")


# ---------------------------------------------------------------- repetition

def test_case_18_repetition_costs_the_same_in_chinese():
    assert repetition_penalty("我喜欢你" * 100) == repetition_penalty("we all like you " * 100) == 0.5
    # 8 words, 6 trigrams, 2 of them seen before: 2 * .5 * 2 / 6
    for text in ("我喜欢你" * 2, "we all like you " * 2, "すきだよ" * 2, "나는좋아" * 2, "กขคง" * 2):
        assert repetition_penalty(text) == pytest.approx(1 / 3), text
    assert repetition_penalty("数学很有意思,我每天学习新的东西") == 0


@pytest.mark.parametrize("text", ["", " \n", "one", "one one", "one two three", THOUGHT, "a b c d e f g"])
def test_text_without_a_repeated_trigram_costs_0(text):
    assert repetition_penalty(text) == 0


def test_repetition_by_hand_and_its_arguments():
    # a b c a b c a: trigrams abc bca cab abc bca, 2 of 5 repeated -> 2 * .5 * .4; case does not matter
    assert repetition_penalty("a b c a B C a") == pytest.approx(0.4)
    # bigrams ab bc ca ab bc ca: 3 of 6 -> the cap, half of the n-grams
    assert repetition_penalty("a b c a b c a", n=2) == 0.5
    assert repetition_penalty("a b c a b c a", cap=2.0) == pytest.approx(1.6)
    assert repetition_penalty("a " * 50, cap=0.25) == 0.25


# ---------------------------------------------------------------- answers: the tables are in test_answers.py

def test_the_answer_part_alone_earns_what_is_right():
    """Every line of the tables: bare, behind a closed block, behind a thought, and as the thought."""
    lines = [*REAL, *((text, gold or "5", gold is not None) for text, gold in ANSWERS)]
    lines += [(text, None, 0) for text, _ in ANSWERS]
    for text, gold, right in lines:
        assert answer_reward(text, gold) == float(right), (text, gold)
        assert answer_reward(text, gold, CLOSED) == float(right), (text, gold)
        assert answer_reward(f"#### 123\n</think>\n{text}", gold, OPEN) == float(right), (text, gold)
        assert answer_reward(f"{text}</think>~", gold, OPEN) == 0, (text, gold)


def test_only_the_answer_part_is_searched():
    assert answer_reward("It is 4.\n</think>\n\n5", "4", OPEN) == 0 == answer_reward("It is 4.", "4", OPEN)
    assert answer_reward("It is 5.\n</think>\n\n4", "4", OPEN) == 1 == answer_reward("It is 4.", "4", NEITHER)
    assert answer_reward("It is 4.", "4", CLOSED) == 1 == answer_reward("</think> 4", "4", CLOSED)
    assert answer_reward("<think>4", "4", NEITHER) == 0


def test_an_empty_gold_answer_pays_nobody():
    assert answer_reward("", "") == 0 == answer_reward("still thinking", "", OPEN)


@pytest.mark.parametrize("piece", [
    "9", "x1 ", "1 1/", "1,", "1e5 ", "_1 ", "9**", "-1 ", " %", "$", "*", "^{", "{", "\\", "\\text",
    "\\frac{1}", "5\\frac", "1{,}", "\u00bd", "5\u00b2", "\ufdfa", "\u8d1f", "\uff11", "#### ", "# ",
    "<answer>", "\\boxed{",
], ids=ascii)
def test_a_megabyte_of_anything_returns_at_once(piece):
    text = piece * (1_000_000 // len(piece))
    for form in ("{}", "<answer>5{}</answer>", "\\boxed{{{}}}", "#### {}", "\\boxed{{5{}"):
        completion = form.format(text)
        start = time.monotonic()
        assert answer_reward(completion, "123456.5") == 0
        assert time.monotonic() - start < 1


def test_of_a_very_long_text_the_end_counts():
    assert answer_reward("like you " * 111_000 + "\n#### 42", "42") == 1


def test_case_22_nothing_is_executed(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("model output was evaluated")

    start = time.monotonic()
    for name in ("eval", "exec", "compile"):
        monkeypatch.setattr(builtins, name, refuse)
    for text in ("9**9**9**9", "__import__('os')", "9**" * 30 + "9", "<answer>9**9**9**9</answer>",
                 "\\boxed{9**9**9**9}", "#### 9**9**9**9", "<answer>__import__('os')</answer>",
                 "<answer>2+3</answer>"):
        for gold in ("5", "9", "387420489", "os", str(9 ** 9 ** 2)):
            assert answer_reward(text, gold) == 0
    monkeypatch.undo()
    assert time.monotonic() - start < 1


def test_no_text_crashes_the_checker():
    """Ten thousand short texts of the characters that numbers are made of, bare and as a tagged answer."""
    rng = random.Random(0)
    for _ in range(10_000):
        text = "".join(rng.choices("0159.,/^*-+$ e()[]{}<#\\x答\n", k=rng.randrange(1, 9)))
        for completion in (text, f"<answer>{text}</answer>", f"\\boxed{{{text}}}", f"#### {text}"):
            assert {answer_reward(completion, "5"), answer_reward("7", text)} <= {0.0, 1.0}


@pytest.mark.parametrize("text", [
    "9" * 10_000, "9" * 100_000 + "^", "-" * 100_000, "1/" * 50_000, "1." * 50_000, "9**" * 33_000 + "9",
    "9" + "*" * 100_000, "{" * 100_000, "\\boxed{" * 14_000, "<answer>" * 12_000, "</think>" * 12_000,
    "$" + " " * 100_000, "1 " * 50_000, "我喜欢你" * 25_000, "like you " * 11_000,
    "<answer>" + "9" * 100_000 + "</answer>", "1" + ",234" * 5_000 + "5",
    "<answer>1" + " " * 100_000 + "1</answer>",
], ids=lambda t: f"{ascii(t[:8])} {len(t)}")
def test_no_answer_costs_time(text):
    start = time.monotonic()
    reward_terms(text, "5", NEITHER)
    assert answer_reward(text, "9" * 10_000) == float(text == "9" * 10_000)
    assert time.monotonic() - start < 1


# ---------------------------------------------------------------- the sum

def test_the_terms_and_their_weighted_sum_by_hand():
    """A right answer of 9 characters behind no block: 1, -0.5, 0, 0. A thought, wrong: 0, 0.5, 1.25, 0."""
    completions = ["It is 4. ", THOUGHT + "</think>It is 5 5 5 5 5 5"]
    rewards, terms = compute_rewards(completions, ["4", "4"], [CLOSED, OPEN])
    assert list(terms[0]) == list(terms[1]) == ["answer", "length", "thinking", "repetition"]
    assert list(TERM_NAMES) == list(terms[0])
    assert list(terms[0].values()) == [1.0, -0.5, 0.0, 0.0]
    # it is 5 5 5 5 5 5: six trigrams, 555 four times -> 3 of 6 repeated -> the cap
    assert list(terms[1].values()) == [0.0, 0.5, 1.25, -0.5]
    assert rewards.tolist() == [0.5, 1.25] and rewards.dtype == torch.float32
    weights = {"answer": 3.0, "thinking": 0.0}
    weighted, same = compute_rewards(completions, ["4", "4"], [CLOSED, OPEN], weights)
    assert weighted.tolist() == [2.5, 0.0] and same == terms                # the terms stay unweighted


def test_weights_are_parsed_and_bad_ones_are_input_errors():
    assert parse_weights("answer=2, length=0.5,thinking=-1") == {"answer": 2, "length": 0.5, "thinking": -1}
    assert parse_weights("") == {}
    for text, named in (("anwser=1", "anwser"), ("answer=1,speed=2", "speed"), ("answer", "answer"),
                        ("answer=much", "much"), ("answer=nan", "nan"), ("length=inf", "inf"), ("=1", "=1")):
        with pytest.raises(InputError, match=named):
            parse_weights(text)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_case_4_a_term_that_is_no_number_is_named_with_its_completion(bad, monkeypatch):
    monkeypatch.setattr(reward_module, "length_reward", lambda c: bad if c == "the second" else 0.5)
    with pytest.raises(InputError, match="'length'.*the second"):
        compute_rewards(["the first", "the second"], ["4", "4"], ["", ""])
    with pytest.raises(InputError):     # a weight of 0 does not hide it
        compute_rewards(["the second"], ["4"], [""], {"length": 0.0})


def test_metrics_of_a_batch_by_hand():
    """Groups 1 1 | 0 3: the first has no contrast. Means over the four rows."""
    terms = [{"answer": a, "length": b} for a, b in ((1.0, 0.5), (1.0, -0.5), (0.0, 0.5), (1.0, 0.5))]
    assert reward_metrics(torch.tensor([1.0, 1.0, 0.0, 3.0]), terms, 2) == {
        "reward": 1.25, "reward_answer": 0.75, "reward_length": 0.25, "accuracy": 0.75,
        "zero_std_fraction": 0.5}


# ---------------------------------------------------------------- held-out accuracy

class Digits(torch.nn.Module):
    """Answers every prompt with its last token and then the end of the turn (id 2)."""

    def __init__(self, vocab_size):
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=0)
        self.lm_head = torch.nn.Linear(vocab_size, vocab_size, bias=False)
        self.lm_head.weight.data = torch.eye(vocab_size) * 100

    def forward(self, input_ids, attention_mask=None, cache=None, return_hidden=False):
        ids = input_ids if input_ids.shape[1] > 1 else torch.full_like(input_ids, 2)
        return F.one_hot(ids, self.lm_head.in_features).float(), 0.0


def test_evaluate_is_the_share_of_right_answers_whatever_the_batch(chat):
    digit = [chat.tokenizer.token_to_id(str(d)) for d in range(10)]
    golds = "0123456789" + "9876543210" + "01234"                           # 10, 0 and 5 of 25 agree
    prompts = [Prompt([], gold, "", [7, digit[i % 10]]) for i, gold in enumerate(golds)]
    for batch_size in (256, 25, 7, 1):
        for temperature in (0.0, 1.0):
            share = evaluate(Digits(320), chat, prompts, max_new_tokens=4, temperature=temperature, seed=0,
                             batch_size=batch_size)
            assert share == pytest.approx(15 / 25)


def test_completion_texts_leave_off_the_end_token_and_what_follows(chat):
    ids = chat.tokenizer.encode("<think>7</think>42").ids
    row = torch.tensor([ids + [2, 7, 7], ids + [7, 7, 7]])
    mask = torch.arange(row.shape[1]) < torch.tensor([[len(ids) + 1], [len(ids)]])
    rollout = SimpleNamespace(completion_ids=row, completion_mask=mask)
    assert completion_texts(chat, rollout) == ["<think>7</think>42"] * 2
