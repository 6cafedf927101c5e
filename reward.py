"""Rewards: each term a plain function of text, their weighted sum, and the held-out accuracy.

The format terms are MiniMind's rules, in characters, with every bound an argument. A reward is a training
target, not the truth: read samples.jsonl next to the curves. To add a term of your own, write a function and
one line in `reward_terms`, or leave this file alone and name yours with --reward_fn.
"""
import importlib.util
import inspect
import math
import re
import unicodedata
from fractions import Fraction

import torch

from model import InputError, load_checkpoint, over_ranks
from rollout import (decode, generate, load_tokenizer, micro_batches, render_chat, rollout_policy,
                     step_generator)

# ---------------------------------------------------------------- the think block

def split_thinking(completion, prompt=""):
    """(thought, answer part) of a completion; thought is None without a closed think block.

    `prompt` is the rendered prompt: it may end inside an open think block (then a completion without
    `</think>` has no answer part yet) or behind a closed one (then all of the completion is the answer,
    whatever tags it holds).
    """
    if prompt.rstrip().endswith("</think>"):
        return None, completion
    if "</think>" in completion:
        thought, answer = completion.split("</think>", 1)
        return thought.strip().removeprefix("<think>").strip(), answer.strip()
    if prompt.rstrip().endswith("<think>") or completion.lstrip().startswith("<think>"):
        return None, ""
    return None, completion


def length_reward(completion, low=20, high=800, value=0.5):
    """+value if the completion, stripped, has low..high characters, else -value."""
    return value if low <= len(completion.strip()) <= high else -value


def thinking_reward(completion, prompt="", low=20, high=300, good=1.0, bad=-0.5, once=0.25):
    """0 without a closed think block; else `good` if the thought has low..high characters and an answer
    follows, or `bad`; plus `once` if `</think>` stands exactly once, else minus `once`.
    """
    thought, answer = split_thinking(completion, prompt)
    if thought is None:
        return 0.0
    size = good if low <= len(thought) <= high and answer.replace("</think>", "").strip() else bad
    return size + (once if completion.count("</think>") == 1 else -once)


# A word, but scripts written without spaces count by the character: kana, Han (with extensions), Hangul,
# Thai.
UNSPACED = ("\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
            "\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff")
WORD = re.compile(f"[{UNSPACED}]|[^\\W{UNSPACED}]+|[^\\w\\s]")


def repetition_penalty(text, n=3, cap=0.5):
    """0 for text that repeats no n-gram of words, up to `cap` where half of them or more are repeats."""
    words = WORD.findall(text.lower())
    grams = [tuple(words[i:i + n]) for i in range(len(words) - n + 1)]
    return min(cap, 2 * cap * (len(grams) - len(set(grams))) / len(grams)) if grams else 0.0


# ---------------------------------------------------------------- the answer

# Numbers are found in linear time: first whole runs of digits and what binds them, then a look at each run.
RUN = re.compile(r"[\d.,/^*]+", re.ASCII)
NUMBER = re.compile(r"((\d{1,3}([, ]\d{3})+|\d+)(\.\d+)?|\.\d+)(/\d+)?", re.ASCII)
LONGEST_NUMBER = 100    # digits; longer ones are compared as text, so that no answer costs time
LONGEST_TEXT = 100_000  # characters; of a longer text only the end is read
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
    text = text[-LONGEST_TEXT:]
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
    """The number in the run text[start:end], with its sign, currency and percent sign, or None if it is a
    piece of something else: of a word, a version, a power, a product ("9**9"), or 1e5.
    """
    before, after = text[max(0, start - 4):start], text[end:end + 3]
    run = text[start:end].rstrip(".,/*^")
    core, in_word = run.lstrip(".,*"), re.search(r"[A-Za-z0-9_)]$", before)
    if run[:1] == "^" or in_word and run[:1] in ("*", "/"):
        return None
    if run == "." + core and not in_word:
        core = run                                              # ".5", but not "...72" or "No.5"
    core = core.rsplit(",", 1)[-1] if not NUMBER.fullmatch(core) else core      # "1,2,3" is a list
    part_of_word = run == core and in_word and in_word[0] != ")" or re.match(r"[eE][-+]?\d", after)
    if part_of_word or not NUMBER.fullmatch(core):
        return None
    # a sign counts where nothing stands before it that it could subtract from
    sign = re.search(r"(?:^|[^A-Za-z0-9_)\]])([-+]?[$€£¥] ?|[$€£¥]?[-+])$", before)
    return (sign[1] if sign else "") + core + ("%" if after[:1] == "%" else "")


def _numbers(text, last_first=False):
    """The numbers that stand alone in a text, in order or from the last."""
    runs = [m.span() for m in RUN.finditer(text)]
    found = (_number_at(text, *span) for span in (reversed(runs) if last_first else runs))
    return (number for number in found if number is not None)


def _lone_number(text):
    """The number of an answer that is just one with its unit or words ("72 clips", "x = 5"), or None."""
    text = _plain(text)
    number = next(_numbers(text), None)
    return None if number is None or FORMULA.search(text.replace(number, "#", 1)) else number


