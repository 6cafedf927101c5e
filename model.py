"""The MiniMind decoder: one transformer that the three scripts train, sample from and score with.

RMSNorm -> grouped-query attention with per-head q/k norm and RoPE -> SwiGLU (or a mixture of SwiGLU experts).
Weights have the names of Hugging Face's Qwen3ForCausalLM (dense) and Qwen3MoeForCausalLM; Qwen2 (biases of
q, k, v, no q/k norm) and Llama (neither) are two switches of the config away. A checkpoint saved here loads
in transformers, vLLM and SGLang as it is.

Letters in shape comments: B rows, T tokens of this call, S keys seen so far, C hidden size, H query heads,
K key/value heads, D head size, E experts, V vocabulary.
"""
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn


class InputError(Exception):
    """Something the user gave is wrong. The scripts print the one line and end with exit status 2."""


@dataclass
class MiniMindConfig:
    """Sizes of the decoder; the defaults are MiniMind-3's (64M parameters, dense)."""
    vocab_size: int = 6400
    hidden_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int | None = None             # None: hidden_size // num_attention_heads
    intermediate_size: int | None = None    # None: ceil(hidden_size * pi / 64) * 64
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    inference_rope_scaling: bool = False    # MiniMind's switch for YaRN, 16 x 2048 positions
    rope_scaling: dict | None = None        # None, or the numbers of YaRN or llama3: see rope_frequencies
    qk_norm: bool = True                    # RMSNorm of every q and k head; Qwen2 and Llama have none
    qkv_bias: bool = False                  # Qwen2's biases of q, k and v
    score_head: bool = False                # a reward model: one score at each position in place of logits
    tie_word_embeddings: bool = True
    dropout: float = 0.0
    use_moe: bool = False
    num_experts: int = 4
    num_experts_per_tok: int = 1
    moe_intermediate_size: int | None = None    # None: intermediate_size
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 5e-4
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list | None = 2

    def __post_init__(self):
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.intermediate_size = self.intermediate_size or math.ceil(self.hidden_size * math.pi / 64) * 64
        self.moe_intermediate_size = self.moe_intermediate_size or self.intermediate_size
        if self.inference_rope_scaling and self.rope_scaling is None and self.max_position_embeddings > 2048:
            self.rope_scaling = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 2048,
                                 "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0}
        for name, kind in self.__annotations__.items():
            value = getattr(self, name)
            if kind is bool and not isinstance(value, bool):
                raise InputError(f"config: {name} must be true or false, not {value!r}")
            if kind in (int, int | None) and not name.endswith("_id") and (type(value) is not int
                                                                           or value < 1):
                raise InputError(f"config: {name} must be a positive whole number, not {value!r}")
            if kind is float and (type(value) not in (int, float) or not 0 <= value < math.inf):
                raise InputError(f"config: {name} must be a number that is not negative, not {value!r}")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            ids = getattr(self, name)
            for i in ids if isinstance(ids, list) else [ids]:
                if i is not None and type(i) is not int:
                    raise InputError(f"config: {name} must be a token id, not {ids!r}")
        if self.rope_theta <= 1:
            raise InputError(f"config: rope_theta must be above 1, not {self.rope_theta}")
        for name in ("factor", "original_max_position_embeddings") if self.rope_scaling else ():
            value = self.rope_scaling.get(name)
            if type(value) not in (int, float) or not 1 <= value < math.inf:
                raise InputError(f"config: rope_scaling needs {name}, a number of at least 1, not {value!r}")
        if self.rope_scaling and self.rope_scaling.get("rope_type") == "llama3":
            low, high = (self.rope_scaling.get(f"{end}_freq_factor") for end in ("low", "high"))
            if not (type(low) in (int, float) and type(high) in (int, float) and 0 < low < high < math.inf):
                raise InputError(f"config: rope_scaling needs low_freq_factor below high_freq_factor, two "
                                 f"positive numbers, not {low!r} and {high!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(f"config: num_attention_heads {self.num_attention_heads} must be a multiple of "
                             f"num_key_value_heads {self.num_key_value_heads}")
        if self.head_dim % 2:
            raise InputError(f"config: head_dim {self.head_dim} must be even, RoPE turns pairs")
        if self.use_moe and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise InputError(f"config: num_experts_per_tok {self.num_experts_per_tok} must lie in "
                             f"1..num_experts ({self.num_experts})")


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):       # in fp32 whatever the input: a mean of squares loses too much in bf16
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).type_as(x)


