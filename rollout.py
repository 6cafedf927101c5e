"""From prompts to completions with log-probabilities: tokenizer and chat template, data, sampling, scoring.

Letters in shape comments: B prompts, G generations for each, N = B*G rows (a prompt's group stands in
consecutive rows), n rows still being sampled, P prompt length, R response length, M scored tokens, m those
of a chunk, C hidden size, V vocabulary.
"""
import bisect
import csv
import itertools
import json
import math
import random
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jinja2
import torch
import torch.nn.functional as F
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from torch.utils.checkpoint import checkpoint

from model import InputError, KVCache, Packed, read_json

# ---------------------------------------------------------------- tokenizer and chat template

CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
          "{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")


@dataclass
class ChatTokenizer:
    """A checkpoint's tokenizer, its chat template, and the ids that end a turn."""
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
    chat = ChatTokenizer(tokenizer, template, special, named, eos_ids, eos_ids[0] if pad_id is None
                         else pad_id)
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
    """The chat template's text, with special tokens that stand inside a message replaced by guards.

    A guard is a number between two private-use characters. The template alone can then write special tokens.
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


# ---------------------------------------------------------------- prompt data

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


def batch_of_step(step, batch_size, num_rows, seed):
    """Row numbers of step 1, 2, ...: a fresh shuffle every epoch, a function of the step alone (resume needs
    no state).
    """
    batch = []
    for k in range((step - 1) * batch_size, step * batch_size):
        epoch, place = divmod(k, num_rows)
        if place == 0 or not batch:
            order = torch.randperm(num_rows, generator=step_generator(seed, epoch, stream=1))
        batch.append(int(order[place]))
    return batch


def step_generator(seed, step, stream=0):
    """A random generator made of these numbers alone; every use of randomness has its own `stream`."""
    return torch.Generator().manual_seed(random.Random(f"{seed}/{step}/{stream}").getrandbits(63))


# ---------------------------------------------------------------- sampling

@dataclass
class Rollout:
    """N completions of a batch of prompts; row i belongs to prompt i // G."""
    prompts: list                   # N lists of ids
    completion_ids: torch.Tensor    # [N,R], padded behind the end
    completion_mask: torch.Tensor   # [N,R] bool: the tokens up to and with the first end-of-turn
    per_token_logps: torch.Tensor   # [N,R] fp32: log-prob of each sampled token, 0 where masked
    finished: torch.Tensor          # [N] bool: False where max_new_tokens cut the completion off


def pad_left(sequences, pad_id):
    """Lists of ids -> ids [B,P] and mask [B,P], the sequences flush right."""
    width = max(map(len, sequences))
    ids = torch.tensor([[pad_id] * (width - len(s)) + s for s in sequences])
    return ids, torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences])


def sample_tokens(logits, temperature, noise):
    """One token for each row from softmax(logits / temperature), and its log-prob; greedy at 0.

    logits [n,V], noise [n] uniform in [0,1) -> tokens [n], log-probs [n] (fp32). Inverse-CDF sampling: one
    number a row decides, so a row's sample does not depend on which other rows are in the batch (and on a CPU
    it is some twenty times faster than torch.multinomial). The sum runs in fp64: in fp32 a large vocabulary's
    tail would vanish.
    """
    logits = logits.float()
    if temperature == 0:
        return logits.argmax(dim=-1), logits.amax(dim=-1) - logits.logsumexp(dim=-1)
    logits = logits / temperature
    top = logits.amax(dim=-1, keepdim=True)                                         # [n,1]
    cdf = torch.exp(logits - top).cumsum(dim=-1, dtype=torch.float64)               # [n,V], not normalised
    total = cdf[:, -1:]
    tokens = torch.searchsorted(cdf, noise[:, None] * total, right=True).squeeze(1)
    tokens = tokens.clamp(max=logits.shape[-1] - 1)         # noise * total can round up to the total itself
    return tokens, (logits.gather(1, tokens[:, None]) - top - total.log()).squeeze(1).float()


