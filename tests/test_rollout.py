"""Sampling and scoring agree with each other and with a plain forward pass; masks come from lengths."""
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import rollout as rollout_module
from model import KVCache
from rollout import (
    FewRowsLinear,
    Rollout,
    generate,
    micro_batches,
    packed_batches,
    per_token_logps,
    ready_for_few_rows,
    rollout_policy,
    sample_tokens,
    score_rollout,
    token_logps,
    update_rollout_policy,
)
import test_model
from test_model import MOE, close

PROMPTS = [[7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [5]]
ENDS = [2, 3, 4, 6, 14, 15]                     # many end tokens, so that sampled rows end early and apart
DENSE = {}
A, B = [7, 8, 9], [20, 21]      # the two prompts that the cache and Packed draw


def tiny(seed=0, **changes):
    """A model whose logits spread over a few units, so that a wrong position or mask shows."""
    return test_model.tiny(seed, **{"max_position_embeddings": 64, "tie_word_embeddings": False, **changes})


class Chain(torch.nn.Module):
    """A model whose next token depends on the last one alone: logits = table[last]. Counts its calls."""

    def __init__(self, table):
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=0)
        self.lm_head = torch.nn.Linear(len(table), len(table), bias=False)
        self.lm_head.weight.data = table.T.clone()
        self.shapes = []

    def forward(self, input_ids, attention_mask=None, cache=None, return_hidden=False):
        self.shapes.append(tuple(input_ids.shape))
        return F.one_hot(input_ids, self.lm_head.in_features).float(), 0.0


def chain(**follows):
    """Ten tokens; after token k comes follows["tk"] with logit 2 over 0, so with log-prob 2 - ln(e^2 + 9)."""
    table = torch.zeros(10, 10)
    for last, following in follows.items():
        table[int(last[1:]), following] = 2.0
    return Chain(table)


def sampled(seed=0, **options):
    return dict(generator=torch.Generator().manual_seed(seed), **options)


@torch.no_grad()
def true_logps(model, prompt, completion, temperature=1.0):
    """Log-softmax of a plain forward pass, one sequence alone, without cache, mask, batch or packing."""
    logits = model(torch.tensor([prompt + completion]))[0, len(prompt) - 1:-1] / temperature
    return F.log_softmax(logits, dim=-1)[range(len(completion)), completion]


def completions(rollout):
    return [ids[mask].tolist() for ids, mask in zip(rollout.completion_ids, rollout.completion_mask)]


# ---------------------------------------------------------------- sampling

@pytest.mark.parametrize("changes", [DENSE, MOE], ids=["dense", "moe"])
def test_greedy_generation_is_a_plain_argmax_loop_without_a_cache(changes):
    model, expected = tiny(**changes), []
    for prompt in PROMPTS:
        ids = list(prompt)
        while len(ids) < len(prompt) + 12 and ids[len(prompt):][-1:] not in ([2], [3]):
            ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
        expected.append(ids[len(prompt):])
    together = generate(model, PROMPTS, 1, 12, [2, 3], temperature=0.0)
    assert completions(together) == expected
    for prompt, ids in zip(PROMPTS, expected):
        assert completions(generate(model, [prompt], 2, 12, [2, 3], temperature=0.0)) == [ids, ids]


