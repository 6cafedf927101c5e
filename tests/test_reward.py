"""The reward terms at their edges, the answer checker line by line, and how the terms add up."""
import builtins
import math
import random
import re
import time
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import reward as reward_module
from model import InputError
from reward import (
    TERMS,
    answer_reward,
    completion_texts,
    compute_rewards,
    evaluate,
    extract_answer,
    length_reward,
    parse_weights,
    repetition_penalty,
    reward_terms,
    same_answer,
    split_thinking,
    thinking_reward,
)
from rollout import Prompt, load_tokenizer

torch.set_num_threads(1)
BASE = Path(__file__).resolve().parent.parent / "data/arithmetic/base"
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


# ---------------------------------------------------------------- answers

def value(text):
    """The number that a string is, worked out without the code under test."""
    return Fraction(re.sub(r"[$€£¥,\s]", "", text))


ANSWERS = [
    ("-5", "-5"), ("The temperature fell to -5 degrees.", "-5"), ("x = -5", "-5"), ("\u22125", "-5"),
    ("(-5)", "-5"), ("-$5", "-5"), ("+5", "5"), ("in 1990-1995", "1995"), ("48 / 2 = 24", "24"),
    ("It costs $1,234.00.", "1234"), ("$1,234,567.89", "1234567.89"), ("€20,000", "20000"), ("$72$", "72"),
    ("The total is 72 clips, altogether.", "72"), ("72.", "72"), ("It is 72, or so", "72"), ("72\n", "72"),
    ("10 apples and 62 pears make 72 pieces", "72"), ("72%", "72"), ("72cm", "72"), ("007", "7"),
    ("5.0", "5"), ("3.14", "3.14"), ("0.50 litres", "1/2"), ("3/4", "3/4"), ("-3/4 of it", "-3/4"),
    ("#### 42", "42"), ("6 * 7\n#### 42\nSo 7 boxes remain.", "42"), ("#### 1\n#### $1,042", "1042"),
    ("\\boxed{72}", "72"), ("$\\boxed{1}$ no, $\\boxed{-72}$ (see 3)", "-72"), ("\\boxed{72", "72"),
    ("<answer>72</answer>", "72"), ("<answer>1</answer> 2 <answer> 72 </answer> and 3", "72"),
    ("<answer>72", "72"), ("**72**", "72"), ("**Answer:** 72", "72"), ("The answer is **-72**.", "-72"),
    ("`72`", "72"), ("print(72)", "72"), ("７２", "72"), ("１，２３４．５", "1234.5"), ("答案：72", "72"),
    ("", None), ("no number here", None), ("version 1.2.3", None), ("x2 and H2O", None), ("2^10", None),
    ("9**9**9**9", None), ("__import__('os')", None), ("1e5", None), ("\\boxed{}", None),
    ("<answer></answer>", None), ("####", None), ("per /60", None), ("/", None),
]


@pytest.mark.parametrize("text, expected", ANSWERS, ids=lambda x: ascii(x)[:40])
def test_the_number_that_a_text_commits_to(text, expected):
    found = extract_answer(text)
    if expected is None:
        assert found is None
        assert answer_reward(text, "5") == 0
    else:
        assert value(found) == value(expected), found
        assert answer_reward(text, expected) == 1
        assert answer_reward(text, str(value(expected) + 1)) == 0 == answer_reward(text, None)


@pytest.mark.parametrize("text, expected", [
    ("答案是72。", "72"), ("一共有72个。", "72"), ("答えは-5です", "-5"),     # scripts without spaces
    ("Answer:\n- 72 clips", "72"),                                         # a list's dash is no sign
    ("She earns $15/hour.", "15"), ("at 60/min", "60"),                     # a unit behind a slash
    ("The odds are .5", "0.5"), ("so the total is...72", "72"),             # points
], ids=lambda x: ascii(x)[:40])
def test_numbers_that_are_written_close_to_something_else(text, expected):
    found = extract_answer(text)
    assert found is not None and value(found) == value(expected), found
    assert answer_reward(text, expected) == 1


def test_nested_braces_of_a_box_are_kept():
    assert extract_answer("so \\boxed{\\frac{1}{2}} it is") == "\\frac{1}{2}"
    assert answer_reward("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}") == 1
    assert answer_reward("so \\boxed{\\frac{1}{3}}, about 1/2", "\\frac{1}{2}") == 0