def cast_once(x):
    """x in autocast's dtype where it is on: else each of the linear layers that read x would cast its own."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def rope_frequencies(config):
    """Angle per position of each of the D/2 pairs: theta^(-2i/D) (RoFormer), stretched if the config says so.

    YaRN (arXiv 2309.00071, eq. 23) and Llama 3.1 both keep the pairs that turn often within the trained
    length, slow those that turn seldom by `factor`, and mix between: YaRN linearly in the pair's number,
    Llama linearly in its turns. Returns ([D/2] fp32, scale of cos and sin).
    """
    pairs = config.head_dim // 2
    freqs = config.rope_theta ** (-torch.arange(pairs, dtype=torch.float32) * 2 / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return freqs, 1.0
    trained, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    if scaling.get("rope_type") == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((trained * freqs / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return freqs * (kept + (1 - kept) / factor), 1.0
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0

    def pair_that_turns(n):     # the (fractional) pair that makes n full turns over the trained length
        return config.head_dim * math.log(trained / (n * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low = max(math.floor(pair_that_turns(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair_that_turns(scaling.get("beta_slow", 1))), config.head_dim - 1)
    ramp = ((torch.arange(pairs, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return freqs * (1 - ramp + ramp / factor), attention_factor


def rotate(x, cos, sin):
    """RoPE on x [B,heads,T,D]: each pair (a, b) = (x[i], x[i + D/2]) becomes (a cos - b sin, b cos + a sin).

    cos and sin [B or 1,1,T,D] hold (cos, cos) and (-sin, sin).
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((b, a), dim=-1), sin).type_as(x)


class KVCache:
    """Static key/value memory of `capacity` positions, written in place, allocated at the first append.

    Row r of every layer belongs to sequence r. All rows have one length: prompts are padded on the left.
    """

    def __init__(self, num_layers, capacity):
        self.keys, self.values = [None] * num_layers, [None] * num_layers   # each [B,K,capacity,D]
        self.capacity, self.length = capacity, 0

    def append(self, layer, k, v):
        """Write k, v [B,K,T,D] behind the filled part; returns views of all keys and values so far
        [B,K,S,D].
        """
        if self.keys[layer] is None:
            B, K, _, D = k.shape
            self.keys[layer], self.values[layer] = k.new_empty(2, B, K, self.capacity, D)
        start, end = self.length, self.length + k.shape[2]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} positions, position {end} was asked for")
        self.keys[layer][:, :, start:end] = k
        self.values[layer][:, :, start:end] = v
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def select_rows(self, rows):
        """Row i becomes a copy of row rows[i] (indices, may repeat): hands a prompt's cache to its group."""
        for memory in (self.keys, self.values):
            for layer, old in enumerate(memory):
                memory[layer] = old.new_empty(len(rows), *old.shape[1:])
                memory[layer][:, :, :self.length] = old[rows, :, :self.length]

    def drop_rows(self, kept, device="cpu"):
        """Keep the rows `kept` (ascending ints), in place: the last ones fill the gaps -> their new order."""
        n, order = len(kept), list(range(len(kept)))
        gaps, movers = sorted(set(order) - set(kept)), [row for row in kept if row >= n]
        to, source = torch.tensor([gaps, movers], dtype=torch.long, device=device)  # once for all layers
        for memory in (self.keys, self.values):
            for layer, old in enumerate(memory):
                old[to, :, :self.length] = old[source, :, :self.length]
                memory[layer] = old[:n]
        for gap, mover in zip(gaps, movers):
            order[gap] = mover
        return order


