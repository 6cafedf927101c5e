"""The benchmark runs, and its contestants do the same work. Nothing here looks at a time."""
import json

import pytest
import torch

from tools import bench

TINY = ("--hidden_size 64 --num_layers 2 --vocab_size 100 --batch_size 2 --num_generations 4 "
        "--max_new_tokens 8 --repeats 1 --device cpu").split()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", ["rollout", "update", "distill", "step"])
def test_each_mode_writes_a_table_with_every_contestant(what, dtype, tmp_path, capsys, monkeypatch):
    if dtype == "bfloat16":     # the large product that is measured takes minutes on a CPU without bf16
        monkeypatch.setattr(bench, "machine_limits", lambda args: (1e9, 1e9))
    bench.main([what, *TINY, "--dtype", dtype, "--peers", "hf", "--json", str(tmp_path / "json")])
    tables, printed = json.loads((tmp_path / "json").read_text())["tables"], capsys.readouterr().out
    for table in tables if isinstance(tables, list) else [tables]:
        names = list(table["results"])
        assert names[0].startswith("ours") and len(names) == (3 if what == "rollout" else 1)
        assert all(r["tokens"] > 0 and len(r["cpu"]) == 1 for r in table["results"].values())
        assert table["title"] in printed


def test_growth_and_gpu_change_the_sizes_they_name(monkeypatch):
    seen = []
    for name in ("rollout", "update", "step"):
        monkeypatch.setattr(bench, f"bench_{name}", lambda args, limits, name=name: seen.append((name, args)))
    args = bench.parse_args(["growth", *TINY])
    bench.bench_growth(args, (1, 1))
    bench.bench_gpu(args, (1, 1))
    assert [a.num_generations for name, a in seen[:6]] == [1, 2, 4, 8, 16, 32]
    assert [a.max_new_tokens for name, a in seen[6:11]] == [64, 128, 256, 512, 1024]
    assert [(name, a.vocab_size) for name, a in seen[11:14]] == [("update", v) for v in (6400, 49152, 151936)]
    assert [(name, a.batch_size * a.num_generations * a.max_new_tokens) for name, a in seen[14:16]] == [
        ("rollout", 64 * 16 * 512), ("step", 64 * 16 * 512)]
    with torch.device("meta"):      # the model card of Qwen3-0.6B: 0.6B parameters, 0.44B without embedding
        qwen = bench.MiniMind(bench.make_config(seen[16][1]))
    assert sum(p.numel() for p in qwen.parameters()) == 596_049_920
    assert sum(p.numel() for p in qwen.model.layers.parameters()) == 440_467_456 - 1024


def test_peers_are_the_same_model():
    args = bench.parse_args(TINY)
    ours = bench.make_model(args)
    ids = torch.randint(100, (3, 9))
    with torch.no_grad():
        torch.testing.assert_close(bench.hf_model(ours, args)(ids).logits, ours(ids), rtol=1e-4, atol=1e-5)


def test_every_completion_ends_where_it_should():
    args = bench.parse_args(TINY)
    lengths = bench.make_lengths(args)
    assert sorted(lengths) == [1, 2, 3, 4, 5, 6, 7, 8]
    noise = bench.ending_noise(lengths, args)
    rollout = bench.generate(bench.make_model(args), bench.make_prompts(args), 4, 8, [0], 2, noise=noise)
    assert rollout.completion_mask.sum(dim=1).tolist() == lengths
    assert rollout.finished.all()