@torch.no_grad()
def generate(model, prompts, num_generations, max_new_tokens, eos_ids, pad_id=0, temperature=1.0,
             generator=None, noise=None, check_every=4):
    """Sample `num_generations` completions for each prompt with a KV cache -> Rollout.

    prompts: B lists of ids. `temperature` divides the logits here and in per_token_logps; there is no top-k
    or top-p, so what is sampled is exactly the distribution that is scored. Each prompt is prefilled once and
    its cache handed to its group. Every `check_every` tokens the rows that have ended leave.
    """
    was_training, device = model.training, next(model.parameters()).device
    model.eval()                                     # dropout would change what is sampled, and its log-probs
    ids, mask = (x.to(device) for x in pad_left(prompts, 0))                        # [B,P]
    B, P = ids.shape
    N, R = B * num_generations, max_new_tokens
    cache = KVCache(model.config.num_hidden_layers, P + R - 1)
    ragged = any(len(p) < P for p in prompts)               # without padding attention needs no mask
    hidden, _ = model(ids, mask if ragged else None, cache, return_hidden=True)     # [B,P,C]
    group = torch.arange(B, device=device).repeat_interleave(num_generations)       # [N]
    cache.select_rows(group)
    logits = model.lm_head(hidden[:, -1])[group]                                    # [N,V]
    mask = F.pad(mask, (0, R), value=1)[group]                                      # [N,P+R]

    if noise is None:
        noise = torch.rand(N, R, generator=generator, dtype=torch.float64)
    noise = noise.to(device)
    eos = torch.tensor(eos_ids, device=device)
    completion_ids = torch.full((N, R), pad_id, device=device)
    logps = torch.zeros(N, R, device=device)
    lengths = torch.zeros(N, dtype=torch.long, device=device)
    ended = torch.zeros(N, dtype=torch.bool, device=device)
    rows = torch.arange(N, device=device)                   # the rows still in the batch, n of them
    for t in range(R):
        tokens, token_logps = sample_tokens(logits, temperature, noise[rows, t])    # [n]
        completion_ids[rows, t], logps[rows, t] = tokens, token_logps
        lengths[rows] += ~ended[rows]                       # the end-of-turn token itself still counts
        ended[rows] |= torch.isin(tokens, eos)
        if t + 1 == R:
            break
        if (t + 1) % check_every == 0:
            alive = [i for i, end in enumerate(ended[rows].tolist()) if not end]    # the one host sync
            if not alive:
                break
            if len(alive) < len(rows):
                order = cache.drop_rows(alive, device)
                rows, tokens = rows[order], tokens[order]
        hidden, _ = model(tokens[:, None], mask[rows, :P + t + 1] if ragged else None, cache,
                          return_hidden=True)
        logits = model.lm_head(hidden[:, -1])                                       # [n,V]
    model.train(was_training)

    completion_mask = torch.arange(R, device=device) < lengths[:, None]             # [N,R]
    R = int(lengths.max())
    completion_mask = completion_mask[:, :R]
    return Rollout([p for p in prompts for _ in range(num_generations)],
                   completion_ids[:, :R].masked_fill(~completion_mask, pad_id), completion_mask,
                   logps[:, :R].masked_fill(~completion_mask, 0.0), ended)


class FewRowsLinear(torch.nn.Linear):
    """nn.Linear as (W @ x.T).T: on a CPU in bf16 up to twice as fast for the few rows of a decode step."""

    def forward(self, x):
        if x.numel() > 128 * self.in_features:      # a prompt, or a rollout that is scored
            return super().forward(x)
        y = (self.weight @ x.reshape(-1, self.in_features).t()).t()
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], self.out_features)


def rollout_policy(model, dtype):
    """The model to sample from: the policy itself in fp32; in bf16 a copy whose linear weights are cast once.

    Autocast would cast them anew for every token. Embedding and norms stay fp32, as under autocast, so that
    the sampler computes what the scorer computes. On a CPU linear layers are made ready for few rows, in
    place.
    """
    copy = model
    if dtype != torch.float32:
        copy = type(model)(model.config).to(next(model.parameters()).device).requires_grad_(False)
        if not model.config.score_head:
            untied = copy.lm_head.weight.detach().clone()
            copy.lm_head.weight = torch.nn.Parameter(untied, requires_grad=False)
    for module in copy.modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        module.to(dtype)
        on_cpu = module.weight.device.type == "cpu"
        if on_cpu and dtype == torch.bfloat16:
            module.__class__ = FewRowsLinear
        # In fp32 a few rows times a weight are up to twice as fast if the weight lies in memory transposed.
        # Not a tied head: it is also the embedding, and that is read by rows.
        elif on_cpu and module.weight is not copy.model.embed_tokens.weight:
            module.weight.data = module.weight.data.t().contiguous().t()        # the same values
    update_rollout_policy(copy, model)
    return copy