class Packed:
    """Prompts and their completions in one row of M tokens: no padding, and a prompt once for its whole
    group.

    First all prompts, one after the other, then all completions. Linear layers see M tokens; attention alone
    lays them out in rows: B prompts [B,P], and N completions [N,R] that see their prompt's keys and their
    own.
    """

    def __init__(self, prompt_lengths, completion_lengths, group, device):
        """B ints, N ints, and for each completion the number of its prompt."""
        prompts, completions, self.group = (torch.tensor(x, device=device) for x in (
            prompt_lengths, completion_lengths, group))
        P, R = max(prompt_lengths), max(1, *completion_lengths)
        self.longest = P + R
        self.prompt_ends = prompts.cumsum(0)                                            # [B]
        self.starts = sum(prompt_lengths) + completions.cumsum(0) - completions         # [N]
        M = sum(prompt_lengths) + sum(completion_lengths)
        column = torch.arange(max(P, R), device=device)
        prompt_real, real = column[:P] < prompts[:, None], column[:R] < completions[:, None]
        # of each place in the rows its token; padding shows some other, whose result is not used
        self.prompt_tokens = ((self.prompt_ends - prompts)[:, None] + column[:P]).clamp(max=M - 1)     # [B,P]
        self.tokens = (self.starts[:, None] + column[:R]).clamp(max=M - 1)              # [N,R]
        self.places = torch.cat((prompt_real.view(-1), real.view(-1))).nonzero().squeeze(1)     # [M] and back
        positions = torch.cat((column[:P].expand_as(prompt_real).reshape(-1),
                               (prompts[self.group][:, None] + column[:R]).view(-1)))
        self.positions = positions[self.places]                                         # [M]
        self.mask = torch.cat((prompt_real[self.group][:, None].expand(-1, R, -1),
                               (column[:R] <= column[:R, None]).expand(len(real), -1, -1)),
                              dim=2)[:, None]                                           # [N,1,R,P+R]
        rows_of = torch.bincount(self.group, minlength=len(prompts))        # a prompt stands for so many rows
        self.weight = torch.cat((rows_of.repeat_interleave(prompts),
                                 rows_of.new_ones(sum(completion_lengths))))

    def attend(self, q, k, v):
        """Causal attention inside each sequence: q [M,H,D], k and v [M,K,D] -> [M,H,D]."""
        def rows(x, tokens):        # -> [rows,heads,T,D]
            return x.index_select(0, tokens.view(-1)).view(*tokens.shape, *x.shape[1:]).transpose(1, 2)

        prompt_k, prompt_v = rows(k, self.prompt_tokens), rows(v, self.prompt_tokens)
        in_prompts = F.scaled_dot_product_attention(rows(q, self.prompt_tokens), prompt_k, prompt_v,
                                                    is_causal=True, enable_gqa=True)    # [B,H,P,D]
        keys = torch.cat((prompt_k.index_select(0, self.group), rows(k, self.tokens)), dim=2)  # [N,K,P+R,D]
        values = torch.cat((prompt_v.index_select(0, self.group), rows(v, self.tokens)), dim=2)
        in_completions = F.scaled_dot_product_attention(rows(q, self.tokens), keys, values,
                                                        attn_mask=self.mask, enable_gqa=True)   # [N,H,R,D]
        y = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in (in_prompts, in_completions)])
        return y.index_select(0, self.places)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        C, H, K, D = (config.hidden_size, config.num_attention_heads, config.num_key_value_heads,
                      config.head_dim)
        self.head_dim, self.dropout = D, config.dropout
        self.q_proj = nn.Linear(C, H * D, bias=config.qkv_bias)
        self.k_proj = nn.Linear(C, K * D, bias=config.qkv_bias)
        self.v_proj = nn.Linear(C, K * D, bias=config.qkv_bias)
        self.o_proj = nn.Linear(H * D, C, bias=False)
        self.q_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, config.rms_norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x, cos, sin, mask, cache, layer, packed):
        x, (B, T, _) = cast_once(x), x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, -1, self.head_dim)).transpose(1, 2)   # [B,H,T,D]
        k = self.k_norm(self.k_proj(x).view(B, T, -1, self.head_dim)).transpose(1, 2)   # [B,K,T,D]
        v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)                # [B,K,T,D]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if packed is not None:
            return self.o_proj(packed.attend(*(z[0].transpose(0, 1) for z in (q, k, v))).flatten(1)[None])
        if cache is not None:
            k, v = cache.append(layer, k, v)                                            # [B,K,S,D]
        dropout = self.dropout if self.training else 0.0
        if T == 1 and (x.device.type != "cpu" or q.dtype == torch.float32):
            # Decoding: the H/K query heads of a key head stand as its queries, so it is read once. (Not in
            # bf16 on a CPU, where PyTorch's kernel for one query a head is twice as fast.)
            y = F.scaled_dot_product_attention(q.reshape(B, k.shape[1], -1, self.head_dim), k, v,
                                               attn_mask=mask, dropout_p=dropout)       # [B,K,H/K,D]
            return self.o_proj(y.reshape(B, 1, -1))
        # enable_gqa: a key head is never copied for its query heads. No mask means causal.
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1,
                                           dropout_p=dropout, enable_gqa=True)          # [B,H,T,D]
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        x = cast_once(x)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MixtureOfExperts(nn.Module):
    """Each token goes to its `num_experts_per_tok` most probable SwiGLU experts, weighted by the router."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config.hidden_size, config.moe_intermediate_size)
                                     for _ in range(config.num_experts))

    def forward(self, x, valid=None):
        """x [B,T,C], valid [B,T], the weight of a token in the balance (None: 1) -> output [B,T,C],
        load-balancing loss (scalar).
        """
        c, flat = self.config, x.reshape(-1, x.shape[-1])                               # [B*T,C]
        probs = self.gate(flat).float().softmax(dim=-1)                                 # [B*T,E]
        weights, chosen = probs.topk(c.num_experts_per_tok, dim=-1)                     # [B*T,k]
        if c.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            # An expert without tokens still runs, on none: its zero gradient keeps every rank's reduction
            # whole.
            y.index_add_(0, token, (expert(flat[token]) * weights[token, slot, None]).type_as(y))
        # Switch Transformer, eq. 4-6: E * sum over experts of (share of tokens) * (mean probability); padding
        # is not a token. With k > 1 the shares add up to k, as in MiniMind.
        real = torch.ones(len(flat), 1, device=x.device) if valid is None else valid.reshape(-1, 1).float()
        share = F.one_hot(chosen, c.num_experts).sum(dim=1).float()                     # [B*T,E]
        tokens = real.sum().clamp(min=1)
        balance = ((share * real).sum(0) / tokens * ((probs * real).sum(0) / tokens)).sum()
        return y.view_as(x), c.router_aux_loss_coef * c.num_experts * balance


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = (MixtureOfExperts(config) if config.use_moe
                    else FeedForward(config.hidden_size, config.intermediate_size))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, cos, sin, mask, valid, cache, layer, packed):
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin, mask, cache, layer, packed))
        h = self.post_attention_layernorm(x)
        h, aux = self.mlp(h, valid) if isinstance(self.mlp, MixtureOfExperts) else (self.mlp(h), 0.0)
        return x + self.dropout(h), aux


class MiniMind(nn.Module):
    """`model(input_ids [B,T], attention_mask=None [B,T]) -> logits [B,T,V]`; a reward model: scores
    [B,T,1].
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
            "layers": nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers)),
            "norm": RMSNorm(config.hidden_size, config.rms_norm_eps)})
        if config.score_head:
            self.score = nn.Linear(config.hidden_size, 1, bias=False)
        else:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)
        freqs, self.rope_scale = rope_frequencies(config)
        self.register_buffer("rope_freqs", freqs, persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        self.tie_weights()

    def tie_weights(self):
        if self.config.tie_word_embeddings and not self.config.score_head:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids, attention_mask=None, cache=None, right_padded=False, return_hidden=False,
                packed=None):
        """Logits [B,T,V]; with return_hidden, (the head's input [B,T,C], load-balancing loss) instead.

        attention_mask [B,S]: 1 where a token is real, on whichever side the padding stands; with a cache it
        covers the cached keys too. Positions count real tokens only, so padding does not move a sequence.
        `right_padded` says that padding only follows the tokens: the causal mask hides it already, and
        attention needs no dense mask. `packed` says that input_ids [1,M] are laid out as in Packed.
        """
        B, T = input_ids.shape
        start = cache.length if cache is not None else 0
        longest = packed.longest if packed is not None else start + T
        if longest > self.config.max_position_embeddings:
            raise InputError(f"{longest} tokens exceed the model's max_position_embeddings "
                             f"({self.config.max_position_embeddings})")
        mask = None                                                     # None: causal
        positions = torch.arange(start, start + T, device=input_ids.device)[None]      # [1,T]
        if packed is not None:
            positions = packed.positions[None]
        elif attention_mask is not None and not right_padded:
            real = attention_mask.bool()                                # [B,S]
            keys = torch.arange(start + T, device=input_ids.device)
            # A query always sees itself: a row of nothing but padding would otherwise be a softmax over
            # nothing.
            itself = keys == positions[0, :, None]                      # [T,S]
            mask = (real[:, None, :] & (keys <= positions[0, :, None]) | itself)[:, None]   # [B,1,T,S]
            positions = (real.cumsum(dim=1) - 1).clamp(min=0)[:, start:]                # [B,T]
        elif start and T > 1:
            mask = torch.arange(start + T, device=input_ids.device) <= positions[0, :, None]   # [T,S]
        angles = positions[..., None].float() * self.rope_freqs         # [B or 1,T,D/2]
        cos, sin = (f(angles)[:, None] * self.rope_scale for f in (torch.cos, torch.sin))   # [B or 1,1,T,D/2]
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)        # as rotate reads them
        valid = packed.weight if packed is not None else None
        if attention_mask is not None:
            valid = attention_mask[:, start:]

        x, aux_loss = self.dropout(self.model.embed_tokens(input_ids)), 0.0             # [B,T,C]
        if mask is not None:    # as what is added to the scores: made once, not in every layer
            mask = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -math.inf)
        for i, layer in enumerate(self.model.layers):
            x, aux = layer(x, cos, sin, mask, valid, cache, i, packed)
            aux_loss = aux_loss + aux
        if cache is not None:
            cache.length += T
        x = self.model.norm(x)
        if return_hidden:
            return x, aux_loss
        return self.score(x) if self.config.score_head else self.lm_head(x)


