"""The memory estimate of tools/memory.py."""
from model import MiniMind, MiniMindConfig
from tools import memory


def test_the_memory_estimate_adds_up_by_hand():
    """A model of 320 x 32 embedding (tied), one layer without rows or logits worth counting: the fixed part
    is 16 bytes a parameter (weights, gradient, two moments) and, for sampler and reference, 2 a parameter and
    4 an embedding weight.
    """
    config = MiniMindConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                            num_key_value_heads=1)
    params, embedding = sum(p.numel() for p in MiniMind(config).parameters()), 320 * 32
    peak = memory.estimate(config, 4, 10, 6, 64, beta=0.1)
    assert peak["fixed"] == 16 * params + 2 * (2 * params + 4 * embedding)
    # cache: 4 rows x 16 positions x (key and value) x 1 layer x 1 head x 16 numbers x 2 bytes; sampling: 20
    assert peak["rollout"] - peak["fixed"] == 4 * 16 * 2 * 16 * 2 + 4 * 320 * 20
    assert peak["update"] > peak["fixed"] + 12 * 64 * 320
