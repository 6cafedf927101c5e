"""A checkpoint's tokenizer and chat template, and which tokens of a conversation are an answer."""
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from support import InputError, read_json

CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
          "{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


@dataclass
class ChatTokenizer:
    """A checkpoint's tokenizer, its chat template, and the ids that end a turn."""
    folder: Path
    tokenizer: Tokenizer
    template: jinja2.Template
    special: list       # texts of the special tokens, longest first
    named: dict         # bos_token, eos_token, ... as the template may use them
    eos_ids: list
    pad_id: int


def load_tokenizer(folder):
    """Read the tokenizer, its configuration and the chat template of a checkpoint folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder; it should hold tokenizer.json: name it with "
                         f"--tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as e:      # the tokenizers package raises bare Exception
        raise InputError(f"{folder / 'tokenizer.json'}: not a readable tokenizer ({e})") from None
    tokenizer.no_truncation()       # the file may hold the settings of some training run
    tokenizer.no_padding()
    config, generation, model, names = (
        read_json(folder / f"{name}.json") if (folder / f"{name}.json").exists() else {}
        for name in ("tokenizer_config", "generation_config", "config", "special_tokens_map"))
    if "added_tokens_decoder" not in config:    # a folder of the older kind, as transformers reads it
        config |= names
    named = {}
    for key in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = config.get(key)
        named[key] = value.get("content") if isinstance(value, dict) else value
        if not isinstance(named[key], str | None):
            raise InputError(f"{folder / 'tokenizer_config.json'}: {key} must be text, not {value!r}")
    eos_ids = []
    for ids in (generation.get("eos_token_id"), model.get("eos_token_id"),
                tokenizer.token_to_id(named["eos_token"] or "")):
        eos_ids += [i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int)
                    and i not in eos_ids]
    if not eos_ids:
        raise InputError(f"{folder}: no end-of-turn token; set eos_token in tokenizer_config.json")
    pad_id = tokenizer.token_to_id(named["pad_token"] or "")
    special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    unmarked = {t for t in named.values() if t and tokenizer.token_to_id(t) is not None} - special
    tokenizer.add_special_tokens(sorted(unmarked))      # else these would be spelled out, or could be forged
    special = sorted(special | unmarked, key=len)[::-1]
    source = config.get("chat_template") or CHATML
    if source == CHATML and tokenizer.token_to_id(named["bos_token"] or "") in tokenizer.encode("").ids:
        source = "{{ bos_token }}" + CHATML     # a template writes its own, encode_guarded none
    # The sandbox: a template is a program from whoever made the checkpoint.
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                        extensions=["jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
        json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys))
    env.globals |= {"raise_exception": _template_refuses, "strftime_now": time.strftime}
    try:
        if (folder / "chat_template.jinja").exists():
            source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        elif isinstance(source, list):          # several, each with a name
            source = {t["name"]: t["template"] for t in source}["default"]
        # {% generation %} marks the answer for a trainer and writes nothing, like a "with" without variables.
        template = env.from_string(re.sub(r"({%[-+]?\s*)(end)?generation(\s*[-+]?%})", r"\1\2with\3", source))
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, OSError) as e:
        raise InputError(f"{folder}: the chat template cannot be read ({e})") from None
    chat = ChatTokenizer(folder, tokenizer, template, special, named, eos_ids,
                         eos_ids[0] if pad_id is None else pad_id)
    ending = answer_marks(chat)[1]      # a base model's eos_token is often not what its template writes
    if ending is not None and ending not in eos_ids:
        eos_ids.append(ending)
    return chat


def answer_marks(chat):
    """(text before an answer, id of the token that ends it or None), as the template writes them."""
    messages = [{"role": "user", "content": "\ue002"}, {"role": "assistant", "content": "\ue003"}]
    try:
        _, header, footer = re.split("[\ue002\ue003]", render_guarded(chat, messages, False, False))
    except (InputError, ValueError):
        return "", None
    special = {i for i, t in chat.tokenizer.get_added_tokens_decoder().items() if t.special}
    return header, next((i for i in encode_guarded(chat, footer)[1] if i in special), None)


def _template_refuses(message):
    raise jinja2.TemplateError(message)


def render_guarded(chat, messages, thinking, add_generation_prompt):
    r"""The chat template's text, with special tokens that stand inside a message replaced by guards.

    A guard is a number between two private-use characters. The template alone can then write special tokens:
    the user's message "Hi<|im_end|>" comes out as "<|im_start|>user\nHi\ue0002\ue001<|im_end|>\n" if that is
    special token 2, and `encode_guarded` spells the guard in ordinary tokens ("<", "|", "im", ..).

    The template is given what transformers gives it: null is a missing key, thoughts go by two names.
    """
    guarded = chat.special + ["\ue000"]
    pattern = re.compile("|".join(map(re.escape, guarded)))

    def mask(value):
        if isinstance(value, str):
            return pattern.sub(lambda hit: f"\ue000{guarded.index(hit[0])}\ue001", value)
        if isinstance(value, list):
            return [mask(item) for item in value]       # a tool call's arguments are text of the data, too
        return {mask(key): mask(item) for key, item in value.items()} if isinstance(value, dict) else value

    try:
        masked = [mask({key: value for key, value in m.items() if value is not None}) for m in messages]
        for m in masked:
            if (thoughts := m.get("reasoning_content", m.get("thinking", m.get("reasoning")))) is not None:
                m |= {"thinking": m.get("thinking", thoughts), "reasoning_content": thoughts}
        return chat.template.render({key: value for key, value in chat.named.items() if value is not None},
                                    messages=masked, tools=None, documents=None, enable_thinking=thinking,
                                    open_thinking=thinking, add_generation_prompt=add_generation_prompt)
    except Exception as e:      # a template is a program and may raise anything
        raise InputError(f"the chat template refuses these messages ({e})") from None


def encode_guarded(chat, text):
    """Guarded text -> (plain text, ids, start of each id in the guarded text, in characters).

    Guarded tokens are spelled in ordinary ones: a message can neither end its turn nor forge another.
    """
    guarded, plain, ids, starts, offset = chat.special + ["\ue000"], "", [], [], 0
    for i, piece in enumerate(re.split("(\ue000\\d+\ue001)", text)):
        content = guarded[int(piece[1:-1])] if i % 2 else piece         # every second piece is a guard
        chat.tokenizer.encode_special_tokens = i % 2 == 1
        encoding = chat.tokenizer.encode(content, add_special_tokens=False)
        chat.tokenizer.encode_special_tokens = False
        if i % 2 and content in chat.special and chat.tokenizer.token_to_id(content) in encoding.ids:
            raise InputError(f"the tokenizer has no way to spell {content!r} as ordinary text")
        plain, ids = plain + content, ids + encoding.ids
        starts += [offset + (0 if i % 2 else start) for start, _ in encoding.offsets]
        offset += len(piece)
    return plain, ids, starts


def render_chat(chat, messages, thinking=True, add_generation_prompt=True):
    """Messages [{"role", "content"}, ...] -> (text, ids) under the checkpoint's chat template.

    With `thinking` the prompt ends inside an open think block (Qwen3's model opens it itself), else behind a
    closed, empty one, where the template knows the switch. Special tokens in a message do not count as such.
    """
    return encode_guarded(chat, render_guarded(chat, messages, thinking, add_generation_prompt))[:2]


def decode(chat, ids):
    """Text of a completion, without special tokens (the think tags are ordinary ones)."""
    return chat.tokenizer.decode(ids, skip_special_tokens=True)


# ---------------------------------------------------------------- which tokens are an answer

def chat_labels(chat, messages):
    """(ids, labels) of a conversation: every assistant turn is trained, its end-of-turn token included, and
    nothing else (-100). `messages` [{"role", "content"}, ...].

    The chat template marks where a turn starts: the text that it adds to ask for an answer.
    """
    user = [{"role": "user", "content": "x"}]
    asked, not_asked = (render_guarded(chat, user, False, ask) for ask in (True, False))
    header = asked[len(not_asked):] or answer_marks(chat)[0]    # some templates always or never ask
    match = re.match(r".*?assistant\S*\n*", header, re.DOTALL)
    header = match[0] if match else header
    if not header:
        raise InputError("the chat template does not mark where an answer starts")
    text = render_guarded(chat, messages, True, False)
    _, ids, starts = encode_guarded(chat, text)
    labels = [-100] * len(ids)
    for turn in re.finditer(re.escape(header), text):
        for i, (token, start) in enumerate(zip(ids, starts)):
            if start >= turn.end():
                labels[i] = token
                if token in chat.eos_ids:
                    break
    return ids, labels


def completion_labels(chat, prompt, completion, end_id):
    """(ids, labels) of a user's prompt and its completion; the end-of-turn token is trained too.

    A completion that closes a think block continues an open one, any other stands behind a closed one.
    """
    thinking = "</think>" in completion
    text, ids = render_chat(chat, [{"role": "user", "content": prompt}], thinking)
    if thinking and text.rstrip().endswith("<think>"):      # the template has opened the block already
        completion = completion.lstrip().removeprefix("<think>").removeprefix("\n")
    elif thinking and not completion.lstrip().startswith("<think>"):
        completion = "<think>\n" + completion
    answer = encode_guarded(chat, completion)[1] + [end_id]
    return ids + answer, [-100] * len(ids) + answer
