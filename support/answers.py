"""Find the answer that a text commits to, bring it to a normal form, compare. Nothing is ever evaluated."""
import re
import unicodedata
from fractions import Fraction

# Numbers are found in linear time: first whole runs of digits and what binds them, then a look at each run.
RUN = re.compile(r"[\d.,/^*]+", re.ASCII)
NUMBER = re.compile(r"((\d{1,3}([, ]\d{3})+|\d+)(\.\d+)?|\.\d+)(/\d+)?", re.ASCII)
SIGNS = str.maketrans("\u2212\u2013\u8d1f\u2044", "---/")      # minus, en dash, Chinese minus, fraction slash

# What LaTeX and Markdown put around an answer, as plain characters; applied in this order.
PLAIN = [(re.compile(pattern, re.ASCII), plain) for pattern, plain in (
    (r"\\[dtc]?frac(?:\{(-?\d+)\}\{(\d+)\}|(\d)(\d))", r"\1\3/\2\4"),           # \frac{1}{2}, \frac12: 1/2
    (r"(?<![\d.,/^])(\d{1,9}) (\d{1,9})/(\d{1,9})(?![\d/])",                    # 1 1/2: 3/2
     lambda m: f"{int(m[1]) * int(m[3]) + int(m[2])}/{m[3]}"),
    (r"\^(\\circ|\{\\circ\})", "°"),
    (r"([\^_])\{", r"\1"),                                                      # 2^{10} is no 10
    (r"\\(?=[$%])", ""),
    (r"\\((text|math)[a-z]*|[()\[\],;:! ])|[{}]", " "),                         # 5\text{ cm}, \(5\)
    (r" {1,3}%", "%"),
    (r"(?<![\w*)])\*\*(?=\S)|(?<=\S)\*\*(?![\w*(])", ""),                       # **18**, but not 9**9
)]
# What stands beside a number (here #) in a formula, a bound or a list, but not in "# clips" or "x = #".
FORMULA = re.compile(r"[\\*+<>|±×÷·√π∞≤≥≠]|-(?![a-z]{2})|(?<![\w^])\d|#[ /]*([!^]|[iknxyz](?![A-Za-z]))",
                     re.ASCII)


def _normal(text):
    """Full-width forms to ASCII, every minus to a hyphen, outer white space off."""
    text = text[-100_000:]      # of a longer text only the end is read: no answer costs time
    # an exponent or a fraction must not melt into the digits before it: 5\u00b2 is not 52
    text = re.sub("(?<=\\d)(?=[\u2070\u00b9\u00b2\u00b3\u2074-\u2079])", "^", text)
    text = re.sub("(?<=\\d)(?=[\u00bc-\u00be\u2150-\u215e]|\\\\[dtc]?frac)", " ", text)
    # 1{,}234, 1\,234 or a space that does not break; a plain one could be a list's
    text = re.sub("(?<=\\d)(\\{,\\}|,?\\\\[,!]|[\u00a0\u2009\u202f])(?=\\d{3})", ",", text)
    return unicodedata.normalize("NFKC", text).translate(SIGNS).strip()


def _plain(text):
    """A text without its LaTeX, its Markdown and the full stop at its end."""
    text = _normal(text)
    for pattern, plain in PLAIN:
        text = pattern.sub(plain, text)
    return text.strip("$*` \n").rstrip(".。")


def _number_at(text, start, end):
    """The number in the run text[start:end], with sign, currency and percent sign, or None if it is a piece
    of something else: of a word, a version, a power, a product ("9**9"), or 1e5.
    """
    before, after = text[max(0, start - 4):start], text[end:end + 3]
    run = text[start:end].rstrip(".,/*^")
    core, in_word = run.lstrip(".,*"), re.search(r"[A-Za-z0-9_)]$", before)
    broken = run[:1] == "^" or in_word and run[:1] in ("*", "/")
    if run == "." + core and not in_word:
        core = run                                              # ".5", but not "...72" or "No.5"
    core = core.rsplit(",", 1)[-1] if not NUMBER.fullmatch(core) else core      # "1,2,3" is a list
    part_of_word = run == core and in_word and in_word[0] != ")" or re.match(r"[eE][-+]?\d", after)
    if broken or part_of_word or not NUMBER.fullmatch(core):
        return None
    # a sign counts where nothing stands before it that it could subtract from
    sign = re.search(r"(?:^|[^A-Za-z0-9_)\]])([-+]?[$€£¥] ?|[$€£¥]?[-+])$", before)
    return (sign[1] if sign else "") + core + ("%" if after[:1] == "%" else "")


def _numbers(text, last_first=False):
    """The numbers that stand alone in a text, in order or from the last."""
    runs = list(RUN.finditer(text))[::-1 if last_first else 1]
    return (number for m in runs if (number := _number_at(text, *m.span())) is not None)


def find_answer(text):
    """The answer that a text commits to, or None: the last `<answer>..</answer>` and the last \\boxed{..} in
    it or in the text, else the number behind the last `####`, else the last number that stands alone.
    """
    text = _normal(text)
    start, end = text.rfind("<answer>"), text.rfind("</answer>")
    tagged = 0 <= start < end
    text = text[start + 8:end] if tagged else text
    start, depth = text.rfind("\\boxed{"), 0
    for i in range(start + 6, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:      # the brace that closes the box
            return text[start + 7:i].strip() or None
    if tagged:
        return text.strip() or None
    _, marked, behind = text.rpartition("####")
    behind = _plain(behind)
    return next(_numbers(behind, last_first=not marked), behind if marked else None) or None


def _value(text):
    """The number that a plain text is, exactly, as (written, meant): 50% is (50, 1/2). None if it is none."""
    text = re.sub(r"\s*/\s*", "/", text.rstrip("$€£¥元 ")) if len(text) <= 100 else ""      # longer: text
    sign, digits, percent = re.fullmatch(r"([-+$€£¥\s]*)(.*?)(%?)", text, re.DOTALL).groups()
    top, _, bottom = re.sub("[, ]", "", digits).partition("/")
    if not NUMBER.fullmatch(digits) or sign.count("-") + sign.count("+") > 1 or bottom and int(bottom) == 0:
        return None
    value = Fraction(top) / Fraction(bottom or 1) * (-1 if "-" in sign else 1)
    return value, value / 100 if percent else value


def same_answer(given, gold):
    """Equal as numbers where both are, else as trimmed, case-folded text. 50% is 0.5, and 50: a question that
    asks for a percentage has named the unit."""
    given, gold = _plain(given), _plain(gold)
    a, b = _value(given), _value(gold)
    if a is not None and b is not None:
        return a[0] == b[0] or a[1] == b[1]
    return given.casefold().split() == gold.casefold().split()


def is_right(text, gold):
    """Whether a text commits to the gold answer: as it stands, or as the one number in it with its unit or
    words ("72 clips", "x = 5"). A gold answer in words also counts given with nothing around it."""
    worded = _value(_plain(gold)) is None and same_answer(text, gold)
    given = find_answer(text) or ""
    number = next(_numbers(_plain(given)), "")
    alone = not FORMULA.search(_plain(given).replace(number, "#", 1)) and same_answer(number, gold)
    return _plain(gold) != "" and (worded or same_answer(given, gold) or alone)