@pytest.mark.parametrize("completion, gold, right", [
    # a box or a tag with one number and its unit
    ("\\boxed{5 cm}", "5", 1), ("\\boxed{72\\text{ clips}}", "72", 1), ("<answer>72 clips</answer>", "72", 1),
    ("<answer>72 clips</answer>", "7", 0), ("<answer>72 clips</answer>", "72 clips", 1),
    ("<answer>72 clips</answer>", "72 pens", 0), ("<answer>15 km/h</answer>", "15", 1),
    ("\\boxed{5\\ \\mathrm{cm}^{2}}", "5", 1), ("\\boxed{5\\text{ cm}^{2}}", "2", 0),
    ("<answer>5 m²</answer>", "5", 1), ("\\boxed{90^\\circ}", "90", 1), ("\\boxed{90^{\\circ}}", "90", 1),
    ("\\boxed{x = 5}", "5", 1), ("\\boxed{x=-5}", "-5", 1), ("\\boxed{x=-5}", "5", 0),
    ("<answer>It is **18** clips.</answer>", "18", 1), ("<answer>five (5)</answer>", "5", 1),
    ("<answer>4 post-its</answer>", "4", 1), ("<answer>The so-called 5</answer>", "5", 1),
    ("<answer>$\\boxed{7}$ of 9</answer>", "7", 1), ("\\boxed{1} or <answer>2</answer>", "2", 1),
    # one with several numbers commits to none of them, unless the gold answer is the same text
    ("<answer>1 2 3 4 5</answer>", "5", 0), ("<answer>1 2 3 4 5</answer>", "1", 0),
    ("\\boxed{3 or 5}", "3", 0), ("\\boxed{3 or 5}", "5", 0), ("\\boxed{3 or 5}", "3  OR 5", 1),
    ("<answer>1,2,3</answer>", "3", 0), ("<answer>100 200 300</answer>", "300", 0),
    ("<answer>1 hour 30 minutes</answer>", "30", 0), ("<answer>5-7</answer>", "5", 0),
    ("<answer>2024-01-05</answer>", "2024", 0), ("<answer>2 + 2</answer>", "2", 0),
    # a formula or a bound with one number is not that number
    ("\\boxed{2\\pi}", "2", 0), ("\\boxed{\\sqrt{2}}", "2", 0), ("\\boxed{5x}", "5", 0),
    ("<answer>5/x</answer>", "5", 0), ("\\boxed{x - 5}", "5", 0), ("\\boxed{x-5}", "5", 0),
    ("\\boxed{5 - x}", "5", 0), ("\\boxed{x + 5}", "5", 0), ("\\boxed{2^n}", "2", 0),
    ("\\boxed{2^{10}}", "10", 0), ("\\boxed{2^{10}}", "2", 0), ("\\boxed{5!}", "5", 0),
    ("so $2^{10}$", "10", 0), ("\\boxed{x > 5}", "5", 0), ("±5", "-5", 0), ("<answer>±5</answer>", "5", 0),
    ("\\boxed{\\frac{2}{x}}", "2", 0), ("<answer>9** 9</answer>", "9", 0), ("<answer>5k</answer>", "5", 0),
    # LaTeX and Markdown
    ("\\boxed{\\frac{1}{2}}", "0.5", 1), ("\\boxed{\\frac12}", "1/2", 1),
    ("\\boxed{\\dfrac{-3}{4}}", "-3/4", 1), ("\\boxed{-\\tfrac{3}{4}}", "-0.75", 1),
    ("\\boxed{\\dfrac{-3}{4}}", "0.75", 0), ("#### \\frac{1}{2}", "1/2", 1), ("\\boxed{\\$18}", "18", 1),
    ("\\boxed{-\\$18}", "-18", 1), ("so \\(5\\)", "5", 1), ("so \\[-5\\]", "-5", 1), ("so $5$.", "5", 1),
    ("<answer>\\(5\\)</answer>", "5", 1), ("<answer>`5`</answer>", "5", 1), ("**18**", "18", 1),
    ("<answer>**18**</answer>", "18", 1), ("so 9**9", "9", 0), ("<answer>*5*</answer>", "5", 1),
    ("<answer>5 * a</answer>", "5", 0), ("\\boxed{\\text{Yes}}", "yes", 1), ("\\boxed{\\text{Yes}}", "no", 0),
    ("<answer>Yes.</answer>", "YES", 1), ("<answer>$\\textbf{New  York}$</answer>", "new york", 1),
    ("**Paris**", "Paris", 1), ("x^2", "x", 0), ("<answer>Henry 8</answer>", "Louis 8", 0),
    ("<answer>Room 5</answer>", "room 5", 1),
    # thousands, mixed numbers
    ("It is 1{,}234.", "1234", 1), ("\\boxed{1{,}234{,}567}", "1234567", 1),
    ("\\boxed{10\\,000}", "10000", 1), ("\\boxed{10,\\!000}", "10000", 1), ("1\u202f000\u00a0m", "1000", 1),
    ("<answer>1 000</answer>", "1000", 1), ("<answer>1 00</answer>", "100", 0), ("10 000 000 12", "12", 1),
    ("It takes 1 1/2 hours", "1.5", 1), ("1 1/2", "1/2", 0), ("1\u00a01/2", "1.5", 1),
    ("1\\frac{1}{2}", "3/2", 1), ("\\boxed{-1½}", "-1.5", 1), ("1\\frac{1}{2}", "11/2", 0),
    # a percentage is its value, and its number too; two of them are compared as they stand
    ("50%", "50%", 1), ("50%", "50", 1), ("50%", "0.5", 1), ("It is 50 \\%.", "1/2", 1),
    ("\\boxed{50\\%}", "0.5", 1), ("\\boxed{50\\%}", "50", 1), ("#### 50%", "0.5", 1), ("50", "50%", 1),
    ("0.5", "50%", 1), ("12 1/2%", "1/8", 1), ("<answer>50 % of it</answer>", "0.5", 1), ("50", "0.5", 0),
    ("0.5", "50", 0), ("5%", "50%", 0), ("0.5%", "50%", 0), ("50%", "5", 0), ("-50%", "0.5", 0),
    # Chinese: full-width forms, units, currency, the minus in words
    ("18元", "18", 1), ("<answer>18元</answer>", "18", 1), ("共18个", "18", 1),
    ("<answer>共18个。</answer>", "18", 1), ("答案是１８。", "18", 1),
    ("<answer>答案是１８。</answer>", "18", 1), ("５０％", "50", 1), ("５０％", "0.5", 1),
    ("３，０００", "3000", 1), ("¥18", "18", 1), ("￥１８", "18", 1),
    ("<answer>人民币18元</answer>", "18", 1), ("<answer>5个苹果和3个梨</answer>", "5", 0),
    ("<answer>5个苹果和3个梨</answer>", "3", 0), ("18", "18元", 1), ("一共18块", "18元", 1),
    ("<answer>巴黎。</answer>", "巴黎", 1), ("负5", "-5", 1), ("负5", "5", 0), ("\u20135", "-5", 1),
    # behind ####
    ("#### 42 apples are left", "42", 1), ("#### $1,042 (not 7)", "1042", 1), ("#### \\text{Yes}", "yes", 1),
    # marks with nothing between them are no answer
    ("", "**", 0), ("<answer></answer>", ".", 0), ("$", "$", 0), ("5", ".", 0),
], ids=lambda x: ascii(x)[:40])
def test_real_answers(completion, gold, right):
    assert answer_reward(completion, gold) == right