# ---------------------------------------------------------------- checkpoints

def read_json(path):
    """The JSON object in a file, or an InputError that says what is wrong with it."""
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})") from None
    except (ValueError, RecursionError) as e:
        line, why = getattr(e, "lineno", 1), getattr(e, "msg", e)
        raise InputError(f"{path}:{line}: not valid JSON ({why})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value


# model_type of config.json -> what its classes are called in transformers, and the switches that make it
FAMILIES = {"qwen3": ("Qwen3", {"use_moe": False, "qk_norm": True, "qkv_bias": False}),
            "qwen3_moe": ("Qwen3Moe", {"use_moe": True, "qk_norm": True, "qkv_bias": False}),
            "qwen2": ("Qwen2", {"use_moe": False, "qk_norm": False, "qkv_bias": True}),
            "llama": ("Llama", {"use_moe": False, "qk_norm": False, "qkv_bias": False})}
ROPE_OPTIONS = {"default": set(),
                "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
                         "attention_factor"},
                "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor",
                           "high_freq_factor"}}


def config_from_hf(hf, where="config.json"):
    """MiniMindConfig from a Hugging Face config (a dict): model_type minimind or one of FAMILIES.

    Raises InputError for whatever the decoder does not compute: it would load and give wrong numbers.
    """
    kind = hf.get("model_type")
    if kind not in ("minimind", *FAMILIES):
        raise InputError(f"{where}: model_type {kind!r} is not supported; known: minimind, "
                         f"{', '.join(FAMILIES)}")
    only = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
            "use_sliding_window": (False,), "quantization_config": (), "mlp_only_layers": ([],),
            "decoder_sparse_step": (1,), "partial_rotary_factor": (1,)}
    for key, allowed in only.items():
        if hf.get(key) is not None and hf[key] not in allowed:
            raise InputError(f"{where}: {key} = {hf[key]!r} is not supported")
    layer_types = hf.get("layer_types") or []
    if not isinstance(layer_types, list) or any(t != "full_attention" for t in layer_types):
        raise InputError(f"{where}: layer_types must all be 'full_attention': no other is supported")
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}    # transformers 5, transformers 4
    if not isinstance(rope, dict):
        raise InputError(f"{where}: rope_parameters and rope_scaling must be objects, not {rope!r}")
    rope = {k: v for k, v in rope.items() if v is not None}
    theta = rope.pop("rope_theta", None) or hf.get("rope_theta") or (1e6 if kind == "minimind" else 1e4)
    rope_type = rope.pop("rope_type", rope.pop("type", "default"))
    if rope_type not in tuple(ROPE_OPTIONS):
        raise InputError(f"{where}: rope type {rope_type!r} is not supported; known are "
                         f"{', '.join(ROPE_OPTIONS)}")
    ignored = set(rope) - ROPE_OPTIONS[rope_type]
    if ignored:
        raise InputError(f"{where}: option {', '.join(sorted(ignored))} of rope type {rope_type!r} is not "
                         f"supported")
    names = set(MiniMindConfig.__dataclass_fields__) - {"rope_theta", "rope_scaling", "num_experts",
                                                        "use_moe", "qk_norm", "qkv_bias", "score_head"}
    kept = {k: v for k, v in hf.items() if k in names and v is not None}
    kept.update(FAMILIES[kind][1] if kind != "minimind" else {"use_moe": hf.get("use_moe") or False})
    if kind != "minimind":    # what leaving a key out means in these configs
        absent = {"tie_word_embeddings": False, "num_key_value_heads": hf.get("num_attention_heads"),
                  "max_position_embeddings": 2048 if kind == "llama" else 32768}
        if kind == "qwen3_moe":
            absent.update(num_experts_per_tok=8, norm_topk_prob=False)
        kept = {**absent, **kept}
        kept.pop("inference_rope_scaling", None)
    scaling = {"rope_type": rope_type, **rope} if rope_type != "default" else None
    experts = hf.get("num_experts") or hf.get("num_local_experts") or 4
    score_head = "ForSequenceClassification" in str(hf.get("architectures"))
    try:
        return MiniMindConfig(rope_theta=float(theta), rope_scaling=scaling, num_experts=experts,
                              score_head=score_head, **kept)
    except (TypeError, ValueError, ZeroDivisionError, KeyError) as e:
        raise InputError(f"{where}: a size has the wrong type or value ({e})") from None
    except InputError as e:
        raise InputError(f"{where}: {e}") from None


