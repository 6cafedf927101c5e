"""Rewards: each term a plain function of text, their weighted sum, and the held-out accuracy.

The format terms are MiniMind's rules, in characters, with every bound an argument. A reward is a training
target, not the truth: read samples.jsonl next to the curves. To add a term of your own, write a function and
one line in `reward_terms`, or leave this file alone and name yours with --reward_fn.
"""
import importlib.util
import inspect
import math
import re
import traceback
from pathlib import Path

import torch

from rollout import generate, micro_batches, rollout_policy
from support import InputError
from support.answers import is_right
from support.chat import decode, load_tokenizer, render_chat
from support.checkpoint import load_checkpoint
from support.run import all_reduce, rng_for

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


# Scripts written without spaces count by the character: Thai, kana, Han and extensions, Hangul.
UNSPACED = ("\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
            "\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff")
WORD = re.compile(f"[{UNSPACED}]|[^\\W{UNSPACED}]+|[^\\w\\s]")


def repetition_penalty(text, n=3, cap=0.5):
    """0 for text that repeats no n-gram of words, up to `cap` where half of them or more are repeats."""
    words = WORD.findall(text.lower())
    grams = [tuple(words[i:i + n]) for i in range(len(words) - n + 1)]
    return min(cap, 2 * cap * (len(grams) - len(set(grams))) / len(grams)) if grams else 0.0


def answer_reward(completion, answer, prompt=""):
    """1.0 if the answer part commits to the gold `answer`, else 0.0. Thoughts are not searched."""
    return float(answer is not None and is_right(split_thinking(completion, prompt)[1], answer))


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


TERM_NAMES = tuple(reward_terms("", None))


def parse_weights(text, names=TERM_NAMES):
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


def compute_rewards(completions, answers, prompts, weights=None, extra_terms=None):
    """Score N completions -> (rewards [N] fp32, list of N dicts of unweighted terms).

    `prompts` are the rendered texts; `extra_terms` {name: N numbers} are terms that come from elsewhere.
    reward = sum over terms of weight * term; a term that `weights` leaves out weighs 1. A NaN or infinite
    term is an InputError that names it and the completion: it would poison its whole group.
    """
    weights, extra_terms = weights or {}, extra_terms or {}
    terms = [{**reward_terms(c, a, p), **{name: values[i] for name, values in extra_terms.items()}}
             for i, (c, a, p) in enumerate(zip(completions, answers, prompts))]
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


def reward_metrics(rewards, terms, num_generations):
    """Means of a batch's rewards and terms, and the share of groups of equal rewards: they teach nothing."""
    spread = rewards.view(-1, num_generations).std(dim=1)                           # [B]
    means = {f"reward_{name}": sum(row[name] for row in terms) / len(terms) for name in terms[0]}
    return {"reward": rewards.mean().item(), **means, "accuracy": means["reward_answer"],
            "zero_std_fraction": (spread < 1e-6).float().mean().item()}


# ---------------------------------------------------------------- held-out accuracy

def evaluate(model, tokenizer, prompts, *, max_new_tokens, temperature, seed, rank=0, world=1,
             batch_size=256):
    """Share of `prompts` (list of Prompt) answered rightly by one sample each; greedy at temperature 0.

    Its noise depends on `seed` and a prompt's place alone: measuring changes nothing in the run, and however
    many processes share the work the result is the same.
    """
    noise = torch.rand(len(prompts), max_new_tokens, dtype=torch.float64,
                       generator=rng_for(seed, 0, "evaluation"))
    right = 0.0
    for i in range(rank * batch_size, len(prompts), world * batch_size):
        batch = prompts[i:i + batch_size]
        rollout = generate(model, [p.ids for p in batch], 1, max_new_tokens, tokenizer.eos_ids,
                           tokenizer.pad_id, temperature, noise=noise[i:i + batch_size])
        right += sum(answer_reward(text, p.answer, p.text)
                     for text, p in zip(completion_texts(tokenizer, rollout), batch))
    return all_reduce([right])[0] / len(prompts)


