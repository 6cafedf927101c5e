"""Checkpoints against transformers' Qwen3, Qwen3-MoE, Qwen2 and Llama, both ways; MiniMind's own; broken
ones.
"""
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rollout import generate
from support import InputError, checkpoint
from support.checkpoint import config_from_hf, load_checkpoint, save_checkpoint
from test_model import IDS, LLAMA3, MOE, SIZES, close, randomize, tiny

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

EMBEDDING, Q = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"


def hf_folder(folder, kind="Qwen3", **changes):
    """A checkpoint that transformers wrote, with random weights -> its own model of it."""
    config = {k: v for k, v in {**SIZES, "head_dim": 8, **changes}.items() if k != "use_moe"}
    config = getattr(transformers, kind + "Config")(**config)
    hf = randomize(getattr(transformers, kind + "ForCausalLM")(config), seed=1)
    hf.tie_weights()
    hf.save_pretrained(folder)
    return hf


def edit_config(folder, change):
    """Rewrite a folder's config.json by change(dict)."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def saved(tmp_path):
    save_checkpoint(tiny(), tmp_path)
    return tmp_path


def edit_tensors(folder, change):
    """Rewrite a folder's weights by change(dict of tensors)."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("tied", [True, False])
def test_parameter_names_are_hugging_faces(tied, tmp_path):
    hf_folder(tmp_path / "hf", tie_word_embeddings=tied)
    save_checkpoint(tiny(tie_word_embeddings=tied), tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / x / "model.safetensors") for x in ("hf", "ours"))
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
    assert ("lm_head.weight" in ours) is not tied


# ---------------------------------------------------------------- transformers as the oracle

DENSE_CASES = [{"tie_word_embeddings": True}, {"tie_word_embeddings": False}, {"head_dim": 12},
               {"rope_theta": 1e4, "num_key_value_heads": 1},
               {"num_key_value_heads": 4, "rms_norm_eps": 1e-2}]
FAMILY_CASES = [("Llama", {}), ("Llama", {"head_dim": 12, "tie_word_embeddings": True}),
                ("Llama", {"num_key_value_heads": 1, "rope_parameters": LLAMA3, "head_dim": 16}),
                ("Qwen2", {"rms_norm_eps": 1e-2}), ("Qwen2", {"tie_word_embeddings": True}),
                ("Qwen2", {"head_dim": 16, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4,
                                                               "factor": 4.0,
                                                               "original_max_position_embeddings": 64}})]
MOE_CASES = [dict(MOE, num_experts_per_tok=k, norm_topk_prob=norm, tie_word_embeddings=tied)
             for k, norm, tied in ((1, True, True), (1, False, False), (2, True, False), (2, False, True))]


def case_id(case):
    return ",".join(f"{k}={v}" for k, v in case.items() if k not in ("use_moe", "num_experts"))


def check_same_model(ours, hf):
    """Logits, and the greedy continuations of prompts of three lengths, against HF's own generate."""
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, 6:] = 0
    close(ours(IDS), hf(IDS).logits, 1e-4)
    close(ours(IDS, mask)[mask.bool()], hf(IDS, attention_mask=mask).logits[mask.bool()], 1e-4)
    prompts = [IDS[0, :9].tolist(), IDS[1, :5].tolist(), IDS[2, :2].tolist()]
    continued = generate(ours, prompts, 1, 8, [99], temperature=0.0).completion_ids
    for prompt, ids in zip(prompts, continued):
        theirs = hf.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8, eos_token_id=None,
                             pad_token_id=0)
        assert theirs[0, len(prompt):].tolist() == ids.tolist()


@pytest.mark.parametrize("case", DENSE_CASES + MOE_CASES, ids=case_id)
def test_a_saved_checkpoint_gives_the_same_logits_in_transformers(case, tmp_path):
    ours = tiny(**case)
    save_checkpoint(ours, tmp_path)
    hf, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert type(hf).__name__ == ("Qwen3MoeForCausalLM" if ours.config.use_moe else "Qwen3ForCausalLM")
    assert (hf.config.bos_token_id, hf.config.eos_token_id, hf.config.pad_token_id) == (1, 2, 0)
    check_same_model(ours, hf.eval())


