"""The MiniMind decoder: one transformer that the three scripts train, sample from and score with.

RMSNorm -> grouped-query attention with per-head q/k norm and RoPE -> SwiGLU (or a mixture of SwiGLU experts).
Weights have the names of Hugging Face's Qwen3ForCausalLM (dense) and Qwen3MoeForCausalLM; Qwen2 (biases of
q, k, v, no q/k norm) and Llama (neither) are two switches of the config away. Needs torch and nothing else.

Letters in shape comments: B rows, T tokens of this call, S keys seen so far, C hidden size, H query heads, K
key/value heads, D head size, E experts, V vocabulary; M, N, P, R as in Packed.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


# A field's annotation -> what its value must be, in words and as a test.
KINDS = {int: ("a positive whole number", lambda x: type(x) is int and x > 0),
         int | None: ("a positive whole number", lambda x: x is None or type(x) is int and x >= 0),
         float: ("a number that is not negative", lambda x: type(x) in (int, float) and 0 <= x < math.inf),
         bool: ("true or false", lambda x: type(x) is bool),
         dict | None: ("an object", lambda x: x is None or type(x) is dict),
         int | list | None: ("a token id", lambda x: all(i is None or type(i) is int
                                                         for i in (x if type(x) is list else [x])))}


@dataclass
class MiniMindConfig:
    """Sizes of the decoder, MiniMind-3's (64M, dense) by default. A ValueError names what cannot be."""
    vocab_size: int = 6400
    hidden_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int | None = None             # None or 0: hidden_size // num_attention_heads
    intermediate_size: int | None = None    # None or 0: ceil(hidden_size * pi / 64) * 64
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
    moe_intermediate_size: int | None = None    # None or 0: intermediate_size
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 5e-4
    pad_token_id: int | list | None = 0
    bos_token_id: int | list | None = 1
    eos_token_id: int | list | None = 2

    def __post_init__(self):
        for name, field in self.__dataclass_fields__.items():
            must, fits = KINDS[field.type]
            if not fits(getattr(self, name)):
                raise ValueError(f"config: {name} must be {must}, not {getattr(self, name)!r}")
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.intermediate_size = self.intermediate_size or math.ceil(self.hidden_size * math.pi / 64) * 64
        self.moe_intermediate_size = self.moe_intermediate_size or self.intermediate_size
        if self.inference_rope_scaling and self.rope_scaling is None and self.max_position_embeddings > 2048:
            self.rope_scaling = {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 2048,
                                 "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0}
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"config: num_attention_heads {self.num_attention_heads} must be a multiple of "
                             f"num_key_value_heads {self.num_key_value_heads}")
        if self.head_dim % 2 or self.head_dim == 0:
            raise ValueError(f"config: head_dim {self.head_dim} must be even, RoPE turns pairs")
        if self.rope_theta <= 1:
            raise ValueError(f"config: rope_theta must be above 1, not {self.rope_theta}")
        if self.use_moe and self.num_experts_per_tok > self.num_experts:
            raise ValueError(f"config: num_experts_per_tok must lie in 1..num_experts ({self.num_experts})")


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):       # in fp32 whatever the input: a mean of squares loses too much in bf16
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).type_as(x)


