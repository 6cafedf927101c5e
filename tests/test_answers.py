"""The answer that a text commits to, line by line, and when two answers are the same."""
import re
from fractions import Fraction

import pytest

from support.answers import find_answer, is_right, same_answer


def value(text):
    """The number that a string is, worked out without the code under test; a percent sign is left off."""
    return Fraction(re.sub(r"[$€£¥,\s]", "", text.removesuffix("%")))


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
    found = find_answer(text)
    if expected is None:
        assert found is None
        assert not is_right(text, "5")
    else:
        assert value(found) == value(expected), found
        assert is_right(text, expected) and not is_right(text, str(value(expected) + 1))


def test_a_percent_sign_stays_with_the_answer_that_is_found():
    for text, found in (("72%", "72%"), ("It is 50 \\%.", "50%"), ("<answer>5 %</answer>", "5 %"),
                        ("#### 0.5% so", "0.5%")):
        assert find_answer(text) == found


@pytest.mark.parametrize("text, expected", [
    ("答案是72。", "72"), ("一共有72个。", "72"), ("答えは-5です", "-5"),     # scripts without spaces
    ("Answer:\n- 72 clips", "72"),                                         # a list's dash is no sign
    ("She earns $15/hour.", "15"), ("at 60/min", "60"),                     # a unit behind a slash
    ("The odds are .5", "0.5"), ("so the total is...72", "72"),             # points
], ids=lambda x: ascii(x)[:40])
def test_numbers_that_are_written_close_to_something_else(text, expected):
    found = find_answer(text)
    assert found is not None and value(found) == value(expected), found
    assert is_right(text, expected)


def test_nested_braces_of_a_box_are_kept():
    assert find_answer("so \\boxed{\\frac{1}{2}} it is") == "\\frac{1}{2}"
    assert is_right("so \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}")
    assert not is_right("so \\boxed{\\frac{1}{3}}, about 1/2", "\\frac{1}{2}")


REAL = [
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
]


@pytest.mark.parametrize("completion, gold, right", REAL, ids=lambda x: ascii(x)[:40])
def test_real_answers(completion, gold, right):
    assert is_right(completion, gold) == right


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
            assert is_right(wording, gold) == (gold == own), (wording, gold)


def test_answers_in_words_count_only_with_nothing_around_them():
    assert is_right("Paris.", "paris") and is_right("<answer>Paris</answer>", "Paris")
    assert not is_right("Paris or London", "Paris") and not is_right("Paris 7", "7 Paris")


def test_case_23_a_list_of_numbers_is_no_guess_at_one_of_them():
    for text in ("1 2 3 4 5 6 7 8 9", "1, 2, 3, 4, 5, 6, 7, 8, 9", "<answer>1 2 3 4 5 6 7 8 9</answer>",
                 "4, 5 or 6", "\\boxed{4, 5}", "<answer>4 5</answer>"):
        assert not is_right(text, "5"), text


def test_exponents_and_fraction_signs_do_not_melt_into_numbers():
    assert not is_right("5²", "52") and not is_right("10²", "102")
    assert not is_right("½", "2") and not is_right("\\frac{1}{2}", "2")
    assert is_right("½", "1/2") and is_right("\\frac{1}{2}", "0.5")
    assert is_right("\\boxed{\\dfrac{3}{4}}", "3/4")


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