@pytest.mark.parametrize("case", DENSE_CASES + MOE_CASES, ids=case_id)
def test_a_checkpoint_of_transformers_gives_the_same_logits_here(case, tmp_path):
    hf = hf_folder(tmp_path, "Qwen3Moe" if "use_moe" in case else "Qwen3", **case)
    check_same_model(load_checkpoint(tmp_path).eval(), hf)


@pytest.mark.parametrize("kind, changes", FAMILY_CASES, ids=str)
def test_llama_and_qwen2_give_the_logits_of_transformers_and_go_back(kind, changes, tmp_path):
    hf = hf_folder(tmp_path / "theirs", kind, **changes)
    ours = load_checkpoint(tmp_path / "theirs").eval()
    assert (ours.config.qk_norm, ours.config.qkv_bias) == (False, kind == "Qwen2")
    check_same_model(ours, hf)
    save_checkpoint(ours, tmp_path / "ours")
    back, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours",
                                                                     output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert type(back).__name__ == kind + "ForCausalLM"
    check_same_model(ours, back.eval())
    again = load_checkpoint(tmp_path / "ours")
    assert again.config == ours.config
    assert all(torch.equal(t, ours.state_dict()[n]) for n, t in again.state_dict().items())


def test_no_model_type_has_biases_and_norms(tmp_path):
    with pytest.raises(InputError, match="cannot be saved"):
        save_checkpoint(tiny(qkv_bias=True), tmp_path / "new")


def to_transformers_4(config):
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope} if len(rope) > 1 else None
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")


@pytest.mark.parametrize("kind, changes", [("Qwen3", {}), ("Qwen3Moe", MOE), FAMILY_CASES[2],
                                           FAMILY_CASES[5]], ids=str)
def test_configs_of_transformers_4_and_5_load_the_same(kind, changes, tmp_path):
    hf = hf_folder(tmp_path, kind, **changes)
    as_5 = load_checkpoint(tmp_path).eval()
    edit_config(tmp_path, to_transformers_4)
    assert "rope_parameters" not in json.loads((tmp_path / "config.json").read_text())
    as_4 = load_checkpoint(tmp_path).eval()
    close(as_4(IDS), hf(IDS).logits, 1e-4)
    assert torch.equal(as_4(IDS), as_5(IDS))


