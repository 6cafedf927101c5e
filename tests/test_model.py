"""The decoder alone: its sizes, its cache and masks, RoPE's frequencies, and the balance of its experts."""
import pytest
import torch
from transformers.models.qwen3_moe import modeling_qwen3_moe

import model as model_module
from model import KVCache, MiniMind, MiniMindConfig, MixtureOfExperts, Packed, rope_frequencies

SIZES = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=48, max_position_embeddings=128)
MOE = dict(use_moe=True, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
IDS = torch.randint(0, 61, (3, 11), generator=torch.Generator().manual_seed(5))


def randomize(module, seed=0):
    """Weights large enough that attention is not flat, norms that are not 1: every tensor shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.2 * noise if p.dim() == 1 else 0.25 * noise)
    return module.eval()


def tiny(seed=0, **changes):
    return randomize(MiniMind(MiniMindConfig(**{**SIZES, **changes})), seed)


def close(a, b, atol=1e-5):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


# ---------------------------------------------------------------- sizes

def test_default_config_is_minimind_3():
    c = MiniMindConfig()
    assert (c.hidden_size, c.num_hidden_layers, c.vocab_size, c.intermediate_size) == (768, 8, 6400, 2432)
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rope_theta) == (8, 4, 96, 1e6)
    assert c.tie_word_embeddings and not c.use_moe and c.rope_scaling is None and c.dropout == 0
    with torch.device("meta"):
        count = sum(p.numel() for p in MiniMind(c).parameters())
    attention = 768 * (768 + 384 + 384 + 768) + 2 * 96
    assert count == 6400 * 768 + 8 * (attention + 3 * 768 * 2432 + 2 * 768) + 768       # 63.9 million


@pytest.mark.parametrize("changes, named", [
    ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
    ({"head_dim": 7}, "head_dim 7 must be even"), ({"hidden_size": 3}, "head_dim 0 must be even"),
    ({"rope_theta": 1.0}, "rope_theta must be above 1"), ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number, not 0"),
    ({"hidden_size": -32}, "hidden_size"), ({"head_dim": -8}, "head_dim"), ({"vocab_size": 61.0}, "vocab"),
    ({"hidden_size": "32"}, "hidden_size must be a positive whole number, not '32'"),
    ({"intermediate_size": True}, "intermediate_size"), ({"dropout": float("nan")}, "dropout"),
    ({"use_moe": 1}, "use_moe must be true or false, not 1"), ({"rope_scaling": "yarn"}, "rope_scaling"),
    ({"eos_token_id": [2, "x"]}, "eos_token_id must be a token id"),
    ({**MOE, "num_experts_per_tok": 5}, "num_experts_per_tok must lie in 1..num_experts"),
], ids=str)
def test_sizes_that_cannot_be_are_a_value_error_that_names_them(changes, named):
    with pytest.raises(ValueError, match=named):
        MiniMindConfig(**{**SIZES, **changes})


@pytest.mark.parametrize("scaling, named", [
    ({"rope_type": "yarn", "original_max_position_embeddings": 64}, "needs factor"),
    ({"rope_type": "yarn", "factor": 4.0}, "needs original_max_position_embeddings"),
    ({"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 64}, "factor.* at least 1"),
    ({"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 64}, "needs low_freq_factor"),
    ({"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 64, "low_freq_factor": 4,
      "high_freq_factor": 4}, "low_freq_factor 4 must be below high 4"),
], ids=str)
def test_a_rope_scaling_that_lacks_a_number_is_a_value_error(scaling, named):
    with pytest.raises(ValueError, match=named):
        tiny(rope_scaling=scaling)


# ---------------------------------------------------------------- cache and masks

@pytest.mark.parametrize("changes", [{}, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("pieces", [[1] * 11, [4] + [1] * 7, [3, 3, 5], [11]], ids=str)
@torch.no_grad()
def test_cached_logits_equal_uncached_logits(pieces, changes):
    model, cache = tiny(**changes), KVCache(2, 11)
    parts = [model(piece, cache=cache) for piece in IDS.split(pieces, dim=1)]
    close(torch.cat(parts, dim=1), model(IDS), 1e-5)
    assert cache.length == 11


@pytest.mark.parametrize("changes", [{}, MOE], ids=["dense", "moe"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_gives_what_each_sequence_gives_alone(side, changes):
    model, lengths = tiny(**changes), (11, 6, 1)
    ids, mask = torch.full((3, 11), 7), torch.zeros(3, 11, dtype=torch.long)
    for row, n in enumerate(lengths):
        place = slice(11 - n, None) if side == "left" else slice(n)
        ids[row, place], mask[row, place] = IDS[row, :n], 1
    logits = model(ids, mask)
    for row, n in enumerate(lengths):
        close(logits[row][mask[row].bool()], model(IDS[row:row + 1, :n])[0], 1e-5)
    if side == "right":     # the same without a dense mask
        fast = model(ids, mask, right_padded=True)
        close(fast[mask.bool()], logits[mask.bool()], 1e-5)


@pytest.mark.parametrize("pieces", [[5] + [1] * 6, [5, 4, 2]], ids=str)
@torch.no_grad()
def test_left_padding_with_a_cache_does_not_move_a_sequence(pieces):
    model, cache, mask = tiny(), KVCache(2, 11), torch.ones(3, 11, dtype=torch.long)
    mask[1, :3], mask[2, :4] = 0, 0
    parts, end = [], 0
    for piece in IDS.split(pieces, dim=1):
        end += piece.shape[1]
        parts.append(model(piece, mask[:, :end], cache))
    logits = torch.cat(parts, dim=1)
    for row, start in enumerate((0, 3, 4)):
        close(logits[row, start:], model(IDS[row:row + 1, start:])[0], 1e-5)


def test_a_hole_in_the_mask_does_not_move_what_follows():
    """Padding between prompt and completion: without it RoPE's distances, not only the mask, would differ."""
    model, mask = tiny(), torch.ones(3, 11, dtype=torch.long)
    mask[:, 4:7] = 0
    kept = mask[0].bool()
    close(model(IDS, mask)[:, kept], model(IDS[:, kept]), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, MOE], ids=["dense", "moe"])
