"""Sampling with a KV cache, the one scorer of log-probs, and the weights that are sampled from.

Needs torch and model.py, nothing else. Letters in shape comments: B prompts, G generations for each, N = B*G
rows (a prompt's group stands in consecutive rows), n rows still being sampled, P prompt length, R response
length, M scored tokens, m those of a chunk, C hidden size, V vocabulary.
"""
import bisect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import KVCache, Packed

# ---------------------------------------------------------------- sampling

@dataclass
class Rollout:
    """N completions of a batch of prompts; row i belongs to prompt i // G."""
    prompts: list                   # N lists of ids
    completion_ids: torch.Tensor    # [N,R], padded behind the end
    completion_mask: torch.Tensor   # [N,R] bool: the tokens up to and with the first end-of-turn
    per_token_logps: torch.Tensor   # [N,R] fp32: log-prob of each sampled token, 0 where masked
    finished: torch.Tensor          # [N] bool: False where max_new_tokens cut the completion off

    def take(self, rows):
        """(prompts, completion_ids, completion_mask) of these rows, as per_token_logps reads them."""
        return [self.prompts[i] for i in rows], self.completion_ids[rows], self.completion_mask[rows]

    def metrics(self):
        """Mean length in tokens, and the share of completions that were cut off."""
        return {"completion_length": self.completion_mask.sum(dim=1).float().mean().item(),
                "truncated_fraction": 1 - self.finished.float().mean().item()}


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


# ---------------------------------------------------------------- the weights to sample from

def rollout_policy(model, dtype):
    """The model to sample from: the policy itself in fp32; in bf16 a copy whose linear weights are cast once.

    Autocast would cast them anew for every token. Embedding and norms stay fp32, as under autocast, so that
    the sampler computes what the scorer computes.
    """
    copy = model
    if dtype != torch.float32:
        copy = type(model)(model.config).to(next(model.parameters()).device).requires_grad_(False)
        if not model.config.score_head:
            untied = copy.lm_head.weight.detach().clone()
            copy.lm_head.weight = torch.nn.Parameter(untied, requires_grad=False)
        for module in copy.modules():
            if isinstance(module, torch.nn.Linear):
                module.to(dtype)
    if next(copy.parameters()).device.type == "cpu":
        ready_for_few_rows(copy)
    update_rollout_policy(copy, model)
    return copy


@torch.no_grad()
def update_rollout_policy(rollout_model, model):
    """Bring the rollout weights up to date with the policy (nothing to do where they are the same)."""
    if rollout_model is not model:
        ours, theirs = rollout_model.state_dict(), model.state_dict()
        for name in ours:
            ours[name].copy_(theirs[name])


# A CPU multiplies the few rows of a decode step slowly: up to twice as fast, in fp32, by a weight that lies
# transposed in memory; in bf16, with the two sides exchanged. The same numbers, layer for layer (a test).

class FewRowsLinear(torch.nn.Linear):
    """nn.Linear that computes (W @ x.T).T for up to 128 rows; more are a prompt, or a rollout to score."""

    def forward(self, x):
        if x.numel() > 128 * self.in_features:
            return super().forward(x)
        y = (self.weight @ x.reshape(-1, self.in_features).t()).t()
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], self.out_features)


def ready_for_few_rows(model):
    """Change the linear layers of a model on a CPU in place, and none of what they compute."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.weight.dtype == torch.bfloat16:
            module.__class__ = FewRowsLinear
        elif isinstance(module, torch.nn.Linear) and module.weight is not model.model.embed_tokens.weight:
            module.weight.data = module.weight.data.t().contiguous().t()    # a tied head is read by rows, too


# ---------------------------------------------------------------- scoring

LOGITS_AT_ONCE = 2 ** 25    # at most so many logits are held in fp32 at a time: 128 MiB


def logits_chunk(head_weight):
    """How many tokens' logits [.,V] are held at a time."""
    return max(1, LOGITS_AT_ONCE // len(head_weight))


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
    chunk = logits_chunk(head_weight)
    if len(tokens) <= chunk:
        return _chunk_logps(hidden, head_weight, tokens, temperature)
    return torch.cat([checkpoint(_chunk_logps, h, head_weight, t, temperature, use_reentrant=False)
                      for h, t in zip(hidden.split(chunk), tokens.split(chunk))])


def per_token_logps(model, prompts, completion_ids, completion_mask, temperature=1.0, return_aux_loss=False):
    """Log-prob of every completion token under `model`: the one scorer for new, reference and recomputed old.

    prompts: N lists of ids; completion_ids, completion_mask [N,R] -> [N,R] fp32, 0 where masked. With
    return_aux_loss also the load-balancing loss of a mixture of experts (0 when dense). A prompt that stands
    in several rows one after the other, as in a group, is computed once: Packed draws how.
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
    # the number of the token before each target: its prompt's last one, or the one before it in its own row
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
        logps[rows] = per_token_logps(model, *rollout.take(rows), temperature)
    return logps