def test_fused_experts_are_taken_apart(tmp_path):
    """transformers 5 computes with stacked experts; a file may hold them so."""
    hf = hf_folder(tmp_path, "Qwen3Moe", **MOE)
    stacked = {n: t.contiguous() for n, t in hf.state_dict().items() if n != "lm_head.weight"}
    assert stacked["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 48, 32)
    stacked["lm_head.weight"] = hf.lm_head.weight.detach().clone()
    save_file(stacked, tmp_path / "model.safetensors")
    close(load_checkpoint(tmp_path).eval()(IDS), hf(IDS).logits, 1e-4)
    edit_tensors(tmp_path, lambda t: t.pop("model.layers.1.mlp.experts.down_proj"))
    with pytest.raises(InputError, match="model.layers.1.mlp.experts.*down_proj"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen2", "llama"])
def test_a_key_that_the_config_leaves_out_is_read_as_transformers_reads_it(kind):
    """Of the keys that no tensor's shape gives away: a wrong default would load and compute otherwise."""
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=16)
    theirs = transformers.AutoConfig.for_model(kind, **sizes)
    ours = config_from_hf({"model_type": kind, **sizes})
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    names = ["rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"]
    for name in names + ["num_experts_per_tok", "norm_topk_prob"] * (kind == "qwen3_moe"):
        assert getattr(ours, name) == getattr(theirs, name), name


# ---------------------------------------------------------------- YaRN

def yarn(**changes):
    return {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
            **changes}


YARN_CASES = {"plain": (yarn(), 256), "attention_factor": (yarn(attention_factor=1.5), 256),
              "betas": (yarn(beta_fast=8.0, beta_slow=0.5), 256),
              "no_longer_than_trained": (yarn(), 64),       # transformers stretches whatever the maximum is
              "ramp_past_the_last_pair": (yarn(original_max_position_embeddings=32768), 131072)}


@pytest.mark.parametrize("name", YARN_CASES)
def test_yarn_of_a_qwen3_checkpoint_is_transformers_yarn(name, tmp_path):
    rope, longest = YARN_CASES[name]
    hf = hf_folder(tmp_path, rope_parameters=rope, head_dim=16, max_position_embeddings=longest)
    ours = load_checkpoint(tmp_path).eval()
    torch.testing.assert_close(ours.rope_freqs, hf.model.rotary_emb.inv_freq, atol=0, rtol=1e-5)
    assert ours.rope_scale == pytest.approx(hf.model.rotary_emb.attention_scaling)
    close(ours(IDS), hf(IDS).logits, 1e-4)


@pytest.mark.parametrize("options", [{"truncate": False}, {"mscale": 1.0, "mscale_all_dim": 0.5}], ids=str)
def test_further_yarn_options_are_computed_or_refused_but_not_ignored(options, tmp_path):
    hf = hf_folder(tmp_path, rope_parameters=yarn(**options), head_dim=16, max_position_embeddings=256)
    try:
        ours = load_checkpoint(tmp_path).eval()
    except InputError as error:
        assert next(iter(options)) in str(error)
    else:
        close(ours(IDS), hf(IDS).logits, 1e-4)


@pytest.mark.parametrize("longest", [2048, 32768])
def test_the_yarn_switch_survives_saving_and_loads_in_transformers(longest, tmp_path):
    ours = tiny(inference_rope_scaling=True, max_position_embeddings=longest)
    save_checkpoint(ours, tmp_path)
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(ours.rope_freqs, hf.model.rotary_emb.inv_freq, atol=0, rtol=1e-5)
    close(ours(IDS), hf(IDS).logits, 1e-4)
    assert torch.equal(load_checkpoint(tmp_path).eval()(IDS), ours(IDS))


# ---------------------------------------------------------------- MiniMind's own files

@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, dict(MOE, num_experts_per_tok=1),
                                     {"qk_norm": False}], ids=case_id)
def test_a_bare_pth_loads_by_its_tensors(changes, tmp_path):
    """As MiniMind's trainers save one: half precision, the tied matrix under both names."""
    ours = tiny(**changes)
    ours.load_state_dict({n: t.half().float() for n, t in ours.state_dict().items()})
    torch.save({n: t.half() for n, t in ours.state_dict().items()}, tmp_path / "m.pth")
    sizes = {} if changes.get("qk_norm", True) else {"num_attention_heads": 4}
    loaded = load_checkpoint(tmp_path / "m.pth", max_position_embeddings=128, **sizes).eval()
    if not changes.get("use_moe"):
        assert loaded.config == ours.config
    assert {t.dtype for t in loaded.state_dict().values()} == {torch.float32}
    assert torch.equal(loaded(IDS), ours(IDS))
    assert (loaded.lm_head.weight is loaded.model["embed_tokens"].weight) == ours.config.tie_word_embeddings


def test_minimind_folders_with_and_without_qk_norm_load(saved):
    def to_minimind(config):
        config.update(model_type="minimind", architectures=["MiniMindForCausalLM"], use_moe=False)

    edit_config(saved, to_minimind)
    assert torch.equal(load_checkpoint(saved).eval()(IDS), tiny()(IDS))
    edit_tensors(saved, lambda t: [t.pop(n) for n in list(t) if "_norm.weight" in n and "self_attn" in n])
    old = tiny()
    for block in old.model["layers"]:
        block.self_attn.q_norm = block.self_attn.k_norm = torch.nn.Identity()
    assert torch.equal(load_checkpoint(saved).eval()(IDS), old(IDS))