def config_to_hf(config):
    """The config.json of a saved checkpoint, of the one of FAMILIES that the switches make; readable by
    transformers 4 and 5.
    """
    switches = {name: getattr(config, name) for name in ("use_moe", "qk_norm", "qkv_bias")}
    kind = next((k for k, (_, theirs) in FAMILIES.items() if theirs == switches), None)
    if kind is None:
        raise InputError(f"no Hugging Face model type has {switches}; it cannot be saved as one")
    hf = {k: v for k, v in vars(config).items()
          if k not in ("inference_rope_scaling", "dropout", "score_head", *switches)}
    task = "SequenceClassification" if config.score_head else "CausalLM"
    hf.update(architectures=[f"{FAMILIES[kind][0]}For{task}"], model_type=kind, hidden_act="silu",
              attention_bias=False, use_sliding_window=False, attention_dropout=0.0, torch_dtype="float32")
    if config.score_head:
        hf.update(id2label={"0": "LABEL_0"})
    if config.use_moe:
        hf.update(mlp_only_layers=[], decoder_sparse_step=1)
    else:
        for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
                    "router_aux_loss_coef"):
            del hf[key]
    return hf


def config_from_tensors(tensors, **given):
    """Sizes of a bare MiniMind .pth as its tensors show them. What they cannot show (heads without q/k norm,
    num_experts_per_tok, rope_theta, ...) is MiniMind's default, or `given` (fields of MiniMindConfig).
    """
    layer = {n.removeprefix("model.layers.0."): t.shape for n, t in tensors.items()
             if n.startswith("model.layers.0.")}
    vocab_size, hidden_size = tensors["model.embed_tokens.weight"].shape
    norm = layer.get("self_attn.q_norm.weight")
    head_dim = norm[0] if norm else hidden_size // given.get("num_attention_heads", 8)
    experts = {int(n.split(".")[2]) for n in layer if n.startswith("mlp.experts.")}
    gate = layer["mlp.experts.0.gate_proj.weight" if experts else "mlp.gate_proj.weight"]
    head = tensors.get("lm_head.weight")
    shown = dict(vocab_size=vocab_size, hidden_size=hidden_size, head_dim=head_dim, qk_norm=norm is not None,
                 num_hidden_layers=len({n.split(".")[2] for n in tensors if n.startswith("model.layers.")}),
                 num_attention_heads=layer["self_attn.q_proj.weight"][0] // head_dim,
                 num_key_value_heads=layer["self_attn.k_proj.weight"][0] // head_dim,
                 intermediate_size=gate[0], use_moe=bool(experts), num_experts=len(experts) or 4,
                 tie_word_embeddings=head is None or torch.equal(head, tensors["model.embed_tokens.weight"]))
    return MiniMindConfig(**{**shown, **given})