def test_fully_masked_rows_give_no_nan(changes, dtype):
    model = tiny(**changes).to(dtype)
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[0], mask[1, :10] = 0, 0
    with torch.no_grad():
        for options in ({}, {"right_padded": True}, {"cache": KVCache(2, 11)}):
            assert model(IDS, mask, **options).isfinite().all()
    hidden, aux = model(IDS, torch.zeros_like(mask), return_hidden=True)
    (hidden.float().sum() + aux).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_autocast_casts_what_several_layers_read_once_and_to_the_same_values(monkeypatch):
    """q, k and v, and gate and up, are handed one bf16 tensor. Cast by each layer for itself, the logits are
    the same bit by bit, and the inputs are fp32.
    """
    model, seen = tiny(), {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            module.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0]}))

    def logits():
        with torch.autocast("cpu", torch.bfloat16):
            return model(IDS)

    once = logits()
    for i in range(2):
        for layers in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
            inputs = [seen[f"model.layers.{i}.{name}_proj"] for name in layers]
            assert inputs[0].dtype == torch.bfloat16 and all(x is inputs[0] for x in inputs)
    monkeypatch.setattr(model_module, "cast_once", lambda x: x)
    assert torch.equal(logits(), once)
    assert all(x.dtype == torch.float32 for x in seen.values())


def test_the_future_changes_nothing():
    model, other = tiny(), IDS.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 61
    assert torch.equal(model(IDS)[:, :7], model(other)[:, :7])