@pytest.mark.parametrize("content, named", [
    (b"oops", "not a readable .pth"), ([1, 2], "dict of tensors"), ({"step": 3}, "dict of tensors"),
    ({"tok_embeddings.weight": torch.ones(3, 3)}, "not MiniMind's tensors"),
    ({"model.embed_tokens.weight": torch.ones(3)}, "not MiniMind's tensors"),
], ids=["bytes", "list", "number", "other names", "a vector"])
def test_a_pth_of_something_else_is_an_input_error(content, named, tmp_path):
    file = tmp_path / "m.pth"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(InputError, match=named) as error:
        load_checkpoint(file)
    assert str(file) in str(error.value)


def test_a_pth_that_lacks_a_tensor_is_refused(tmp_path):
    state = tiny().state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    torch.save(state, tmp_path / "m.pth")
    with pytest.raises(InputError, match="missing model.layers.1.mlp.up_proj.weight"):
        load_checkpoint(tmp_path / "m.pth")
    with pytest.raises(InputError, match="not a readable .pth"):
        load_checkpoint(tmp_path / "nowhere.pth")


# ---------------------------------------------------------------- in, out, and broken

@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, MOE, {"head_dim": 12}], ids=case_id)
def test_load_save_load_is_equal_bit_for_bit(changes, tmp_path):
    ours = tiny(eos_token_id=[2, 5], **changes)
    save_checkpoint(ours, tmp_path / "a")
    first = load_checkpoint(tmp_path / "a")
    save_checkpoint(first, tmp_path / "b")
    for name, tensor in ours.state_dict().items():
        assert torch.equal(first.state_dict()[name], tensor), name
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert first.config == ours.config


BROKEN = {
    "missing": (lambda t: t.pop(Q), "missing " + Q),
    "extra": (lambda t: t.update(another=torch.ones(2)), "unexpected another"),
    "misshapen": (lambda t: t.update({Q: torch.ones(32, 31)}),
                  "size mismatch for " + Q + r": .*\[32, 31\].*\[32, 32\]"),
    "transposed": (lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.ones(32, 48)}),
                   r"size mismatch for model.layers.1.mlp.up_proj.weight: .*\[32, 48\].*\[48, 32\]"),
    "integers": (lambda t: t.update({Q: torch.ones(32, 32, dtype=torch.int8)}), Q),
    "fp8": (lambda t: t.update({Q: torch.ones(32, 32).to(torch.float8_e4m3fn)}), Q + " is torch.float8"),
    "other head": (lambda t: t.update({"lm_head.weight": torch.ones(61, 32)}), "lm_head.weight"),
    "no embedding": (lambda t: t.update({"lm_head.weight": t.pop(EMBEDDING)}), EMBEDDING),
}