WORKED = [      # in the style of GSM8K: the way, its sums in <<>>, the result behind ####
    ("Mia fills 3 bags with 4 plums: 3*4=<<3*4=12>>12 plums.\nShe eats 2, so 12-2=10 stay.\n#### 10", "10"),
    ("The desk is 1,100 + 150 = $<<1100+150=1250>>1,250.\n\n#### 1,250", "1250"),
    ("Each pays $9/4 = $<<9/4=2.25>>2.25\n#### 2.25", "2.25"),
    ("It was 6 degrees and fell by 9: 6-9=<<6-9=-3>>-3\n#### -3", "-3"),
    ("15 of 60 pupils walk: 15/60*100% = <<15/60*100=25>>25%\n#### 25", "25"),
    ("He runs 7 days * 2 km/day = <<7*2=14>>14 km.\n#### 14", "14"),
]


@pytest.mark.parametrize("row", range(len(WORKED)))
def test_worked_answers_as_a_model_words_them(row):
    """Every wording is right for its own row and for no other."""
    text, own = WORKED[row]
    wordings = [text, own, f"{text} pieces are left.", f"So the answer is **{own}**.", f"${own}$ in all.",
                f"\\boxed{{{own}}}", f"\\[\\boxed{{{own}\\text{{ dollars}}}}\\]",
                f"<answer>{own} km</answer>", f"1 + 1 = 2: <answer>x = {own}</answer>", f"答案是{own}个。"]
    for wording in wordings:
        for _, gold in WORKED:
            assert answer_reward(wording, gold) == float(gold == own), (wording, gold)


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


