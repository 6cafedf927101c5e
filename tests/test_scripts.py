"""The three scripts as a user runs them: tiny, on a CPU. What needs no process of its own calls main()."""
import csv
import json
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cispo
import distill
import grpo
from support import InputError
from support.checkpoint import load_checkpoint
from support.run import run_script

MAIN = {"grpo.py": grpo.main, "cispo.py": cispo.main, "distill.py": distill.main}
ROOT = Path(__file__).resolve().parent.parent
BASE, TEACHER = ROOT / "data/arithmetic/base", ROOT / "data/arithmetic/teacher"
RL = ["--steps", "2", "--batch_size", "3", "--num_generations", "4", "--max_new_tokens", "24",
      "--eval_interval", "2", "--sample_interval", "1", "--warmup_steps", "0", "--device", "cpu"]
DISTILL = ["--steps", "2", "--batch_size", "6", "--max_new_tokens", "24", "--eval_interval", "2",
           "--hidden_size", "32", "--num_hidden_layers", "2", "--warmup_steps", "0", "--device", "cpu"]


def run(script, *options, cwd=ROOT):
    """Run a script of the repository -> finished process with its output as text."""
    return subprocess.run([sys.executable, str(ROOT / script), *map(str, options)], cwd=cwd,
                          capture_output=True, text=True, timeout=200)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """Run main() in the repository's root, and give the signals back afterwards."""
    monkeypatch.chdir(ROOT)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def call(script, *options):
    MAIN[script]([str(option) for option in options])


def metrics_of(folder):
    with open(folder / "metrics.csv", newline="") as f:
        return list(csv.DictReader(f))


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Files of a few rows of the embedded data: train, test, sft."""
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("train", 9), ("test", 16), ("sft", 20)):
        lines = (ROOT / f"data/arithmetic/{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:count]))
    return folder


def rl(script, few, out, *options):
    call(script, *RL, "--data", few / "train.jsonl", "--eval_data", few / "test.jsonl", "--out_dir", out,
         *options)


def distil(few, out, *options):
    call("distill.py", *DISTILL, "--data", few / "sft.jsonl", "--eval_data", few / "test.jsonl",
         "--out_dir", out, *options)


def moved(before, after):
    """Largest change of any weight between two checkpoint folders."""
    a, b = load_checkpoint(before).state_dict(), load_checkpoint(after).state_dict()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("script", ["grpo.py", "cispo.py"])
def test_rl_script_trains_logs_and_saves(script, few, tmp_path):
    original = (BASE / "model.safetensors").read_bytes()
    done = run(script, *RL, "--data", few / "train.jsonl", "--eval_data", few / "test.jsonl", "--out_dir",
               tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "held-out accuracy" in done.stdout and "checkpoint in" in done.stdout
    rows = metrics_of(tmp_path / "run")
    assert [r["step"] for r in rows] == ["0", "1", "2"]
    assert rows[0]["eval_accuracy"] and not rows[1]["eval_accuracy"] and rows[2]["eval_accuracy"]
    for name in ("reward", "reward_answer", "reward_length", "reward_thinking", "reward_repetition",
                 "accuracy", "kl", "clip_fraction", "ratio_mean", "ratio_min", "ratio_max", "entropy",
                 "completion_length", "truncated_fraction", "zero_std_fraction", "loss", "grad_norm",
                 "skipped_updates", "learning_rate", "tokens_per_second", "seconds"):
        assert all(math.isfinite(float(r[name])) for r in rows[1:]), name
    assert all(float(r["kl"]) >= 0 and 0 <= float(r["clip_fraction"]) <= 1 for r in rows[1:])
    assert float(rows[1]["ratio_min"]) < 1 < float(rows[1]["ratio_max"])  # the 2nd pass: policy moved
    samples = [json.loads(line) for line in open(tmp_path / "run/samples.jsonl", encoding="utf-8")]
    assert {"step", "prompt", "completion", "answer", "length", "thinking", "repetition", "reward",
            "advantage"} <= set(samples[0])
    assert moved(BASE, tmp_path / "run/checkpoint") > 1e-5
    assert (BASE / "model.safetensors").read_bytes() == original  # the reference is untouched
    assert (tmp_path / "run/checkpoint/tokenizer.json").read_bytes() == (BASE / "tokenizer.json").read_bytes()
    assert not list(tmp_path.rglob("*.tmp"))


def test_first_pass_of_a_fresh_policy_has_ratio_one_and_kl_zero(few, tmp_path):
    rl("grpo.py", few, tmp_path / "run", "--num_iterations", "1", "--steps", "1")
    row = metrics_of(tmp_path / "run")[1]
    assert abs(float(row["ratio_min"]) - 1) < 1e-4 and abs(float(row["ratio_max"]) - 1) < 1e-4
    assert float(row["kl"]) < 1e-6 and float(row["clip_fraction"]) == 0


def test_bf16_autocast_runs_and_keeps_one_precision_path(few, tmp_path):
    """Sampler, scorer and reference round alike: a fresh policy's KL to itself stays 0 under autocast too."""
    rl("grpo.py", few, tmp_path / "run", "--num_iterations", "1", "--steps", "1", "--dtype", "bfloat16")
    row = metrics_of(tmp_path / "run")[1]
    assert float(row["kl"]) < 1e-6
    assert abs(float(row["ratio_mean"]) - 1) < 0.02
    saved = load_checkpoint(tmp_path / "run/checkpoint").state_dict()
    assert all(t.dtype == torch.float32 for t in saved.values())


