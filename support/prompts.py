"""JSON Lines to prompts, and to conversations to train on."""
import json
import math
import random
from dataclasses import dataclass

from support import InputError
from support.chat import chat_labels, completion_labels, render_chat

@dataclass
class Prompt:
    messages: list      # [{"role", "content"}, ...], the last one the user's
    answer: str | None  # the gold answer, if the data has one
    text: str           # rendered, as the model reads it
    ids: list


def read_jsonl(path):
    """Yield (where, row) for each line of a JSON Lines file; `where` is "file:line", for messages."""
    try:
        with open(path, "rb") as f:
            for number, line in enumerate(f, 1):
                where = f"{path}:{number}"
                if line.strip():
                    try:
                        row = json.loads(line.decode("utf-8"))
                        json.dumps(row, ensure_ascii=False).encode("utf-8")     # fails on half a surrogate
                    except UnicodeError as e:
                        raise InputError(f"{where}: not valid UTF-8 text ({e.reason})") from None
                    except (ValueError, RecursionError) as e:
                        raise InputError(f"{where}: not valid JSON ({getattr(e, 'msg', e)})") from None
                    if not isinstance(row, dict):
                        raise InputError(f"{where}: must be a JSON object, not {type(row).__name__}")
                    yield where, row
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({e.strerror})") from None


def check_conversation(where, messages):
    """The messages if each is {"role": str, "content": str}, else an InputError that names the line."""
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: \"conversations\" must be a list of messages")
    for m in messages:
        if not (isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)):
            raise InputError(f"{where}: every message needs a \"role\" and a \"content\", both text")
    return messages


def check_vocabulary(where, ids, vocab_size):
    """InputError if a token id has no row in the model's embedding."""
    if max(ids, default=0) >= vocab_size:
        raise InputError(f"{where}: token id {max(ids)} lies outside the model's vocabulary of {vocab_size}; "
                         f"tokenizer and model do not belong together")


def parse_prompt(where, row):
    """One data row of the three formats -> (messages, gold answer or None)."""
    if "conversations" in row:
        messages = check_conversation(where, row["conversations"])
        if messages[-1]["role"] == "assistant":     # MiniMind's rlaif.jsonl ends with an empty assistant turn
            messages = messages[:-1]
        if not messages or messages[-1]["role"] == "system":
            raise InputError(f"{where}: \"conversations\" holds no prompt")
        content, answer = messages[-1]["content"], row.get("answer")
    elif "prompt" in row or "question" in row:
        content, answer = row.get("prompt", row.get("question")), row.get("answer")
        messages = [{"role": "user", "content": content}]
        if "question" in row and isinstance(answer, str) and "####" in answer:      # GSM8K
            answer = answer.rsplit("####", 1)[1]
    else:
        raise InputError(f"{where}: needs \"conversations\", \"prompt\" or \"question\"; "
                         f"found {sorted(row)[:6]}")
    if not isinstance(content, str) or not content.strip():
        raise InputError(f"{where}: the prompt must be text and not empty")
    if isinstance(answer, bool) or not (answer is None or isinstance(answer, (str, int, float))):
        raise InputError(f"{where}: \"answer\" must be text or a number")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise InputError(f"{where}: \"answer\" must be finite, not {answer}")
    return messages, None if answer is None else str(answer).strip()


def read_prompts(path, chat, max_prompt_length, vocab_size, system="", thinking_ratio=1.0):
    """Prompts of a JSON Lines file, encoded; those longer than `max_prompt_length` tokens are left out.

    `thinking_ratio` of the prompts (drawn by line number, the same in every run) end in an open think block.
    Returns (list of Prompt, how many were left out). Raises InputError naming file and line.
    """
    prompts, too_long = [], 0
    for where, row in read_jsonl(path):
        messages, answer = parse_prompt(where, row)
        if system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}] + messages
        try:
            thinking = random.Random(where.rsplit(":", 1)[1]).random() < thinking_ratio
            text, ids = render_chat(chat, messages, thinking)
        except InputError as e:
            raise InputError(f"{where}: {e}") from None
        check_vocabulary(where, ids, vocab_size)
        if len(ids) > max_prompt_length:
            too_long += 1
        else:
            prompts.append(Prompt(messages, answer, text, ids))
    if not prompts:
        raise InputError(f"{path}: no prompt left ({too_long} longer than {max_prompt_length} tokens)")
    return prompts, too_long


def prompt_room(config, max_new_tokens):
    """How many tokens a prompt may have, so that its completion fits into the model's positions, too."""
    room = config.max_position_embeddings - max_new_tokens
    if room < 1:
        raise InputError(f"--max_new_tokens {max_new_tokens} leaves no room for a prompt: the model's "
                         f"max_position_embeddings is {config.max_position_embeddings}")
    return room


def read_eval_prompts(path, *reading):
    """Held-out prompts as `read_prompts` reads them, each with its answer; none if `path` is empty."""
    prompts = read_prompts(path, *reading)[0] if path else []
    if any(p.answer is None for p in prompts):
        raise InputError(f"{path}: every held-out row needs an answer")
    return prompts


def read_rows(path, chat, max_length, vocab_size):
    """(ids, labels) of each row of an SFT file: {"conversations"} or {"prompt", "completion"}.

    Returns (rows, how many were left out: longer than max_length tokens, or without a trained token).
    """
    turn = render_chat(chat, [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}], False,
                       False)
    end_id = next((i for i in reversed(turn[1]) if i in chat.eos_ids), chat.eos_ids[0])
    rows, left_out = [], 0
    for where, row in read_jsonl(path):
        if "conversations" in row:
            read, given = chat_labels, [check_conversation(where, row["conversations"])]
        elif all(isinstance(row.get(key), str) and row[key].strip() for key in ("prompt", "completion")):
            read, given = completion_labels, [row["prompt"], row["completion"], end_id]
        else:
            raise InputError(f"{where}: needs \"conversations\", or \"prompt\" and \"completion\", both "
                             f"text and not empty; found {sorted(row)[:6]}")
        try:
            ids, labels = read(chat, *given)
        except InputError as e:
            raise InputError(f"{where}: {e}") from None
        check_vocabulary(where, ids, vocab_size)
        if len(ids) > max_length or all(label == -100 for label in labels[1:]):
            left_out += 1
        else:
            rows.append((ids, labels))
    if not rows:
        raise InputError(f"{path}: no row left ({left_out} longer than {max_length} tokens or without a "
                         f"trained one)")
    return rows, left_out