def cast_once(x):
    """x in autocast's dtype where it is on: else each of the linear layers that read x would cast its own."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else x


def rope_frequencies(config):
    """Angle per position of each of the D/2 pairs: theta^(-2i/D) (RoFormer), stretched if the config says so.

    YaRN (arXiv 2309.00071, eq. 23) and Llama 3.1 both keep the pairs that turn often within the trained
    length, slow those that turn seldom by `factor`, and mix between: YaRN linearly in the pair's number,
    Llama linearly in its turns. Returns ([D/2] fp32, scale of cos and sin).
    """
    pairs, scaling = torch.arange(config.head_dim // 2, dtype=torch.float32), config.rope_scaling
    freqs = config.rope_theta ** (-pairs * 2 / config.head_dim)
    if scaling is None:
        return freqs, 1.0

    def number(name, default=None, low=1):
        value = default if scaling.get(name) is None else scaling[name]
        if type(value) not in (int, float) or not low <= value < math.inf:
            raise ValueError(f"config: rope_scaling needs {name}, a number of at least {low}, not {value!r}")
        return value

    def pair_that_turns(n):     # the (fractional) pair that makes n full turns over the trained length
        return config.head_dim * math.log(trained / (n * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    trained, factor = number("original_max_position_embeddings"), number("factor")
    if scaling.get("rope_type") == "llama3":
        low, high, scale = number("low_freq_factor", low=0), number("high_freq_factor", low=0), 1.0
        if low >= high:
            raise ValueError(f"config: rope_scaling: low_freq_factor {low} must be below high {high}")
        kept = ((trained * freqs / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    else:
        low = max(math.floor(pair_that_turns(number("beta_fast", 32, low=1e-9))), 0)
        high = min(math.ceil(pair_that_turns(number("beta_slow", 1, low=1e-9))), config.head_dim - 1)
        kept = 1 - ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
        scale = number("attention_factor", 0.1 * math.log(factor) + 1.0, low=0)
    return freqs * (kept + (1 - kept) / factor), scale


def rotate(x, cos, sin):
    """RoPE on x [B,heads,T,D]: each pair (a, b) = (x[i], x[i + D/2]) becomes (a cos - b sin, b cos + a sin).
    cos and sin [B or 1,1,T,D] hold (cos, cos) and (-sin, sin).
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((b, a), dim=-1), sin).type_as(x)


class KVCache:
    """Static key/value memory of `capacity` positions, written in place, allocated at the first append.
    Row r of every layer belongs to sequence r. All rows have one length: prompts are padded on the left.
    Two prompts, groups of three; a0, b3 and b4 end first, the last rows fill their gaps:

        a b   -- select_rows([0,0,0,1,1,1]) ->   a0 a1 a2 b3 b4 b5   -- drop_rows([1,2,5]) ->   b5 a1 a2
    """

    def __init__(self, num_layers, capacity):
        self.keys, self.values = [None] * num_layers, [None] * num_layers   # each [B,K,capacity,D]
        self.capacity, self.length = capacity, 0

    def append(self, layer, k, v):
        """Write k, v [B,K,T,D] behind the filled part; views of all so far [B,K,S,D] come back."""
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
        n = len(kept)
        gaps, movers = sorted(set(range(n)) - set(kept)), [row for row in kept if row >= n]
        to, source = torch.tensor([gaps, movers], dtype=torch.long, device=device)  # once for all layers
        for memory in (self.keys, self.values):
            for layer, old in enumerate(memory):
                old[to, :, :self.length] = old[source, :, :self.length]
                memory[layer] = old[:n]
        moved = dict(zip(gaps, movers))
        return [moved.get(row, row) for row in range(n)]