def test_mini_batches_micro_batches_recomputed_old_and_no_reference(few, tmp_path):
    rl("cispo.py", few, tmp_path / "run", "--num_mini_batches", "2", "--micro_batch_tokens", "100",
       "--recompute_old", "--beta", "0", "--lr_schedule", "constant")
    rows = metrics_of(tmp_path / "run")
    assert all(float(r["kl"]) == 0 for r in rows[1:])


def test_the_same_seed_gives_the_same_run_and_micro_batches_do_not_change_it(few, tmp_path):
    rl("grpo.py", few, tmp_path / "a")
    rl("grpo.py", few, tmp_path / "b", "--sample_interval", "2")
    rl("grpo.py", few, tmp_path / "c", "--micro_batch_tokens", "150")
    a, b, c = (metrics_of(tmp_path / x) for x in "abc")
    for row_a, row_b, row_c in zip(a, b, c):
        for name in row_a:
            if name not in ("tokens_per_second", "seconds"):
                assert row_a[name] == row_b[name], name
                if name not in ("eval_accuracy", "loss") and row_a[name]:
                    assert float(row_a[name]) == pytest.approx(float(row_c[name]), rel=2e-3, abs=1e-4), name
    assert moved(tmp_path / "a/checkpoint", tmp_path / "b/checkpoint") == 0


def test_runs_without_out_dir_take_the_next_free_folder(few, tmp_path):
    options = [*RL, "--steps", "1", "--model", BASE, "--data", few / "train.jsonl", "--eval_data", ""]
    for folder in ("out/grpo", "out/grpo-2"):
        assert run("grpo.py", *options, cwd=tmp_path).returncode == 0
        assert (tmp_path / folder / "checkpoint/model.safetensors").exists()


@pytest.mark.parametrize("options", [
    ["--alpha", "1"], ["--alpha", "0"], ["--alpha", "0.5", "--temperature", "2"],
    ["--alpha", "0", "--on_policy_fraction", "0.5"], ["--divergence", "reverse"],
    ["--divergence", "jsd", "--jsd_weight", "0.3"], ["--use_moe"], ["--dtype", "bfloat16"],
    ["--student", str(BASE)], ["--micro_batch_tokens", "120"]], ids=" ".join)
def test_every_mode_of_distill_trains_the_student_and_not_the_teacher(options, few, tmp_path):
    teacher = (TEACHER / "model.safetensors").read_bytes()
    distil(few, tmp_path / "long", *options)
    rows = metrics_of(tmp_path / "long")
    assert [r["step"] for r in rows] == ["0", "1", "2"] and rows[0]["eval_accuracy"]
    for name in ("loss", "ce", "kl", "aux", "grad_norm", "learning_rate", "tokens_per_second", "seconds"):
        assert all(math.isfinite(float(r[name])) for r in rows[1:]), name
    kls, aux = [float(r["kl"]) for r in rows[1:]], [float(r["aux"]) for r in rows[1:]]
    assert all(k > 0 for k in kls) if options[:2] != ["--alpha", "1"] else kls == [0, 0]
    assert all(a > 0 for a in aux) if "--use_moe" in options else aux == [0, 0]
    assert [r["on_policy"] for r in rows[1:]] == ["0", "1" if "--on_policy_fraction" in options else "0"]
    distil(few, tmp_path / "short", *options, "--steps", "1")
    assert moved(tmp_path / "short/checkpoint", tmp_path / "long/checkpoint") > 1e-6
    assert (TEACHER / "model.safetensors").read_bytes() == teacher