@pytest.mark.parametrize("temperature", [1.0, 0.8])
@pytest.mark.parametrize("changes", [DENSE, MOE], ids=["dense", "moe"])
def test_recorded_log_probs_are_the_scorers_and_those_of_a_plain_softmax(changes, temperature):
    model = tiny(**changes)
    r = generate(model, PROMPTS, 4, 12, ENDS, temperature=temperature, **sampled())
    scored = per_token_logps(model, r.prompts, r.completion_ids, r.completion_mask, temperature)
    close(scored, r.per_token_logps)
    for row, ids in enumerate(completions(r)):
        close(scored[row, :len(ids)], true_logps(model, PROMPTS[row // 4], ids, temperature))
    assert (scored[~r.completion_mask] == 0).all() and r.per_token_logps.dtype == torch.float32
    assert len(set(r.completion_mask.sum(dim=1).tolist())) > 2      # the rows do differ in length


@pytest.mark.parametrize("changes", [DENSE, MOE], ids=["dense", "moe"])
def test_under_bf16_autocast_the_sampler_and_the_scorer_stay_close(changes):
    """The same rounding points; only the order of sums differs (one query against a cache, or all at once).

    A bf16 step is 2^-8 of a number, so a last bit of these logits (up to 6) is 2^-6 to 2^-7: most tokens are
    off by one or two of those. The mean stays under .01, where bf16 itself is .015 away from fp32, so a
    sampler in another precision than the scorer's does not pass. (A router's near tie may send single tokens
    of the mixture to another expert: no bound on the largest difference there.)
    """
    model = tiny(**changes)
    sampler = rollout_policy(model, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        r = generate(sampler, PROMPTS, 8, 12, ENDS, **sampled())
        scored = per_token_logps(model, r.prompts, r.completion_ids, r.completion_mask)
    off = (scored - r.per_token_logps)[r.completion_mask].abs()
    assert scored.dtype == torch.float32
    assert off.mean() < 0.01 and off.quantile(0.95) < 0.04 and (off.max() < 0.1 or changes is MOE)


def test_hand_case_of_the_sampler_and_the_scorer():
    """Logits 2, 0, 0: 2 - ln(e^2 + 2) = -.2395; divided by .8, 2.5 - ln(e^2.5 + 2) = -.1520."""
    logits = torch.tensor([[2.0, 0.0, 0.0]])
    for temperature, expected in ((1.0, -0.2395), (0.8, -0.1520)):
        token, logp = sample_tokens(logits, temperature, torch.tensor([0.5]))
        assert token.tolist() == [0] and logp.item() == pytest.approx(expected, abs=1e-4)
        scored = token_logps(torch.ones(1, 1), logits.T, torch.tensor([0]), temperature)
        assert scored.item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_frequencies_of_samples_match_the_softmax(temperature):
    values, n = [-math.inf, 1.5, 0.0, -math.inf, 0.7, -3.0, -math.inf], 200_000
    logits = torch.tensor(values).expand(n, 7)
    weights = [math.exp(v / temperature) for v in values]
    even = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    random = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for noise, spread in ((even, 0.0), (random, 4.0)):
        counts = sample_tokens(logits, temperature, noise)[0].bincount(minlength=7).tolist()
        for weight, count in zip(weights, counts):
            p = weight / sum(weights)
            assert abs(count - n * p) <= spread * math.sqrt(n * p * (1 - p)) + (1.5 if p else 0)


def test_a_token_of_probability_0_never_comes_even_at_the_ends_of_the_noise():
    last = math.nextafter(1.0, 0.0)
    noise = torch.tensor([0.0, last, 0.0, last, 1 - 2 ** -24, 2 ** -60], dtype=torch.float64)
    for inner in ([0.3, -0.2], [0.1, 0.7], [-1.1, 4.2]):
        logits = torch.tensor([-math.inf, -math.inf, *inner, -math.inf, -1e9]).expand(6, 6)
        tokens, logps = sample_tokens(logits, 1.0, noise)
        assert tokens.tolist() == [2, 3, 2, 3, 3, 2] and logps.isfinite().all()
    assert sample_tokens(torch.zeros(2, 4), 1.0, noise[:2])[0].tolist() == [0, 3]


def test_a_large_vocabularys_tail_can_be_drawn():
    """One token holds 1 - 1e-9, a hundred thousand share the rest: an fp32 running sum never leaves 1."""
    logits = torch.full((2, 100_001), math.log(1e-14))
    logits[:, 0] = 0.0
    tokens = sample_tokens(logits, 1.0, torch.tensor([0.9, 1 - 5e-10], dtype=torch.float64))[0].tolist()
    assert tokens[0] == 0 and 30_000 < tokens[1] < 70_000


def test_generate_draws_every_token_from_the_softmax():
    """8,000 completions of two tokens: first and second token within 4 sigma of the chain's probabilities."""
    table = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 0.0], [0.5, -0.5, 1.5]])
    r = generate(Chain(table), [[0]], 8000, 2, [9], temperature=0.8, **sampled())
    first = (table[0] / 0.8).softmax(dim=0)
    for place, p in enumerate((first, first @ (table / 0.8).softmax(dim=1))):
        share = r.completion_ids[:, place].bincount(minlength=3) / 8000
        assert ((share - p).abs() < 4 * (p * (1 - p) / 8000).sqrt()).all()


# ---------------------------------------------------------------- masks, ends, batches

@pytest.mark.parametrize("check_every", [1, 2, 4, 1000])
@pytest.mark.parametrize("pad", [0, 9, 5, 3], ids=["pad apart", "pad = end", "pad = 5", "pad = 3"])
def test_masks_run_up_to_and_with_the_first_end_token_whatever_pad_is(pad, check_every):
    """Completions 5 6 E, E, and 3 3 3 ... without an end; behind an end the chain would go on with 5 6 E."""
    model = chain(t1=5, t5=6, t6=9, t2=9, t3=3, t9=5)
    r = generate(model, [[8, 1], [2], [8, 8, 3]], 1, 6, [9], pad, 0.0, check_every=check_every)
    assert r.completion_mask.tolist() == [[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1] * 6]
    assert r.completion_ids.tolist() == [[5, 6, 9, pad, pad, pad], [9] + [pad] * 5, [3] * 6]
    assert r.finished.tolist() == [True, True, False]           # the last was cut off
    close(r.per_token_logps, r.completion_mask * (2 - math.log(math.exp(2) + 9)))
    assert r.prompts == [[8, 1], [2], [8, 8, 3]]


def test_an_end_token_in_the_last_place_counts_as_finished_and_dead_columns_are_cut():
    model = chain(t1=5, t5=6, t6=9, t2=9)
    r = generate(model, [[1], [2]], 1, 3, [9], 0, 0.0)
    assert r.finished.tolist() == [True, True] and completions(r) == [[5, 6, 9], [9]]
    assert generate(model, [[1], [2]], 1, 50, [7, 9], 0, 0.0).completion_ids.shape == (2, 3)
    assert generate(model, [[1]], 1, 2, [9], 0, 0.0).finished.tolist() == [False]


def test_each_prompt_is_prefilled_once_and_finished_rows_leave():
    model = chain(t1=5, t5=6, t6=9, t2=9, t3=3)
    r = generate(model, [[8, 1], [2], [8, 8, 3]], 2, 5, [9], 0, 0.0, check_every=1)
    assert model.shapes == [(3, 3), (4, 1), (4, 1), (2, 1), (2, 1)]
    assert r.prompts == [[8, 1], [8, 1], [2], [2], [8, 8, 3], [8, 8, 3]]
    model.shapes.clear()
    generate(model, [[8, 1], [2]], 3, 50, [9], 0, 0.0, check_every=3)
    assert model.shapes == [(2, 2), (6, 1), (6, 1)]               # all have ended: no further call


def test_samples_depend_on_neither_the_check_interval_nor_the_group_nor_the_other_prompts():
    model = tiny()
    base = generate(model, PROMPTS, 4, 12, ENDS, **sampled(3))
    assert len(set(map(tuple, completions(base)))) > 6
    for check_every in (1, 2, 1000):
        r = generate(model, PROMPTS, 4, 12, ENDS, check_every=check_every, **sampled(3))
        assert torch.equal(r.completion_ids, base.completion_ids) and torch.equal(r.finished, base.finished)
        close(r.per_token_logps, base.per_token_logps)
    ungrouped = generate(model, [p for p in PROMPTS for _ in range(4)], 1, 12, ENDS, **sampled(3))
    assert torch.equal(ungrouped.completion_ids, base.completion_ids)       # each row prefilled on its own
    close(ungrouped.per_token_logps, base.per_token_logps)
    for others in ([], [[33] * 9], [[1], [2, 3]]):
        r = generate(model, [PROMPTS[0], *others], 4, 12, ENDS, **sampled(3))
        assert completions(r)[:4] == completions(base)[:4]
    noise = torch.rand(12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    alone = generate(model, PROMPTS[1:2], 4, 12, ENDS, noise=noise[4:8])
    assert completions(alone) == completions(base)[4:8]
    assert completions(generate(model, PROMPTS, 4, 12, ENDS, **sampled(4))) != completions(base)


@torch.no_grad()
def noise_for(model, prompt, completion):
    """The noise that draws these tokens: for each the middle of its interval of the plain softmax's CDF."""
    noise = []
    for t, token in enumerate(completion):
        p = model(torch.tensor([prompt + completion[:t]]))[0, -1].double().softmax(dim=-1)
        noise.append((p[:token].sum() + p[token] / 2).item())
    return noise


@pytest.mark.parametrize("changes", [DENSE, MOE], ids=["dense", "moe"])
def test_rows_that_end_and_leave_change_nothing_for_the_others(changes, monkeypatch):
    """Groups of three as the cache draws them: rows 0, 3 and 4 end first, then row 1, then row 5; row 2 is
    cut off. Completions and log-probs are those of a plain forward pass of each row alone.
    """
    model, E, dropped, real = tiny(**changes), 2, [], KVCache.drop_rows

    def drop_rows(cache, kept, device):
        dropped.append((kept, real(cache, kept, device)))
        return dropped[-1][1]

    monkeypatch.setattr(KVCache, "drop_rows", drop_rows)
    written = [[30, E], [31, 40, 50, E], [32, 41, 51, 60, 10, 11, 12, 13], [33, E], [E],
               [34, 42, 52, 59, 14, E]]
    rows = list(zip([A, A, A, B, B, B], written))
    noise = torch.full((6, 8), 0.5, dtype=torch.float64)        # behind an end: whatever comes, it is masked
    for row, (prompt, completion) in enumerate(rows):
        noise[row, :len(completion)] = torch.tensor(noise_for(model, prompt, completion))
    r = generate(model, [A, B], 3, 8, [E], noise=noise, check_every=2)
    assert completions(r) == written and r.finished.tolist() == [True, True, False, True, True, True]
    assert dropped == [([1, 2, 5], [5, 1, 2]), ([0, 2], [0, 2]), ([1], [1])]        # 5 1 2; 5 2; 2
    for logps, (prompt, completion) in zip(r.per_token_logps, rows):
        close(logps[:len(completion)], true_logps(model, prompt, completion))
        assert (logps[len(completion):] == 0).all()


def test_dropout_and_train_mode_change_no_log_prob_and_the_mode_is_restored():
    model, plain = tiny(dropout=0.5), tiny()
    for mode in (True, False):
        model.train(mode)
        r = generate(model, PROMPTS, 4, 12, ENDS, **sampled())
        assert model.training is mode
        assert completions(r) == completions(generate(plain, PROMPTS, 4, 12, ENDS, **sampled()))
        close(r.per_token_logps, per_token_logps(plain, r.prompts, r.completion_ids, r.completion_mask))


def test_rows_are_taken_and_measured_by_hand():
    """Lengths 3, 1, 2, 2: mean 2; one of four was cut off."""
    mask = torch.arange(3) < torch.tensor([[3], [1], [2], [2]])
    r = Rollout([[1], [1], [2, 2], [2, 2]], torch.arange(12).view(4, 3), mask, torch.zeros(4, 3),
                torch.tensor([True, True, False, True]))
    prompts, ids, taken = r.take([3, 0])
    assert prompts == [[2, 2], [1]] and ids.tolist() == [[9, 10, 11], [0, 1, 2]]
    assert taken.tolist() == [[True, True, False], [True, True, True]]
    assert r.metrics() == {"completion_length": 2.0, "truncated_fraction": 0.25}


# ---------------------------------------------------------------- the weights to sample from

def test_rollout_policy_is_a_copy_in_bf16_that_update_brings_up_to_date():
    model = tiny(tie_word_embeddings=True)
    assert rollout_policy(model, torch.float32) is model
    copy = rollout_policy(model, torch.bfloat16)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    assert not any(p.requires_grad for p in copy.parameters())
    assert all(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5)
    assert torch.equal(copy.model["norm"].weight, before["model.norm.weight"])      # no shared memory
    update_rollout_policy(copy, model)
    for name, tensor in copy.state_dict().items():
        linear = "proj" in name or name == "lm_head.weight"
        assert tensor.dtype == (torch.bfloat16 if linear else torch.float32), name
        assert torch.equal(tensor, model.state_dict()[name].to(tensor.dtype)), name


@pytest.mark.parametrize("shape", [(3, 1, 16), (0, 16), (64, 2, 16), (129, 16), (1, 300, 16)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer_for_few_rows_is_a_linear_layer(shape, bias):
    layer = torch.nn.Linear(16, 24, bias=bias)
    expected = layer.double()(x := torch.randn(shape, dtype=torch.float64))
    layer.__class__ = FewRowsLinear
    assert torch.allclose(layer(x), expected, rtol=1e-12, atol=1e-12) and layer(x).shape == expected.shape


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("changes", [{"qkv_bias": True, "qk_norm": False}, MOE], ids=["biases", "moe"])
@torch.no_grad()
def test_layers_made_ready_for_few_rows_hold_and_compute_what_they_did(changes, tied):
    """Each linear layer against nn.functional.linear of the weight as it was, for few rows and for many. In
    fp32 the weight lies transposed in memory, but for a tied head: the embedding reads that by rows.
    """
    model, generator = tiny(tie_word_embeddings=tied, **changes), torch.Generator().manual_seed(4)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    place, head = model.model.embed_tokens.weight.data_ptr(), model.lm_head.weight
    logits = model(torch.arange(10).view(2, 5))
    ready_for_few_rows(model)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    layers = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert len(layers) == (2 * (4 + 1 + 4 * 3) if "use_moe" in changes else 2 * (4 + 3)) + 1
    for name, layer in layers.items():
        weight, bias = before[name + ".weight"], before.get(name + ".bias")
        assert type(layer) is torch.nn.Linear and (layer.bias is None) == (bias is None)
        assert layer.weight.is_contiguous() == (tied and name == "lm_head"), name
        assert layer.weight.t().is_contiguous() != layer.weight.is_contiguous()
        for rows in (1, 8, 300):
            x = torch.randn(rows, weight.shape[1], generator=generator) / 8
            close(layer(x), F.linear(x, weight, bias), 1e-6)
    assert model.lm_head.weight is head and (head is model.model.embed_tokens.weight) == tied
    assert model.model.embed_tokens.weight.data_ptr() == place
    assert model.model.embed_tokens.weight.is_contiguous()
    close(model(torch.arange(10).view(2, 5)), logits)


@torch.no_grad()
def test_bf16_layers_made_ready_for_few_rows_compute_what_they_did():
    model, generator = tiny().to(torch.bfloat16), torch.Generator().manual_seed(4)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    ready_for_few_rows(model)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            assert type(layer) is FewRowsLinear and layer.weight.is_contiguous()
            for rows in (1, 8, 300):    # a sum in another order may round to the next of 8 bits
                x = torch.randn(rows, layer.in_features, generator=generator).bfloat16()
                torch.testing.assert_close(layer(x), F.linear(x, before[name + ".weight"]), rtol=2 ** -7,
                                           atol=2 ** -9)


# ---------------------------------------------------------------- scoring

@pytest.mark.parametrize("garbage", [-1, 60, 10 ** 9])
def test_garbage_in_masked_slots_changes_neither_log_probs_nor_gradient(garbage):
    model, results = tiny(), []
    r = generate(model, PROMPTS, 2, 12, ENDS, **sampled())
    for ids in (r.completion_ids, r.completion_ids.masked_fill(~r.completion_mask, garbage)):
        model.zero_grad()
        logps = per_token_logps(model, r.prompts, ids, r.completion_mask)
        logps.sum().backward()
        results.append((logps.detach(), [p.grad.clone() for p in model.parameters()]))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1]))


def test_rows_without_a_valid_token_score_0_with_a_finite_gradient():
    model, mask = tiny(), torch.zeros(2, 3, dtype=torch.bool)
    for mask in (mask, torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()):
        logps = per_token_logps(model, PROMPTS[:2], torch.full((2, 3), 7), mask)
        logps.sum().backward()
        assert logps.shape == (2, 3) and (logps[~mask] == 0).all()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_token_logps_in_chunks_is_log_softmax_in_value_and_gradient(temperature, monkeypatch):
    generator = torch.Generator().manual_seed(2)
    hidden, head = torch.randn(10, 5, generator=generator), torch.randn(61, 5, generator=generator)
    tokens, weight = torch.randint(0, 61, (10,), generator=generator), torch.randn(10, generator=generator)
    results = []
    for at_once in (2 ** 25, 61 * 3, 61, 1):
        monkeypatch.setattr(rollout_module, "LOGITS_AT_ONCE", at_once)
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        logps = token_logps(h, w, tokens, temperature)
        (logps * weight).sum().backward()
        results.append((logps.detach(), h.grad, w.grad))
    h, w = hidden.double().requires_grad_(), head.double().requires_grad_()
    expected = F.log_softmax(h @ w.T / temperature, dim=-1)[range(10), tokens]
    (expected * weight).sum().backward()
    for result in results:
        for ours, theirs in zip(result, (expected.detach(), h.grad, w.grad)):
            close(ours, theirs.float())


def test_micro_batches_cover_every_row_once_within_the_budget():
    """Sorted 1 1 3 4 5 with budget 8: 1 1 (a third row of length 3 makes 9), 3 4 (2 * 4 = 8), 5."""
    assert micro_batches([5, 1, 4, 1, 3], 8) == [[1, 3], [4, 2], [0]]
    assert micro_batches([9, 2], 8) == [[1], [0]]               # longer than the budget: alone
    lengths = torch.randint(1, 40, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    for budget in (1, 40, 100, 10_000):
        groups = micro_batches(lengths, budget)
        assert sorted(sum(groups, [])) == list(range(50))
        assert all(len(g) == 1 or len(g) * max(lengths[i] for i in g) <= budget for g in groups)


def padded_logps(model, prompts, ids, mask, temperature):
    """Every row on its own in a padded batch, all logits, log_softmax: what the packed scorer must equal."""
    n = mask.sum(dim=1).tolist()
    rows = [p + c[:max(0, k - 1)] for p, c, k in zip(prompts, ids.tolist(), n)]
    T = max(map(len, rows))
    real = torch.tensor([[1] * len(r) + [0] * (T - len(r)) for r in rows])
    hidden, aux = model(torch.tensor([r + [0] * (T - len(r)) for r in rows]), real, right_padded=True,
                        return_hidden=True)
    logps = torch.log_softmax(model.lm_head(hidden) / temperature, dim=-1)
    out = torch.zeros(mask.shape)
    for i, (p, k) in enumerate(zip(prompts, n)):
        for j in range(k):
            out[i, j] = logps[i, len(p) - 1 + j, ids[i, j]]
    return out, aux


@pytest.mark.parametrize("changes", [DENSE, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("groups, lengths", [
    ([0, 0, 0, 1, 1, 2], [5, 1, 3, 2, 7, 4]), ([2, 0, 0, 2], [1, 1, 1, 1]), ([1], [6]),
    ([0, 1, 2], [0, 3, 0]), ([1, 1], [4, 4])], ids=str)
def test_packed_log_probs_and_gradients_are_those_of_padded_rows(groups, lengths, changes):
    prompts = [list(PROMPTS[g]) for g in groups]
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(0, 61, mask.shape, generator=generator)
    weight, results = torch.randn(mask.shape, generator=generator), []
    for scorer in (padded_logps, lambda *a: per_token_logps(*a, return_aux_loss=True)):
        model = tiny(**changes)
        logps, aux = scorer(model, prompts, ids, mask, 0.8)
        ((logps * weight).sum() + aux).backward()
        results.append((logps.detach(), torch.as_tensor(aux).detach(),
                        torch.cat([p.grad.flatten() for p in model.parameters()])))
    (plain, plain_aux, plain_grad), (packed, packed_aux, packed_grad) = results
    close(packed, plain)
    close(packed_aux, plain_aux)
    assert (packed_grad - plain_grad).norm() <= 1e-5 * plain_grad.norm()


def test_a_groups_prompt_is_computed_once():
    """3 + 1 prompt tokens and all completion tokens but the last of each: 4 + 2 + 1 + 4."""
    model, seen = tiny(), []
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.append("all logits"))
    model.model["norm"].register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    mask = torch.arange(5) < torch.tensor([3, 2, 5])[:, None]
    per_token_logps(model, [PROMPTS[1], list(PROMPTS[1]), PROMPTS[2]], torch.full((3, 5), 7), mask)
    assert seen == [(1, 11, 32)]


DRAWN_LENGTHS = [3, 2, 3, 3, 4, 2]      # of Packed's drawing


def drawn_rollout():
    """Completions that no two rows share: row i's j-th token is 30 + 4i + j; garbage behind the end."""
    ids = torch.arange(30, 54).view(6, 4)
    return [A, A, A, B, B, B], ids, torch.arange(4) < torch.tensor(DRAWN_LENGTHS)[:, None]


@pytest.mark.parametrize("temperature", [1.0, 0.8])
@pytest.mark.parametrize("changes", [DENSE, MOE], ids=["dense", "moe"])
@torch.no_grad()
def test_packed_log_probs_of_the_drawing_are_those_of_each_row_alone(changes, temperature):
    model, (prompts, ids, mask) = tiny(**changes), drawn_rollout()
    logps = per_token_logps(model, prompts, ids, mask, temperature)
    for row, n in enumerate(DRAWN_LENGTHS):
        close(logps[row, :n], true_logps(model, prompts[row], ids[row, :n].tolist(), temperature))
        assert (logps[row, n:] == 0).all()


def test_a_target_is_guessed_at_the_number_that_is_drawn(monkeypatch):
    """A model whose hidden state is a token's number: what the head is asked at is then seen."""
    class Numbers(torch.nn.Module):
        lm_head = torch.nn.Linear(1, 61, bias=False)

        def forward(self, ids, packed, return_hidden):
            self.ids, self.packed = ids, packed
            return torch.arange(ids.shape[1])[None, :, None].float(), 0.0

    asked, model = [], Numbers()
    monkeypatch.setattr(rollout_module, "token_logps", lambda hidden, head, tokens, temperature: (
        asked.extend(zip(tokens.tolist(), hidden[:, 0].tolist())), hidden[:, 0])[1])
    per_token_logps(model, *drawn_rollout())
    guessed_at = [[2, 5, 6], [2, 7], [2, 8, 9], [4, 10, 11], [4, 12, 13, 14], [4, 15]]
    assert asked == [(30 + 4 * row + j, at) for row, places in enumerate(guessed_at)
                     for j, at in enumerate(places)]
    # the same from the drawing's own numbers: a prompt's last token, then the completion's in its own row
    ends, starts = model.packed.prompt_ends.tolist(), model.packed.starts.tolist()
    assert guessed_at == [[ends[g] - 1, *range(start, start + n - 1)]
                          for g, start, n in zip([0, 0, 0, 1, 1, 1], starts, DRAWN_LENGTHS)]
    a0, a1, a2, b3, b4, b5 = [30, 31], [34], [38, 39], [42, 43], [46, 47, 48], [50]     # but the last of each
    assert model.ids.tolist() == [A + B + a0 + a1 + a2 + b3 + b4 + b5]


def test_packed_batches_keep_groups_together_within_the_budget():
    def rollout(prompt_lengths, lengths):
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        return SimpleNamespace(prompts=[[1] * n for n in prompt_lengths], completion_mask=mask)

    small = rollout([2, 2, 2, 5, 5, 5], [3, 1, 3, 1, 1, 9])
    assert packed_batches(small, range(6), 15) == [[0, 1, 2], [3, 4], [5]]     # 3 x 5; 2 x 6 (3 x 14 no); 14
    assert packed_batches(small, [4, 0, 3], 15) == [[0], [3, 4]]                # 2 x (5 + 3) is too much
    assert packed_batches(small, range(6), 1) == [[i] for i in range(6)]
    assert packed_batches(small, range(6), 1000) == [list(range(6))]


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_score_rollout_is_per_token_logps(budget):
    model = tiny()
    r = generate(model, PROMPTS, 4, 12, ENDS, temperature=0.8, **sampled())
    scores = score_rollout(model, r, 0.8, budget)
    close(scores, per_token_logps(model, r.prompts, r.completion_ids, r.completion_mask, 0.8))
    close(scores, r.per_token_logps)
    assert not scores.requires_grad and isinstance(r, Rollout)