def read_pth(path):
    """The tensors of a MiniMind .pth: a dict of names, as torch.save wrote it."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)       # a pickle can run code
    except Exception as e:
        raise InputError(f"{path}: not a readable .pth ({str(e).splitlines()[0]})") from None
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise InputError(f"{path}: must hold a dict of tensors by name, as MiniMind's trainers save it")
    return tensors


def read_tensors(folder):
    """Every tensor of a folder's model.safetensors, or of the shards that its index names, by name."""
    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
            raise InputError(f"{index}: weight_map must map tensor names to file names")
        files = [folder / Path(name).name for name in sorted(set(shards.values()))]
    tensors = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except FileNotFoundError:
            raise InputError(f"{file}: no such file; a checkpoint needs its weights") from None
        except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as e:
            raise InputError(f"{file}: not a readable safetensors file ({str(e).splitlines()[0]})") from None
    return tensors


def split_fused_experts(tensors, where):
    """Take apart the experts that transformers 5 may stack: gate over up [E,2I,C] and down [E,C,I]."""
    for name in [n for n in tensors if n.endswith(".experts.gate_up_proj")]:
        stem = name.removesuffix("gate_up_proj")
        gate_up, down = tensors.pop(name), tensors.pop(stem + "down_proj", None)
        if down is None or gate_up.dim() != 3 or down.dim() != 3 or len(gate_up) != len(down):
            raise InputError(f"{where}: {name} and {stem}down_proj must both stack the same experts")
        for e in range(len(down)):
            tensors[f"{stem}{e}.gate_proj.weight"], tensors[f"{stem}{e}.up_proj.weight"] = gate_up[e].chunk(2)
            tensors[f"{stem}{e}.down_proj.weight"] = down[e]