@torch.no_grad()
def update_rollout_policy(rollout_model, model):
    """Bring the rollout weights up to date with the policy (nothing to do where they are the same)."""
    if rollout_model is not model:
        ours, theirs = rollout_model.state_dict(), model.state_dict()
        for name in ours:
            ours[name].copy_(theirs[name])


# ---------------------------------------------------------------- scoring

LOGITS_AT_ONCE = 2 ** 25    # at most so many logits are held in fp32 at a time: 128 MiB


def _chunk_logps(hidden, head_weight, tokens, temperature):
    logits = F.linear(hidden, head_weight).float()                                 # [m,V]
    if temperature != 1.0:      # to divide by one would read and write them all once more, each way
        logits = logits / temperature
    return logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(dim=-1)


def token_logps(hidden, head_weight, tokens, temperature=1.0):
    """log softmax(hidden @ head_weight.T / temperature)[tokens]: hidden [M,C], head_weight [V,C], tokens [M]
    -> [M].

    Works in chunks that are computed again in the backward pass: [M,V] never stands in memory.
    """
    chunk = max(1, LOGITS_AT_ONCE // len(head_weight))
    if len(tokens) <= chunk:
        return _chunk_logps(hidden, head_weight, tokens, temperature)
    return torch.cat([checkpoint(_chunk_logps, h, head_weight, t, temperature, use_reentrant=False)
                      for h, t in zip(hidden.split(chunk), tokens.split(chunk))])


def per_token_logps(model, prompts, completion_ids, completion_mask, temperature=1.0, return_aux_loss=False):
    """Log-prob of every completion token under `model`: the one scorer for new, reference and recomputed old.

    prompts: N lists of ids; completion_ids, completion_mask [N,R] -> [N,R] fp32, 0 where masked. With
    return_aux_loss also the load-balancing loss of a mixture of experts (0 when dense). A prompt that stands
    in several rows one after the other, as in a group, is computed once.
    """
    device, lengths = completion_ids.device, completion_mask.sum(dim=1)
    starts = [i for i, p in enumerate(prompts) if i == 0 or p != prompts[i - 1]]    # rows with a new prompt
    group = [bisect.bisect(starts, i) - 1 for i in range(len(prompts))]         # [N] the prompt of each row
    # the last token of a completion predicts nothing: it is asked for, but not read
    packed = Packed([len(prompts[i]) for i in starts], [max(0, n - 1) for n in lengths.tolist()], group,
                    device)
    prompt_ids = torch.tensor([i for row in starts for i in prompts[row]]).to(device)
    row, place = completion_mask.nonzero(as_tuple=True)                         # [M] the tokens that count
    targets = completion_ids[row, place]                                        # [M]
    read = place + 1 < lengths[row]
    hidden, aux_loss = model(torch.cat((prompt_ids, targets[read]))[None], packed=packed, return_hidden=True)
    before = torch.where(place == 0, packed.prompt_ends[packed.group[row]], packed.starts[row] + place) - 1
    head = getattr(model, "module", model).lm_head
    logps = token_logps(hidden[0].index_select(0, before), head.weight, targets, temperature)       # [M]
    logps = torch.zeros(completion_mask.shape, device=device).index_put((row, place), logps)        # [N,R]
    return (logps, aux_loss) if return_aux_loss else logps


def micro_batches(lengths, token_budget):
    """Split rows into groups of similar length with at most `token_budget` padded tokens each (one row always
    fits).

    lengths: N ints -> list of lists of row numbers, together every row once.
    """
    groups = []
    for row in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if groups and (len(groups[-1]) + 1) * lengths[row] <= token_budget:  # sorted: this row is the longest
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def packed_batches(rollout, rows, token_budget):
    """Split rows into parts for per_token_logps, groups together: a part laid out as a rectangle, longest
    prompt plus longest completion for each row, has at most `token_budget` places (one row always fits).
    """
    lengths, parts, longest = rollout.completion_mask.sum(dim=1).tolist(), [[]], (0, 0)
    for row in sorted(rows):
        size = len(rollout.prompts[row]), lengths[row]
        longest = [max(pair) for pair in zip(size, longest)]
        if parts[-1] and (len(parts[-1]) + 1) * sum(longest) > token_budget:
            parts.append([])
            longest = size
        parts[-1].append(row)
    return parts


@torch.no_grad()
def score_rollout(model, rollout, temperature, token_budget):
    """per_token_logps of a whole rollout without gradients, in parts -> [N,R]."""
    logps = torch.zeros_like(rollout.per_token_logps)
    for rows in packed_batches(rollout, range(len(logps)), token_budget):
        logps[rows] = per_token_logps(model, [rollout.prompts[i] for i in rows], rollout.completion_ids[rows],
                                      rollout.completion_mask[rows], temperature)
    return logps


# ---------------------------------------------------------------- what a run writes

def run_dir(out_dir, name, resume, overwrite, needed_bytes):
    """The folder of a run, made: `out_dir`, or without one the next free of out/NAME, out/NAME-2, ...

    InputError if it holds a run that is neither to be resumed nor overwritten, if it cannot be written, or if
    its disk has no room for `needed_bytes`.
    """
    if out_dir:
        folder = Path(out_dir)
        used = any((folder / name).exists() for name in ("metrics.csv", "state.pt"))
        if used and not (resume or overwrite):
            raise InputError(f"--out_dir {out_dir} already holds a run; add --resume or --overwrite, or name "
                             f"another folder")
    elif resume:
        raise InputError("--resume needs --out_dir, the folder of the run to go on with")
    else:
        tries = (Path("out") / (f"{name}-{i}" if i > 1 else name) for i in itertools.count(1))
        folder = next(f for f in tries if not f.exists())
    try:
        folder.mkdir(parents=True, exist_ok=bool(out_dir))      # of two runs with one name, one ends here
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
        if overwrite and not resume:
            (folder / "state.pt").unlink(missing_ok=True)
    except OSError as e:
        raise InputError(f"--out_dir {folder}: cannot be written ({e.strerror})") from None
    if free < needed_bytes:
        raise InputError(f"--out_dir {folder}: {free >> 20} MiB free, a checkpoint and its resume state need "
                         f"{needed_bytes >> 20} MiB")
    return folder


class RunLog:
    """metrics.csv (a row a step), samples.jsonl (each shown completion with its reward terms), the terminal.

    `first_step` > 0 continues the files of a resumed run: rows after that step, of a run that was killed past
    its last checkpoint, are dropped, since those steps are done again.
    """

    def __init__(self, out_dir, columns, steps, first_step=0):
        self.out_dir, self.columns, self.steps, self.first_step = out_dir, columns, steps, first_step
        rows, samples, self.start = [], [], time.time()
        if first_step and (out_dir / "metrics.csv").exists():
            with open(out_dir / "metrics.csv", newline="", encoding="utf-8") as f:
                rows = [r for r in csv.DictReader(f) if r["step"].isdigit() and int(r["step"]) <= first_step]
            self.start -= float(rows[-1]["seconds"] or 0) if rows else 0
        if first_step and (out_dir / "samples.jsonl").exists():
            with open(out_dir / "samples.jsonl", encoding="utf-8") as f:
                steps_of = ((line, re.match(r'\{"step": (\d+),', line)) for line in f if line.endswith("}\n"))
                samples = [line for line, step in steps_of if step and int(step[1]) <= first_step]
        self.began = time.time()
        (out_dir / "samples.jsonl").write_text("".join(samples), encoding="utf-8")
        with open(out_dir / "metrics.csv", "w", newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)

    def row(self, metrics):
        """Append {column: value} to metrics.csv; what a step has no value for stays empty."""
        metrics = {**metrics, "seconds": time.time() - self.start}
        with open(self.out_dir / "metrics.csv", "a", newline="", encoding="utf-8") as f:
            csv.DictWriter(f, self.columns).writerow(
                {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in metrics.items()})

    def line(self, metrics, names):
        """One aligned line on the terminal: the named metrics, the time a step takes and the time left."""
        shown = "  ".join(f"{n} {metrics[n]:7.3f}" if metrics[n] != "" else f"{n}       -" for n in names)
        step = int(metrics["step"])
        left = round((time.time() - self.began) / (step - self.first_step) * (self.steps - step))
        print(f"step {step:4d}/{self.steps}  {shown}  {metrics['tokens_per_second']:6.0f} tok/s"
              f"  left {left // 60}:{left % 60:02d}", flush=True)

    def samples(self, rows):
        """Print completions with their reward terms and append them to samples.jsonl."""
        with open(self.out_dir / "samples.jsonl", "a", encoding="utf-8") as f:
            f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        for row in rows:
            numbers = "  ".join(f"{name} {value:+.2f}" for name, value in row.items() if isinstance(value,
                                                                                                    float))
            print(f"    | {row['prompt']!r}\n    | {row['completion']!r}\n    | {numbers}", flush=True)