class Packed:
    """Prompts and their completions in one row of M tokens: no padding, a prompt once for its whole group.

    First all prompts, then all completions. Linear layers see the M tokens; attention alone lays them out in
    rows: B prompts [B,P], and N completions [N,R] that see their prompt's keys and their own. Two prompts of
    3 and 2 tokens, a and b, with three completions each, of 3 2 3 and 3 4 2 tokens. The last token of each is
    not put in, nobody asks what follows it: completion_lengths are 2 1 2 2 3 1.

        number      0 1 2 3 4 |  5  6 |  7 |  8  9 | 10 11 | 12 13 14 | 15      M = 16, prompt_ends 3 5
        token       a a a b b | a0 a0 | a1 | a2 a2 | b3 b3 | b4 b4 b4 | b5      group 0 0 0 1 1 1
        position    0 1 2 0 1 |  3  4 |  3 |  3  4 |  2  3 |  2  3  4 |  2      starts 5 7 8 10 12 15
        targets are guessed at 2 5 6 (a0's three), 2 7 (a1's two), 2 8 9, 4 10 11, 4 12 13 14, 4 15
    """

    def __init__(self, prompt_lengths, completion_lengths, group, device):
        """B ints, N ints, and for each completion the number of its prompt."""
        prompts, completions, self.group = (torch.tensor(x, device=device) for x in (
            prompt_lengths, completion_lengths, group))
        P, R = max(prompt_lengths), max(1, *completion_lengths)
        self.longest = P + R
        self.prompt_ends = prompts.cumsum(0)                                            # [B]
        self.starts = sum(prompt_lengths) + completions.cumsum(0) - completions         # [N]
        column = torch.arange(max(P, R), device=device)
        prompt_real, real = column[:P] < prompts[:, None], column[:R] < completions[:, None]    # [B,P], [N,R]
        rows = torch.cat((prompt_real.flatten(), real.flatten()))       # of every place: is a token there?
        self.places = rows.nonzero().squeeze(1)                         # [M] the place of each token
        numbers = rows.cumsum(0) - 1    # of every place the token; padding has the one before, and no effect
        self.prompt_tokens = numbers[:prompt_real.numel()].view_as(prompt_real)         # [B,P]
        self.tokens = numbers[prompt_real.numel():].view_as(real)                       # [N,R]
        positions = torch.cat((column[:P].expand_as(prompt_real).flatten(),
                               (prompts[self.group][:, None] + column[:R]).flatten()))
        self.positions = positions[self.places]                                         # [M]
        self.mask = torch.cat((prompt_real[self.group][:, None].expand(-1, R, -1),
                               (column[:R] <= column[:R, None]).expand(len(real), -1, -1)),
                              dim=2)[:, None]                                           # [N,1,R,P+R]
        rows_of = torch.bincount(self.group, minlength=len(prompts))        # a prompt stands for so many rows
        self.weight = torch.cat((rows_of.repeat_interleave(prompts),
                                 rows_of.new_ones(sum(completion_lengths))))            # [M]

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
        C, D, self.dropout = config.hidden_size, config.head_dim, config.dropout
        H, K, self.head_dim = config.num_attention_heads, config.num_key_value_heads, D
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
        """x [B,T,C], valid [B,T] (a token's weight in the balance; None: 1) -> [B,T,C], balancing loss."""
        c, flat = self.config, x.reshape(-1, x.shape[-1])                               # [B*T,C]
        probs = self.gate(flat).float().softmax(dim=-1)                                 # [B*T,E]
        weights, chosen = probs.topk(c.num_experts_per_tok, dim=-1)                     # [B*T,k]
        if c.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        y = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            # An expert without tokens still runs, on none: every rank then has a gradient to exchange.
            y.index_add_(0, token, (expert(flat[token]) * weights[token, slot, None]).type_as(y))
        # Switch Transformer, eq. 4-6: E * sum over experts of (share of tokens) * (mean probability). With
        # k > 1 the shares add up to k, as in MiniMind.
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
    """`model(input_ids [B,T]) -> logits [B,T,V]`; a reward model: scores [B,T,1]."""
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
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)
        self.tie_weights()

    def tie_weights(self):
        if self.config.tie_word_embeddings and not self.config.score_head:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, input_ids, attention_mask=None, cache=None, right_padded=False, return_hidden=False,
                packed=None):
        """Logits [B,T,V]; with return_hidden, (the head's input [B,T,C], load-balancing loss) instead.

        attention_mask [B,S], with a cache for the cached keys too: 1 where a token is real, on whichever side
        the padding stands. Positions count real tokens only: padding does not move a sequence. right_padded:
        padding only follows the tokens, the causal mask hides it already. packed: input_ids [1,M] as there.
        """
        start, T = cache.length if cache is not None else 0, input_ids.shape[1]
        longest = packed.longest if packed is not None else start + T
        if longest > self.config.max_position_embeddings:
            raise ValueError(f"{longest} tokens exceed max_position_embeddings "
                             f"{self.config.max_position_embeddings}")
        keys = torch.arange(start + T, device=input_ids.device)         # [S]
        positions, mask = keys[None, start:], None                      # [1,T]; no mask means causal
        valid = attention_mask[:, start:] if attention_mask is not None else None
        if packed is not None:
            positions, valid = packed.positions[None], packed.weight
        elif attention_mask is not None and not right_padded:
            real, query = attention_mask.bool(), positions.T            # [B,S], [T,1]
            # A query always sees itself: where all is padding a softmax over nothing would be NaN.
            mask = (real[:, None] & (keys <= query) | (keys == query))[:, None]         # [B,1,T,S]
            positions = (real.cumsum(dim=1) - 1).clamp(min=0)[:, start:]                # [B,T]
        elif start and T > 1:
            mask = keys <= positions.T                                  # [T,S]
        angles = positions[..., None].float() * self.rope_freqs         # [B or 1,T,D/2]
        cos, sin = (f(angles)[:, None] * self.rope_scale for f in (torch.cos, torch.sin))   # [B or 1,1,T,D/2]
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)        # as rotate reads them

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