def _boxed(text):
    """Content of the last \\boxed{...}, braces matched, or None."""
    start = text.rfind("\\boxed{")
    depth = 0
    for i in range(start + 6, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 7:i]
    return None


def _committed(text):
    """What `extract_answer` finds, with its percent sign."""
    text = _normal(text)
    start, end = text.rfind("<answer>"), text.rfind("</answer>")
    tagged = 0 <= start < end
    if tagged:
        text = text[start + 8:end]
    boxed = _boxed(text)
    if tagged or boxed is not None:
        return (text if boxed is None else boxed).strip() or None
    _, marked, behind = text.rpartition("####")
    behind = _plain(behind)
    return next(_numbers(behind, last_first=not marked), behind if marked else None) or None


def extract_answer(text):
    """The answer that a text commits to, as a string, or None: the last `<answer>..</answer>` and the last
    \\boxed{..} in it or in the text, else the number behind the last `####`, else the last number that stands
    alone. A percent sign is left off.
    """
    found = _committed(text)
    return found and (found.rstrip("\\% ") or None)


def _value(text):
    """The number that a plain text is, as (written, meant): 50% is (50, 1/2). None if it is no number.
    Exact, and nothing is evaluated.
    """
    if len(text) > LONGEST_NUMBER:
        return None
    text = re.sub(r"\s*/\s*", "/", text.rstrip("$€£¥元 "))
    sign, digits, percent = re.fullmatch(r"([-+$€£¥\s]*)(.*?)(%?)", text, re.DOTALL).groups()
    if not digits or not NUMBER.fullmatch(digits) or sign.count("-") + sign.count("+") > 1:
        return None
    top, _, bottom = re.sub("[, ]", "", digits).partition("/")
    if bottom and int(bottom) == 0:
        return None
    value = Fraction(top) / Fraction(bottom or 1) * (-1 if "-" in sign else 1)
    return value, value / 100 if percent else value


def same_answer(given, gold):
    """Equal as numbers where both are numbers, else equal as trimmed, case-folded text. 50% is 0.5, and also
    50: a question that asks for a percentage has named the unit.
    """
    given, gold = _plain(given), _plain(gold)
    a, b = _value(given), _value(gold)
    if a is not None and b is not None:
        return a[0] == b[0] or a[1] == b[1]
    return given.casefold().split() == gold.casefold().split()


def answer_reward(completion, answer, prompt=""):
    """1.0 if the answer part commits to the gold `answer`, else 0.0. Thoughts are not searched."""
    gold = _plain(answer or "")
    if not gold:
        return 0.0
    text = split_thinking(completion, prompt)[1]
    if _value(gold) is None and same_answer(text, answer):
        return 1.0      # a gold answer in words, given with nothing around it
    given = _committed(text)
    readings = given, given and _lone_number(given)     # as it stands, and as the one number in it
    return float(any(r is not None and same_answer(r, answer) for r in readings))


# ---------------------------------------------------------------- the sum

def reward_terms(completion, answer, prompt=""):
    """Every term of one completion by name. A term of your own is one more line here: a number made from the
    completion (may be empty), the gold answer (None where the data has none) and the rendered prompt.
    """
    return {
        "answer": answer_reward(completion, answer, prompt),
        "length": length_reward(completion),
        "thinking": thinking_reward(completion, prompt),
        "repetition": 0.0 - repetition_penalty(split_thinking(completion, prompt)[1]),
    }


TERMS = tuple(reward_terms("", None))      # their names


def parse_weights(text, names=TERMS):
    """"answer=1,length=0.5" -> {"answer": 1.0, "length": 0.5}; terms not in `names` are an InputError."""
    weights = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        try:
            weights[name.strip()] = float(value)
        except ValueError:
            raise InputError(f"--reward_weights: {part!r} is not NAME=NUMBER") from None
        if name.strip() not in names or not math.isfinite(weights[name.strip()]):
            raise InputError(f"--reward_weights: {part!r}: terms are {', '.join(names)}, weights are finite")
    return weights


def compute_rewards(completions, answers, prompts, weights=None, further=None):
    """Score N completions -> (rewards [N] fp32, list of N dicts of unweighted terms).

    `prompts` are the rendered texts; `further` {name: N numbers} are terms that come from elsewhere. reward =
    sum over terms of weight * term; a term that `weights` leaves out weighs 1. A NaN or infinite term is an
    InputError that names it and the completion: it would poison its whole group.
    """
    weights = weights or {}
    terms = [reward_terms(c, a, p) for c, a, p in zip(completions, answers, prompts)]
    for name, values in (further or {}).items():
        for row, value in zip(terms, values):
            row[name] = value
    for row, completion in zip(terms, completions):
        for name, value in row.items():
            try:
                value = row[name] = float(value)
            except (TypeError, ValueError):
                raise InputError(f"reward term {name!r} is {value!r}, not a number, for the completion "
                                 f"{completion[:200]!r}") from None
            if not math.isfinite(value):
                raise InputError(f"reward term {name!r} is {value} for the completion {completion[:200]!r}")
    rewards = torch.tensor([sum(weights.get(n, 1.0) * v for n, v in row.items()) for row in terms])
    if not rewards.isfinite().all():
        raise InputError(f"a reward is too large for fp32 under the weights {weights}")
    return rewards, terms