def completion_texts(tokenizer, rollout):
    """The N completions of a rollout as text, the end-of-turn token left off."""
    return [decode(tokenizer, ids[:n]) for ids, n in zip(rollout.completion_ids.tolist(),
                                                         rollout.completion_mask.sum(dim=1).tolist())]


# ---------------------------------------------------------------- a reward model, a function of your own

@torch.no_grad()
def reward_model_scores(model, tokenizer, conversations, token_budget=16384):
    """The score of each conversation (a list of {"role", "content"}), read at its last token -> [N] fp32.

    `model` has a score head, `tokenizer` is its own, with its template.
    """
    rows = [render_chat(tokenizer, messages, add_generation_prompt=False)[1] for messages in conversations]
    if (longest := max(map(len, rows))) > (most := model.config.max_position_embeddings):
        raise InputError(f"--reward_model: {longest} tokens exceed its max_position_embeddings {most}")
    device, scores = next(model.parameters()).device, torch.zeros(len(rows))
    for part in micro_batches([len(ids) for ids in rows], token_budget):
        T = max(len(rows[i]) for i in part)
        ids = torch.tensor([rows[i] + [0] * (T - len(rows[i])) for i in part]).to(device)     # [b,T]
        last = torch.tensor([len(rows[i]) - 1 for i in part]).to(device)
        every = model(ids, right_padded=True).squeeze(2)    # [b,T]; causal: padding behind changes nothing
        scores[part] = every.gather(1, last[:, None]).squeeze(1).float().cpu()
    return scores


def user_error(error, file):    # with the last line of the user's file that it passed through
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return (f"{file}:{lines[-1]}: " if lines else "") + f"{type(error).__name__}: {error}"


def load_reward_fn(where):
    """`file.py:name`, a function of (messages, completion, answer), or of lists (messages, completions,
    answers) if its second parameter is called so -> score(prompts, completions) -> N numbers.
    """
    file, _, name = where.rpartition(":")
    file = str(Path(file).resolve())
    try:
        module = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location("fn", file))
        spec.loader.exec_module(module)
        function = getattr(module, name)
        in_lists = list(inspect.signature(function).parameters)[1] == "completions"
    except Exception as e:      # whatever a user's file may raise
        raise InputError(f"--reward_fn {where}: must be FILE.py:FUNCTION of (messages, completion, answer) "
                         f"({user_error(e, file)})") from None

    def score(prompts, completions):
        rows = [(p.messages, c, p.answer) for p, c in zip(prompts, completions)]
        try:
            values = list(function(*map(list, zip(*rows)))) if in_lists else [function(*row) for row in rows]
        except Exception as e:
            raise InputError(f"--reward_fn {where}: {user_error(e, file)}") from None
        if len(values) != len(rows):
            raise InputError(f"--reward_fn {where}: {len(values)} values for {len(rows)} completions")
        return values
    return score


def load_extra_terms(reward_model, reward_fn, clip, device, dtype, token_budget):
    """The terms that --reward_model and --reward_fn ask for, by name: functions of N Prompts and N
    completions that give N numbers. The reward model reads the messages and the answer, without the think
    block.
    """
    terms = {}
    if reward_model:
        tokenizer = load_tokenizer(reward_model)
        model = rollout_policy(load_checkpoint(reward_model, score_head=True).to(device), dtype).eval()

        def by_model(prompts, completions):
            conversations = [p.messages + [{"role": "assistant", "content": split_thinking(c, p.text)[1]}]
                             for p, c in zip(prompts, completions)]
            with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=dtype == torch.bfloat16):
                scores = reward_model_scores(model, tokenizer, conversations, token_budget)
            return scores.clamp(-clip, clip).tolist()       # a NaN stays one, and is refused by name

        terms["model"] = by_model
    if reward_fn:
        terms["fn"] = load_reward_fn(reward_fn)
    return terms