@torch.no_grad()
def test_cache_buffers_are_written_in_place():
    model, cache, places = tiny(), KVCache(2, 11), []
    for piece in IDS.split([4] + [1] * 7, dim=1):
        model(piece, cache=cache)
        places.append([t.data_ptr() for t in cache.keys + cache.values])
    assert all(p == places[0] for p in places) and len(set(places[0])) == 4


@torch.no_grad()
def test_selected_cache_rows_follow_their_sequences():
    model, cache, rows = tiny(), KVCache(2, 11), torch.tensor([2, 2, 0])
    model(IDS[:, :6], cache=cache)
    cache.select_rows(rows)
    close(model(IDS[rows, 6:], cache=cache), model(IDS[rows])[:, 6:], 1e-5)


@torch.no_grad()
def test_kept_cache_rows_follow_their_sequences_and_only_gaps_are_filled():
    model, cache = tiny(), KVCache(2, 11)
    model(IDS[:, :6], cache=cache)
    places = [t.data_ptr() for t in cache.keys + cache.values]
    assert cache.drop_rows([1, 2]) == [2, 1]
    close(model(IDS[[2, 1], 6:9], cache=cache), model(IDS[[2, 1]])[:, 6:9], 1e-5)
    assert cache.drop_rows([0]) == [0]
    close(model(IDS[[2], 9:], cache=cache), model(IDS[[2]])[:, 9:], 1e-5)
    assert [t.data_ptr() for t in cache.keys + cache.values] == places


def test_the_caches_drawing_is_what_it_does():
    """Position 0 holds the prompt (a 10, b 20), position 1 the row's own number."""
    def column(values):         # keys [rows,1,1,1], and values that are their negatives
        return torch.tensor(values, dtype=torch.float).view(-1, 1, 1, 1)

    def held():
        keys, values = cache.keys[0][:, 0, :cache.length, 0], cache.values[0][:, 0, :cache.length, 0]
        assert torch.equal(values, -keys)
        return keys.tolist()

    cache = KVCache(1, 2)
    cache.append(0, column([10, 20]), -column([10, 20]))
    cache.length = 1
    cache.select_rows(torch.tensor([0, 0, 0, 1, 1, 1]))
    assert held() == [[10], [10], [10], [20], [20], [20]]
    cache.append(0, column(range(6)), -column(range(6)))
    cache.length = 2
    assert cache.drop_rows([1, 2, 5]) == [5, 1, 2]
    assert held() == [[20, 5], [10, 1], [10, 2]]


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_decoding_in_bf16_stays_near_the_whole_sequence_in_fp32(padded):
    """A bf16 number has 8 bits: after two layers logits are right to some hundredths of their spread."""
    model, cache, mask = tiny(), KVCache(2, 11), torch.ones(3, 11, dtype=torch.long)
    mask[1, :3] = 0 if padded else 1
    expected = model(IDS, mask)[mask.bool()]
    model.to(torch.bfloat16)
    parts = [model(piece, mask[:, :end] if padded else None, cache)
             for end, piece in enumerate(IDS.split(1, dim=1), 1)]
    logits = torch.cat(parts, dim=1)[mask.bool()].float()
    assert (logits - expected).std() < 0.03 * expected.std()


@torch.no_grad()
def test_a_full_cache_refuses_another_token():
    """Written past its end a cache would drop the key and answer as if the token had never been."""
    model, cache = tiny(), KVCache(2, 4)
    model(IDS[:, :4], cache=cache)
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        model(IDS[:, 4:5], cache=cache)


@pytest.mark.parametrize("how", ["plain", "cached", "packed"])
@torch.no_grad()
def test_more_tokens_than_positions_are_a_value_error(how):
    model, cache = tiny(max_position_embeddings=10), KVCache(2, 11)
    with pytest.raises(ValueError, match="11 tokens exceed max_position_embeddings 10"):
        if how == "cached":
            model(IDS[:, :10], cache=cache)
            model(IDS[:, 10:], cache=cache)
        elif how == "packed":
            model(torch.arange(12)[None], packed=Packed([4], [7, 1], [0, 0], "cpu"))
        else:
            model(IDS)