def load_checkpoint(path, score_head=False, **sizes):
    """The model of a Hugging Face folder (config.json and model.safetensors or shards) or of a MiniMind .pth,
    in fp32, on the CPU. `score_head` asks for a reward model; `sizes` are what a .pth's tensors do not show.

    Strict: a missing, extra, misshapen or quantised tensor is an InputError that names it; nothing is loaded
    in part.
    """
    path = Path(path)
    if path.suffix == ".pth":
        tensors, where = read_pth(path), path
        try:
            config = config_from_tensors(tensors, **sizes)
        except (KeyError, ValueError, IndexError, ZeroDivisionError) as e:
            raise InputError(f"{path}: not MiniMind's tensors ({type(e).__name__}: {e})") from None
        except InputError as e:
            raise InputError(f"{path}: {e}") from None
    elif path.is_dir():
        where = path / "config.json"
        hf = read_json(where)
        config, tensors = config_from_hf(hf, where), read_tensors(path)
        split_fused_experts(tensors, path)
        if hf["model_type"] == "minimind":      # earlier releases have no q/k norm and no key that says so
            config.qk_norm = any(n.endswith(".q_norm.weight") for n in tensors)
    else:
        raise InputError(f"{path}: no such folder; a checkpoint is a Hugging Face folder or a MiniMind .pth")
    if config.score_head != score_head:
        raise InputError(f"{where}: this is a " + (
            "reward model (ForSequenceClassification), a language model is needed here" if config.score_head
            else "language model, a reward model (ForSequenceClassification) is needed here"))
    for name, count in (("layers", config.num_hidden_layers), ("experts", config.num_experts)):
        # before a model of `count` layers is laid out: the number may be anything
        found = {int(n): key for key in tensors for n in re.findall(rf"\.{name}\.(\d+)\.", key)}
        if found and len(found) != count:
            extra, gap = [found[n] for n in found if n >= count], min(set(range(len(found) + 1)) - set(found))
            what = f"unexpected {extra[0]}" if extra else f"missing model.{name}.{gap}"
            raise InputError(f"{path}: {len(found)} {name} in the weights, {count} in the config: {what}")
    try:
        with torch.device("meta"):      # names and shapes only, no time spent on random weights
            model = MiniMind(config)
    except (RuntimeError, TypeError, OverflowError, ValueError, ZeroDivisionError) as e:
        raise InputError(f"{where}: no model of these sizes ({str(e).splitlines()[0]})") from None
    expected = dict(model.state_dict())
    if config.tie_word_embeddings and not score_head:   # some files hold the tied matrix under both names
        head = tensors.pop("lm_head.weight", None)
        if head is not None and not torch.equal(head, tensors.get("model.embed_tokens.weight", head)):
            raise InputError(f"{path}: tie_word_embeddings is true but lm_head.weight differs from "
                             f"model.embed_tokens.weight")
        del expected["lm_head.weight"]
    problems = [f"missing {n}" for n in expected if n not in tensors]
    problems += [f"unexpected {n}" for n in tensors if n not in expected]
    problems += [f"{n} has shape {list(t.shape)}, the config makes it {list(expected[n].shape)}"
                 for n, t in tensors.items() if n in expected and t.shape != expected[n].shape]
    problems += [f"{n} is {t.dtype}: quantised weights are not supported" for n, t in tensors.items()
                 if t.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16)]
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise InputError(f"{path}: the tensors do not fit the config: {'; '.join(problems[:4])}{more}")
    tensors = {n: t.to(torch.float32, copy=True) for n, t in tensors.items()}
    model.load_state_dict(tensors, strict=False, assign=True)
    model.rope_freqs = rope_frequencies(config)[0]      # no part of the file
    model.tie_weights()
    return model


def write_atomically(path, write):
    """Let `write(temporary_path)` write a file, then move it to `path`: a kill leaves the old one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as f:
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)      # safetensors writes for the owner alone
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)       # what a full disk cut short would keep it full


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json")


def save_checkpoint(model, out_dir, tokenizer_dir=None):
    """Write config.json, model.safetensors in fp32, and the tokenizer files of `tokenizer_dir`.

    Each file is replaced in one step, the weights last.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if tokenizer_dir is not None and (Path(tokenizer_dir) / name).exists():
            source = Path(tokenizer_dir) / name
            write_atomically(out_dir / name, lambda tmp, source=source: shutil.copyfile(source, tmp))
    text = json.dumps(config_to_hf(model.config), indent=2) + "\n"
    write_atomically(out_dir / "config.json", lambda tmp: tmp.write_text(text))
    tensors = {n: t.detach().float().cpu().contiguous() for n, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    write_atomically(out_dir / "model.safetensors", lambda tmp: save_file(tensors, tmp, {"format": "pt"}))


# ---------------------------------------------------------------- a run: processes, resume state, ending

def init_distributed(device_name):
    """Join the processes that torchrun started, if any -> (rank, number of processes, device of this one)."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    try:
        device = torch.device(device_name)
    except RuntimeError:
        raise InputError(f"--device {device_name}: no such device; try cpu, cuda, cuda:0") from None
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise InputError(f"--device {device_name}: {torch.cuda.device_count()} CUDA devices here; try cpu")
    if world == 1:
        return 0, 1, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), world, device


def over_ranks(values, op="SUM"):
    """Sum (or MIN, MAX) of a list of numbers over all processes -> list of floats."""
    if not dist.is_initialized():
        return [float(v) for v in values]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor([float(v) for v in values], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    return tensor.tolist()


def metrics_over_ranks(metrics):
    """One dict of metrics from every process's own: the mean of each, but the extremes of *_min and *_max."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    for op, names in (("MIN", [n for n in metrics if n.endswith("_min")]),
                      ("MAX", [n for n in metrics if n.endswith("_max")]),
                      ("SUM", [n for n in metrics if not n.endswith(("_min", "_max"))])):
        values = over_ranks([metrics[n] for n in names], op)
        metrics.update({n: v / world if op == "SUM" else v for n, v in zip(names, values)})
    return metrics


