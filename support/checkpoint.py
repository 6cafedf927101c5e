"""Checkpoints in and out: Hugging Face folders and MiniMind .pth, strict and atomic."""
import json
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from model import MiniMind, MiniMindConfig, rope_frequencies
from support import InputError, read_json

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
    except (TypeError, ValueError) as e:
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
    tied = config.tie_word_embeddings and not score_head    # a file may hold the tied matrix twice
    head = tensors.pop("lm_head.weight", None) if tied else None
    if head is not None and not torch.equal(head, tensors.get("model.embed_tokens.weight", head)):
        raise InputError(f"{path}: tie_word_embeddings is true but lm_head.weight differs from "
                         f"model.embed_tokens.weight")
    problems = [f"{n} is {t.dtype}: quantised weights are not supported" for n, t in tensors.items()
                if t.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16)]
    try:
        tensors = {n: t.to(torch.float32, copy=True) for n, t in tensors.items()}
        missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
        problems += [f"missing {n}" for n in missing if not (tied and n == "lm_head.weight")]
        problems += [f"unexpected {n}" for n in unexpected]
    except RuntimeError as e:       # a line for each shape that differs, behind one that introduces them
        problems += [" ".join(line.split()) for line in str(e).splitlines()[1:]]
    if problems:
        more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise InputError(f"{path}: the tensors do not fit the config: {'; '.join(problems[:4])}{more}")
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
