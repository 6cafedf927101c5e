"""Estimate the GPU memory of grpo.py and cispo.py for a model size, before renting the card.

    python -m tools.memory --hidden_size 768 --num_hidden_layers 8 --batch_size 8 --max_new_tokens 512
    python -m tools.memory --table          # the README's table, in Markdown

Computed, not measured: weights, gradients and Adam's moments from the parameter count; what autograd keeps
for each token by counting the tensors it saves in two small passes under bf16 autocast on the CPU; the KV
cache, the sampler's and the scorer's logits from their shapes. The allocator's rounding and fragmentation
come on top: leave a fifth free.
"""
import argparse

import torch

from model import MiniMind, MiniMindConfig
from rollout import LOGITS_AT_ONCE

QWEN3_06B = dict(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
                 head_dim=128,
                 intermediate_size=3072, vocab_size=151936)
SIZES = {"MiniMind 26M": dict(hidden_size=512), "MiniMind 64M": dict(hidden_size=768),
         "Qwen3 0.6B": QWEN3_06B}


def saved_bytes(model, tokens):
    """Bytes that one forward pass over `tokens` tokens keeps for the backward pass, parameters aside."""
    kept = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.zeros(1, tokens, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        model(ids, right_padded=True, return_hidden=True)
    return sum(kept.values())


def estimate(config, rows, prompt_length, max_new_tokens, micro_batch_tokens, beta):
    """Peak bytes of the two phases of a step: {"rollout": ..., "update": ..., "fixed": ...}."""
    model = MiniMind(config)
    params = sum(p.numel() for p in model.parameters())
    embedding = config.vocab_size * config.hidden_size
    # the sampler's copy and the reference: linear weights in bf16, the embedding in fp32 beside the head's
    # bf16
    copy = 2 * (params - embedding * (not config.tie_word_embeddings)) + 4 * embedding
    fixed = 16 * params + copy * (2 if beta > 0 else 1)
    few, more = saved_bytes(model, 64), saved_bytes(model, 128)
    per_token, casts = (more - few) / 64, 2 * few - more
    cache = (rows * (prompt_length + max_new_tokens) * 2 * 2 * config.num_hidden_layers
             * config.num_key_value_heads * config.head_dim)
    sampling = rows * config.vocab_size * (4 + 4 + 4 + 8)       # logits, log-probs, probabilities, fp64 sum
    logits = 3 * 4 * min(LOGITS_AT_ONCE, micro_batch_tokens * config.vocab_size)
    return {"fixed": fixed, "rollout": fixed + cache + sampling,
            "update": fixed + casts + per_token * micro_batch_tokens + logits}


def main():
    parser = argparse.ArgumentParser("tools.memory", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--table", action="store_true", help="three models, two batch sizes, two micro-batch budgets")
    for name, default in (("hidden_size", 768), ("num_hidden_layers", 8), ("num_attention_heads", 8),
                          ("num_key_value_heads", 4), ("vocab_size", 6400), ("batch_size", 8),
                          ("num_generations", 8), ("prompt_length", 256), ("max_new_tokens", 512),
                          ("micro_batch_tokens", 16384)):
        add(f"--{name}", type=int, default=default, help="as in grpo.py")
    add("--beta", type=float, default=0.01, help="0: no reference in memory")
    args = parser.parse_args()

    def gib(config, batch_size, budget):
        peak = estimate(config, batch_size * args.num_generations, args.prompt_length, args.max_new_tokens,
                        budget,
                        args.beta)
        return " / ".join(f"{peak[phase] / 2 ** 30:.1f}" for phase in ("fixed", "rollout", "update"))

    if args.table:
        print("| GiB: fixed / rollout / update | " + " | ".join(
            f"{b} x {args.num_generations}, {m} tokens" for b in (8, 32) for m in (4096, 16384)) + " |")
        print("|---" * 5 + "|")
        for name, sizes in SIZES.items():
            config = MiniMindConfig(**sizes)
            print(f"| {name} | " + " | ".join(gib(config, b, m) for b in (8, 32) for m in (4096,
                                                                                           16384)) + " |")
    else:
        sizes = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads",
                 "num_key_value_heads")
        config = MiniMindConfig(**{name: getattr(args, name) for name in sizes})
        print("GiB, fixed / rollout / update:", gib(config, args.batch_size, args.micro_batch_tokens))


if __name__ == "__main__":
    main()