# Options that may differ at a resume: they change where a run looks, how long it is, not what it computes.
FREE_OPTIONS = {"steps", "out_dir", "resume", "overwrite", "eval_data", "eval_interval", "sample_interval",
                "save_interval", "log_interval", "device", "micro_batch_tokens", "compile"}


def save_run(out_dir, script, model, optimizer, step, held_out, tokenizer_dir, args):
    """Save what --resume needs (state.pt: fp32 weights and optimizer in one file) and the checkpoint folder.

    Batches, noise and dropout are functions of seed and step, so the step stands for every random generator.
    """
    state = {"script": script, "config": vars(model.config), "step": step, "held_out": held_out,
             "options": {k: v for k, v in vars(args).items() if k not in FREE_OPTIONS},
             "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    try:
        write_atomically(Path(out_dir) / "state.pt", lambda tmp: torch.save(state, tmp))
        save_checkpoint(model, Path(out_dir) / "checkpoint", tokenizer_dir)
    except (OSError, RuntimeError, SafetensorError) as e:   # each library words a full disk in its own way
        raise InputError(f"{out_dir}: cannot save step {step} ({str(e).splitlines()[0]}); the last "
                         f"checkpoint there is whole: make room, go on with --resume") from None


def load_run(out_dir, script, model, optimizer, args):
    """Bring model and optimizer to the state that `save_run` left in out_dir -> (step, held_out)."""
    path = Path(out_dir) / "state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)   # a pickle can run code
        saved = {key: state[key] for key in ("script", "config", "options", "step", "held_out", "model",
                                             "optimizer")}
    except FileNotFoundError:
        raise InputError(f"--resume: {path} does not exist; there is no run to go on with") from None
    except Exception as e:
        raise InputError(f"--resume: {path} cannot be read ({str(e).splitlines()[0]})") from None
    if saved["script"] != script:
        raise InputError(f"--resume: {path} was written by {saved['script']}.py, this is {script}.py")
    differing = [f"{k} {saved['config'].get(k)} there, {v} here" for k, v in vars(model.config).items()
                 if saved["config"].get(k) != v]
    if differing:
        raise InputError(f"--resume: {path} holds a model of other sizes: {'; '.join(differing)}")
    changed = [f"--{k} {v!r}, now {getattr(args, k, None)!r}" for k, v in saved["options"].items()
               if getattr(args, k, None) != v]
    if changed:
        raise InputError(f"--resume: the run was started with {'; '.join(changed)}; give the same again")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"], saved["held_out"]


def catch_signals():
    """Ctrl-C and SIGTERM let the step finish: the list then holds the signal. A second ends at once."""
    caught, began = [], []

    def handler(number, frame):
        if caught and time.time() - began[0] > 0.5:     # torchrun and its caller may both send the first
            os._exit(128 + number)
        if caught:
            return
        caught.append(number)
        began.append(time.time())
        print("stopping after this step; once more to stop at once", file=sys.stderr, flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
    return caught


def run_script(main, name, parse_args):
    """Call main(); what the user can mend ends in one line on stderr and exit status 2."""
    message, status = "", 2
    try:
        main()
        status = 0
    except SystemExit as e:     # argparse, or a signal that let the step finish
        status = e.code
    except InputError as e:
        message = str(e)
    except OSError as e:
        message = f"{e.filename or 'a file of the run'}: {e.strerror or e}"
    except torch.OutOfMemoryError as e:
        now = parse_args()
        message = (f"out of GPU memory ({str(e).splitlines()[0]}); lower --micro_batch_tokens first (now "
                   f"{now.micro_batch_tokens}), then --batch_size (now {now.batch_size}) or "
                   f"--max_new_tokens (now {now.max_new_tokens})")
    except RuntimeError as e:
        if type(e).__name__ != "InductorError":     # torch.compile's: to import it takes seconds
            raise
        message = (f"--compile failed ({str(e).splitlines()[0]}); on a CPU it needs a C++ compiler: install "
                   f"g++, or leave --compile out")
    if message:
        print(f"{name}: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        # At once: after an error other ranks still train and must not be waited for; and while Python is
        # taken down in order, a gloo thread that wants the interpreter lock can abort the process.
        sys.stdout.flush()
        os._exit(status)
    if status:
        sys.exit(status)