def evaluate(model, chat, prompts, max_new_tokens, temperature, seed, rank=0, world=1, batch_size=256):
    """Share of `prompts` (list of Prompt) answered rightly by one sample each; greedy at temperature 0.

    Its noise depends on `seed` and a prompt's place alone: measuring changes nothing in the run, and however
    many processes share the work the result is the same.
    """
    noise = torch.rand(len(prompts), max_new_tokens, dtype=torch.float64,
                       generator=step_generator(seed, 0, stream=2))
    right = 0.0
    for i in range(rank * batch_size, len(prompts), world * batch_size):
        batch = prompts[i:i + batch_size]
        rollout = generate(model, [p.ids for p in batch], 1, max_new_tokens, chat.eos_ids, chat.pad_id,
                           temperature, noise=noise[i:i + batch_size])
        texts = completion_texts(chat, rollout)
        right += sum(answer_reward(text, p.answer, p.text) for text, p in zip(texts, batch))
    return over_ranks([right])[0] / len(prompts)


def completion_texts(chat, rollout):
    """The N completions of a rollout as text, the end-of-turn token left off."""
    return [decode(chat, ids[:n]) for ids, n in zip(rollout.completion_ids.tolist(),
                                                   rollout.completion_mask.sum(dim=1).tolist())]


# ---------------------------------------------------------------- a reward model, a function of your own

@torch.no_grad()
def reward_model_scores(model, chat, conversations, token_budget=16384):
    """The score of each conversation (a list of {"role", "content"}), read at its last token -> [N] fp32.

    `model` has a score head, `chat` is its own tokenizer and template.
    """
    rows = [render_chat(chat, messages, add_generation_prompt=False)[1] for messages in conversations]
    device, scores = next(model.parameters()).device, torch.zeros(len(rows))
    for part in micro_batches([len(ids) for ids in rows], token_budget):
        T = max(len(rows[i]) for i in part)
        ids = torch.tensor([rows[i] + [0] * (T - len(rows[i])) for i in part]).to(device)     # [b,T]
        last = torch.tensor([len(rows[i]) - 1 for i in part]).to(device)
        every = model(ids, right_padded=True).squeeze(2)    # [b,T]; causal: padding behind changes nothing
        scores[part] = every.gather(1, last[:, None]).squeeze(1).float().cpu()
    return scores


def load_reward_fn(where):
    """`file.py:name` -> that function of (messages, completion, answer), or of (messages, completions,
    answers), lists, if its second parameter is called `completions`. -> score(prompts, completions) -> N
    numbers.
    """
    file, _, name = where.rpartition(":")
    try:
        module = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location("fn", file))
        spec.loader.exec_module(module)
        function = getattr(module, name)
        in_lists = list(inspect.signature(function).parameters)[1] == "completions"
    except Exception as e:      # whatever a user's file may raise
        raise InputError(f"--reward_fn {where}: must be FILE.py:FUNCTION of (messages, completion, answer) "
                         f"({type(e).__name__}: {e})") from None

    def values_of(rows):
        return list(function(*map(list, zip(*rows)))) if in_lists else [function(*row) for row in rows]

    def score(prompts, completions):
        rows = [(p.messages, c, p.answer) for p, c in zip(prompts, completions)]
        try:
            values = values_of(rows)
        except Exception as e:
            why, culprit = e, completions[0]
            for row in rows:        # which one was it? The first that fails alone
                try:
                    values_of([row])
                except Exception as e:
                    why, culprit = e, row[1]
                    break
            raise InputError(f"--reward_fn {where}: {type(why).__name__}: {why}, for the completion "
                             f"{culprit[:200]!r}") from None
        if len(values) != len(rows):
            raise InputError(f"--reward_fn {where}: {len(values)} values for {len(rows)} completions")
        return values
    return score


def load_scorers(reward_model, reward_fn, clip, device, dtype, token_budget):
    """The terms that --reward_model and --reward_fn ask for, by name: functions of N Prompts and N
    completions that give N numbers. The reward model reads the messages and the answer, without the think
    block.
    """
    scorers = {}
    if reward_model:
        chat = load_tokenizer(reward_model)
        model = rollout_policy(load_checkpoint(reward_model, score_head=True).to(device), dtype).eval()

        def by_model(prompts, completions):
            conversations = [p.messages + [{"role": "assistant", "content": split_thinking(c, p.text)[1]}]
                             for p, c in zip(prompts, completions)]
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                scores = reward_model_scores(model, chat, conversations, token_budget)
            return scores.clamp(-clip, clip).tolist()       # a NaN stays one, and is refused by name

        scorers["model"] = by_model
    if reward_fn:
        scorers["fn"] = load_reward_fn(reward_fn)
    return scorers