def test_alpha_1_never_opens_a_teacher(few, tmp_path):
    distil(few, tmp_path / "run", "--alpha", "1", "--teacher", tmp_path / "nowhere", "--tokenizer", BASE)


@pytest.mark.parametrize("script", MAIN)
def test_help_lists_every_option_with_its_default(script, capsys):
    with pytest.raises(SystemExit) as end:
        call(script, "--help")
    text = capsys.readouterr().out
    assert end.value.code == 0 and len(re.findall(r"\(default:\s", text)) == text.count("\n  --") > 25


@pytest.mark.parametrize("script, options, message", [
    ("grpo.py", ["--model", "nowhere"], "nowhere"),
    ("grpo.py", ["--data", "nowhere.jsonl"], "nowhere.jsonl"),
    ("grpo.py", ["--num_generations", "1"], "--num_generations must be at least 2"),
    ("grpo.py", ["--temperature", "0"], "--temperature must be positive"),
    ("grpo.py", ["--epsilon", "nan"], "--epsilon must be positive"),
    ("cispo.py", ["--epsilon_high", "0"], "--epsilon_high must be positive"),
    ("cispo.py", ["--beta", "-1"], "--beta must not be negative"),
    ("grpo.py", ["--num_mini_batches", "7"], "--num_mini_batches 7 must divide"),
    ("grpo.py", ["--reward_weights", "anwser=1"], "anwser"),
    ("grpo.py", ["--max_new_tokens", "5000"], "max_position_embeddings"),
    ("grpo.py", ["--max_prompt_length", "3"], "longer than 3 tokens"),
    ("grpo.py", ["--device", "toaster"], "--device toaster"),
    ("grpo.py", ["--device", "cuda:99"], "--device cuda:99"),
    ("grpo.py", ["--resume"], "--resume needs --out_dir"),
    ("distill.py", ["--alpha", "1.5"], "--alpha must lie in [0, 1]"),
    ("distill.py", ["--alpha", "1", "--on_policy_fraction", "1"], "needs a teacher"),
    ("distill.py", ["--num_attention_heads", "3"], "num_key_value_heads"),
    ("distill.py", ["--hidden_size", "0"], "hidden_size"),
    ("distill.py", ["--teacher", "nowhere"], "nowhere"),
])
def test_bad_input_ends_in_one_line_and_status_2(script, options, message, tmp_path, capsys):
    out = [] if "--resume" in options else ["--out_dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as end:
        run_script(lambda: call(script, *out, *options), script, None)
    error = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(("usage:", " "))]
    assert end.value.code == 2 and len(error) == 1 and message in error[0], error
    assert not (tmp_path / "run").exists()


def test_bad_input_of_a_real_process_has_no_traceback(tmp_path):
    done = run("grpo.py", "--model", "nowhere", "--out_dir", tmp_path / "run")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("grpo.py: error: ")


def test_a_folder_that_holds_a_run_is_refused(few, tmp_path):
    rl("grpo.py", few, tmp_path / "run", "--steps", "1")
    before = (tmp_path / "run/metrics.csv").read_bytes()
    with pytest.raises(InputError, match="already holds a run"):
        call("grpo.py", *RL, "--out_dir", tmp_path / "run")
    assert (tmp_path / "run/metrics.csv").read_bytes() == before


def test_a_teacher_with_another_tokenizer_is_refused_by_name(few, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for file in BASE.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    state = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = state["model"]["vocab"]
    vocab["8"], vocab["9"] = vocab["9"], vocab["8"]
    (other / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")
    with pytest.raises(InputError, match=f"data/arithmetic/teacher and the student's {other}"):
        call("distill.py", *DISTILL, "--tokenizer", other, "--out_dir", tmp_path / "run")