# ---------------------------------------------------------------- packed

def test_packeds_drawing_is_what_it_holds():
    packed = Packed([3, 2], [2, 1, 2, 2, 3, 1], [0, 0, 0, 1, 1, 1], "cpu")
    assert packed.positions.tolist() == [0, 1, 2, 0, 1, 3, 4, 3, 3, 4, 2, 3, 2, 3, 4, 2]
    assert packed.prompt_ends.tolist() == [3, 5] and packed.starts.tolist() == [5, 7, 8, 10, 12, 15]
    # laid out for attention: prompts [2,3], completions [6,3]; only the places of a token count
    assert packed.prompt_tokens[0].tolist() == [0, 1, 2] and packed.prompt_tokens[1, :2].tolist() == [3, 4]
    rows = [row[:n].tolist() for row, n in zip(packed.tokens, (2, 1, 2, 2, 3, 1))]
    assert rows == [[5, 6], [7], [8, 9], [10, 11], [12, 13, 14], [15]]
    # a prompt's three rows each pay its tokens into the balance of experts
    assert packed.weight.tolist() == [3, 3, 3, 3, 3] + [1] * 11 and packed.longest == 3 + 3


@torch.no_grad()
def test_packed_tokens_see_their_own_prompt_and_completion_and_nothing_else():
    """The drawing's sixteen tokens: the hidden state of each is that of its own sequence, computed alone."""
    model, ids = tiny(), torch.arange(20, 36)
    packed = Packed([3, 2], [2, 1, 2, 2, 3, 1], [0, 0, 0, 1, 1, 1], "cpu")
    hidden = model(ids[None], packed=packed, return_hidden=True)[0][0]
    a, b = [0, 1, 2], [3, 4]
    for numbers in (a + [5, 6], a + [7], a + [8, 9], b + [10, 11], b + [12, 13, 14], b + [15]):
        close(hidden[numbers], model(ids[None, numbers], return_hidden=True)[0][0], 1e-5)


# ---------------------------------------------------------------- RoPE

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def test_llama3_frequencies_by_hand():
    """theta 1e4, D 8, 100 trained positions: pairs turn 100/(2 pi) * (1, .1, .01, .001) = 15.9, 1.59, .159,
    .0159 times. Above 4 turns a pair stays, below 1 it has an eighth; 1.59 lies .5915/3 of the way up.
    """
    freqs, scale = rope_frequencies(MiniMindConfig(head_dim=8, rope_theta=1e4, rope_scaling={
        **LLAMA3, "original_max_position_embeddings": 100}))
    kept = (100 * 0.1 / 6.2831853 - 1) / 3
    expected = torch.tensor([1, 0.1 * (kept + (1 - kept) / 8), 0.01 / 8, 0.001 / 8])
    torch.testing.assert_close(freqs, expected, atol=0, rtol=1e-5)
    assert scale == 1.0


def test_minimind_yarn_frequencies_by_hand():
    """theta 1e6, D 96, 2048 trained positions: pair p turns n times at p = 96 ln(2048/(2 pi n)) / (2 ln 1e6).

    That is p = 8.06 for n = 32 and p = 20.11 for n = 1: the ramp runs from pair 8 to pair 21, so pair 8 keeps
    its frequency 1e6^(-16/96) = 0.1, pair 21 has 1/16 of its own, and pair 12 lies 4/13 of the way between.
    """
    freqs, scale = rope_frequencies(MiniMindConfig(inference_rope_scaling=True))
    assert scale == 1.0 and freqs.shape == (48,)
    assert freqs[0].item() == 1.0 and freqs[8].item() == pytest.approx(0.1, rel=1e-6)
    assert freqs[12].item() == pytest.approx(1e6 ** -0.25 * (9 / 13 + 4 / 13 / 16), rel=1e-5)      # .0225
    assert freqs[21].item() == pytest.approx(1e6 ** (-42 / 96) / 16, rel=1e-5)
    assert freqs[47].item() == pytest.approx(1e6 ** (-94 / 96) / 16, rel=1e-5)