@pytest.mark.parametrize("what", BROKEN)
def test_tensors_that_do_not_fit_are_named(what, saved):
    change, message = BROKEN[what]
    edit_tensors(saved, change)
    with pytest.raises(InputError, match=message) as error:
        load_checkpoint(saved)
    assert str(saved) in str(error.value) and len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("key, value, named", [
    ("num_hidden_layers", 3, "missing model.layers.2"), ("num_hidden_layers", 1, "unexpected model.layers.1"),
    ("hidden_size", 64, EMBEDDING), ("head_dim", 16, "k_proj"), ("num_key_value_heads", 4, "k_proj"),
    ("vocab_size", 62, EMBEDDING), ("tie_word_embeddings", False, "missing lm_head.weight"),
    ("model_type", "gpt2", "model_type 'gpt2'"), ("model_type", None, "model_type"),
    ("rope_scaling", {"rope_type": "longrope", "factor": 8.0}, "rope type 'longrope'"),
    ("rope_scaling", {"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 9}, "low_freq"),
    ("rope_scaling", {"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
    ("layer_types", ["full_attention", "sliding_attention"], "layer_types"), ("mlp_bias", True, "mlp_bias"),
    ("model_type", "llama", "unexpected model.layers.0.self_attn.q_norm"),
    ("model_type", "qwen2", "missing model.layers.0.self_attn.q_proj.bias"),
    ("architectures", ["Qwen3ForSequenceClassification"], "reward model"),
    ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope type 'linear'"),
    ("rope_scaling", {"rope_type": "yarn", "original_max_position_embeddings": 64}, "factor"),
    ("quantization_config", {"quant_method": "fp8"}, "quantization_config"),
    ("attention_bias", True, "attention_bias"), ("use_sliding_window", True, "use_sliding_window"),
    ("hidden_act", "gelu", "hidden_act"), ("num_key_value_heads", 3, "num_key_value_heads"),
    ("num_attention_heads", 0, "num_attention_heads"), ("hidden_size", "32", "hidden_size"),
], ids=str)
def test_a_config_that_cannot_be_computed_is_an_input_error(key, value, named, saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(InputError, match=named) as error:
        load_checkpoint(saved)
    assert str(saved) in str(error.value) and len(str(error.value).splitlines()) == 1


def test_broken_files_are_input_errors_that_name_the_file(saved):
    weights = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(weights[:len(weights) // 2])
    with pytest.raises(InputError, match="model.safetensors"):
        load_checkpoint(saved)
    (saved / "model.safetensors").unlink()
    with pytest.raises(InputError, match="model.safetensors"):
        load_checkpoint(saved)
    (saved / "config.json").write_text('{"model_type":\n oops}')
    with pytest.raises(InputError, match=r"config.json:2: not valid JSON"):
        load_checkpoint(saved)
    with pytest.raises(InputError, match="no such folder"):
        load_checkpoint(saved / "nowhere")


def test_a_tied_checkpoint_that_holds_both_names_loads(saved):
    plain = load_checkpoint(saved)
    edit_tensors(saved, lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}))
    both = load_checkpoint(saved)
    assert both.lm_head.weight is both.model["embed_tokens"].weight
    assert torch.equal(both(IDS), plain(IDS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_file_loads_to_fp32_and_is_saved_in_fp32(dtype, saved):
    original = load_file(saved / "model.safetensors")
    edit_tensors(saved, lambda t: t.update({n: x.to(dtype) for n, x in t.items()}))
    loaded = load_checkpoint(saved)
    for name, tensor in original.items():
        assert loaded.state_dict()[name].dtype == torch.float32
        assert torch.equal(loaded.state_dict()[name], tensor.to(dtype).float())
    save_checkpoint(loaded.to(dtype), saved / "again")
    assert {t.dtype for t in load_file(saved / "again/model.safetensors").values()} == {torch.float32}
    assert "float32" in (saved / "again/config.json").read_text()


def test_a_sharded_checkpoint_loads(tmp_path):
    hf = hf_folder(tmp_path / "whole")
    hf.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = (load_checkpoint(tmp_path / x).state_dict() for x in ("whole", "shards"))
    assert whole.keys() == shards.keys() and all(torch.equal(whole[n], shards[n]) for n in whole)
    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(InputError, match="model-0000"):
        load_checkpoint(tmp_path / "shards")


@pytest.mark.parametrize("written", [0, 100])
def test_killed_while_saving_leaves_the_earlier_checkpoint_whole(written, saved, monkeypatch):
    def killed(tensors, path, metadata):
        path.write_bytes(b"x" * written)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tiny(seed=3), saved)
    monkeypatch.undo()
    assert torch.equal(load_checkpoint(saved)(IDS), tiny()(IDS))
    save_checkpoint(tiny(seed=3), saved)
    assert torch.equal(load_checkpoint(saved)(IDS), tiny(seed=3)(IDS))
    assert {f.name for f in saved.iterdir()} == {"config.json", "model.safetensors"}