@pytest.mark.parametrize("given, gold, expected", [
    ("-5", "5", False), ("5.0", "5", True), ("$1,234.00", "1234", True), ("0.5", "1/2", True),
    ("2/4", "1/2", True), ("5.01", "5", False), ("-0", "0", True), ("1/0", "1/0", True), ("1/0", "5", False),
    ("Paris", " paris ", True), ("Paris", "London", False), ("0.1", "1/10", True), ("1/3", "0.3333", False),
    ("$72$", "72", True), ("72 €", "72", True), ("3 / 4", "3/4", True), ("-$5", "-5", True),
    ("1" * 400, "1" * 400, True), ("1" * 400, "1" * 399 + "2", False),
    ("1,2", "12", False), ("1 2", "12", False), ("3, 4", "34", False),     # two numbers are not one
])
def test_same_answer(given, gold, expected):
    assert same_answer(given, gold) is expected and same_answer(gold, given) is expected


def test_answers_in_words_count_only_with_nothing_around_them():
    assert answer_reward("Paris.", "paris") == 1 == answer_reward("<answer>Paris</answer>", "Paris")
    assert answer_reward("Paris or London", "Paris") == 0 == answer_reward("Paris 7", "7 Paris")


def test_an_empty_gold_answer_pays_nobody():
    assert answer_reward("", "") == 0 == answer_reward("still thinking", "", OPEN)


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


def test_case_23_a_list_of_numbers_is_no_guess_at_one_of_them():
    for text in ("1 2 3 4 5 6 7 8 9", "1, 2, 3, 4, 5, 6, 7, 8, 9", "<answer>1 2 3 4 5 6 7 8 9</answer>",
                 "4, 5 or 6", "\\boxed{4, 5}", "<answer>4 5</answer>"):
        assert answer_reward(text, "5") == 0, text


def test_no_text_crashes_the_checker():
    """Ten thousand short texts of the characters that numbers are made of, bare and as a tagged answer."""
    rng = random.Random(0)
    for _ in range(10_000):
        text = "".join(rng.choices("0159.,/^*-+$ e()[]{}<#\\x答\n", k=rng.randrange(1, 9)))
        for completion in (text, f"<answer>{text}</answer>", f"\\boxed{{{text}}}", f"#### {text}"):
            assert {answer_reward(completion, "5"), answer_reward("7", text)} <= {0.0, 1.0}


def test_only_the_answer_part_is_searched():
    assert answer_reward("It is 4.\n</think>\n\n5", "4", OPEN) == 0 == answer_reward("It is 4.", "4", OPEN)
    assert answer_reward("It is 5.\n</think>\n\n4", "4", OPEN) == 1 == answer_reward("It is 4.", "4", NEITHER)
    assert answer_reward("It is 4.", "4", CLOSED) == 1 == answer_reward("</think> 4", "4", CLOSED)
    assert answer_reward("<think>4", "4", NEITHER) == 0


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
    assert list(terms[0]) == list(terms[1]) == list(TERMS) == ["answer", "length", "thinking", "repetition"]
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


def test_evaluate_is_the_share_of_right_answers_whatever_the_batch():
    chat = load_tokenizer(BASE)
    digit = [chat.tokenizer.token_to_id(str(d)) for d in range(10)]
    golds = "0123456789" + "9876543210" + "01234"                           # 10, 0 and 5 of 25 agree
    prompts = [Prompt([], gold, "", [7, digit[i % 10]]) for i, gold in enumerate(golds)]
    for batch_size in (256, 25, 7, 1):
        for temperature in (0.0, 1.0):
            share = evaluate(Digits(320), chat, prompts, 4, temperature, seed=0, batch_size=batch_size)
            assert share == pytest.approx(15 / 25)


def test_completion_texts_leave_off_the_end_token_and_what_follows():
    chat = load_tokenizer(BASE)
    ids = chat.tokenizer.encode("<think>7</think>42").ids
    row = torch.tensor([ids + [2, 7, 7], ids + [7, 7, 7]])
    mask = torch.arange(row.shape[1]) < torch.tensor([[len(ids) + 1], [len(ids)]])
    rollout = SimpleNamespace(completion_ids=row, completion_mask=mask)
    assert completion_texts(chat, rollout) == ["<think>7</think>42"] * 2


def test_exponents_and_fraction_signs_do_not_melt_into_numbers():
    assert answer_reward("5²", "52") == answer_reward("10²", "102") == 0
    assert answer_reward("½", "2") == answer_reward("\\frac{1}{2}", "2") == 0
    assert answer_reward("½", "1/2") == answer_reward("\\frac{1}{2}", "0.5") == 1
    assert answer_reward("\\boxed{\\dfrac{3}{4}}", "3/4") == 1