# ---------------------------------------------------------------- load balancing

def router(probabilities, **changes):
    """A mixture whose token i, the i-th unit vector, is routed with the i-th row of probabilities."""
    c = MiniMindConfig(**{**SIZES, "hidden_size": 8, **MOE, "num_experts_per_tok": 1, **changes})
    moe = MixtureOfExperts(c)
    with torch.no_grad():
        moe.gate.weight.zero_()
        for i, row in enumerate(probabilities):
            moe.gate.weight[:, i] = torch.tensor(row).log()
    return moe, torch.eye(8)[None, :len(probabilities)]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_uniform_router_pays_coefficient_times_k(k):
    """Probabilities 1/E and shares that sum to k: E * sum(share / E) = k, whichever experts the ties pick."""
    moe, x = router([[0.25] * 4] * 5, num_experts_per_tok=k)
    assert moe(x)[1].item() == pytest.approx(5e-4 * k, rel=1e-5)


def test_load_balancing_loss_by_hand():
    """One expert takes all: 4 * (1 * .7) = 2.8. Two share: 4 * (.5 * .4 + .5 * .4) = 1.6. Padding: 0."""
    one, two = [0.7, 0.1, 0.1, 0.1], [0.1, 0.7, 0.1, 0.1]
    for rows, valid, expected in (([one, one], None, 2.8), ([one, two], None, 1.6),
                                  ([one, two], [[1, 0]], 2.8), ([two, one, one], [[1, 1, 0]], 1.6),
                                  ([one, two], [[0, 0]], 0.0)):
        moe, x = router(rows, router_aux_loss_coef=0.01)
        loss = moe(x, None if valid is None else torch.tensor(valid).bool())[1]
        assert loss.item() == pytest.approx(0.01 * expected, abs=1e-7)


@pytest.mark.parametrize("k", [1, 2])
def test_load_balancing_loss_is_transformers(k):
    """One layer (transformers pools the layers before it multiplies; MiniMind adds up their losses)."""
    ours, gates = tiny(num_hidden_layers=1, **{**MOE, "num_experts_per_tok": k}), []
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[0, 5:], mask[2] = 0, 0
    ours.model.layers[0].mlp.gate.register_forward_hook(lambda m, inputs, out: gates.append(out))
    aux = ours(IDS, mask, right_padded=True, return_hidden=True)[1]
    oracle = modeling_qwen3_moe.load_balancing_loss_func(tuple(gates), 4, k, mask)
    assert aux.item() == pytest.approx(5e-4 * oracle.item(), rel=1e-4)


def test_an_expert_without_tokens_still_has_a_gradient():
    """Or a rank whose tokens all avoid an expert would wait for ever in the reduction."""
    moe, x = router([[0.7, 0.1, 0.1, 0.1]])
    moe(x)[0].sum().backward()
    assert (moe.experts[3].up_proj.weight.grad == 0).all() and (moe.experts[0].up_proj.weight.grad != 0).any()


def test_load_balancing_gradient_reaches_the_gate_and_evens_it_out():
    moe, x = router([[0.7, 0.1, 0.1, 0.1]], router_aux_loss_coef=1.0)
    moe(x)[1].backward()
    # d(E p0)/d(logits) = E p0 (1[0] - p): 4 * .7 * (.3, -.1, -.1, -.1)
    close(moe.gate.weight.grad[:, 0], torch.tensor([0.84, -0.28, -0.28, -0.28]), 1e-5)
    dense = tiny()
    assert dense(IDS, return_hidden=True)[1] == 0
