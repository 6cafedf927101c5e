"""What a run stands on: randomness by seed and step, shares and means of processes. And what happens to one
that is interrupted, killed, short of disk, fed with bad numbers, or spread over processes.
"""
import csv
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import cispo
import distill
import grpo
from model import MiniMind, MiniMindConfig
from support import InputError
from support.chat import load_tokenizer
from support.checkpoint import load_checkpoint, save_checkpoint
from support.prompts import read_prompts, read_rows
from support.run import Run, batch_of_step, load_run, rng_for, run_script, save_run

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "data/arithmetic/base"
ARGS = grpo.parse_args([])
SCRIPTS = {"grpo": grpo, "cispo": cispo, "distill": distill}


# ---------------------------------------------------------------- randomness

@pytest.mark.parametrize("rows, batch_size", [(12, 4), (12, 5), (7, 3), (5, 5), (3, 8), (10, 1)])
def test_batches_cover_each_row_once_an_epoch_and_depend_on_the_step_alone(rows, batch_size):
    def batch(step, seed=1):
        return batch_of_step(step, batch_size, rows, seed)

    steps = 2 * rows
    stream = [i for step in range(1, steps + 1) for i in batch(step)]
    epochs = [stream[i:i + rows] for i in range(0, len(stream), rows)]
    assert len(stream) == steps * batch_size and all(sorted(e) == list(range(rows)) for e in epochs)
    assert len(set(map(tuple, epochs))) > 1                         # shuffled anew
    for step in reversed(range(1, steps + 1)):                      # in any order, whatever ran before
        torch.rand(step)
        assert batch(step) == stream[(step - 1) * batch_size:step * batch_size]
    assert [batch(s, seed=2) for s in range(1, 20)] != [batch(s) for s in range(1, 20)]


def purposes_of(script):
    """What a script and the two modules that draw for it name in their calls of rng_for."""
    return {name for file in (f"{script}.py", "reward.py", "support/run.py")
            for name in re.findall(r'rng_for\([^)"]*"([^"]+)"', (ROOT / file).read_text())}


@pytest.mark.parametrize("script", ["grpo", "cispo", "distill"])
def test_every_use_of_randomness_has_a_stream_of_its_own(script):
    """A pass over the rollout and a process count on from their purpose's number; the others have one use."""
    assert purposes_of(script) == {"sampling", "data order", "evaluation"} | (
        {"samples", "dropout"} if script == "distill" else {"mini-batches"})
    uses = [(purpose, index) for purpose in purposes_of(script)
            for index in (range(12) if purpose in ("mini-batches", "dropout") else [0])]
    draws = {(seed, step, *use): torch.rand(1, generator=rng_for(seed, step, *use)).item()
             for seed in (0, 1, 11) for step in (0, 1, 11) for use in uses}
    assert len(set(draws.values())) == 9 * len(uses) >= 27
    assert draws[1, 11, "sampling", 0] == torch.rand(1, generator=rng_for(1, 11, "sampling")).item()


def test_a_stream_is_a_function_of_seed_step_and_number_so_that_an_old_run_goes_on_alike():
    for purpose, index, stream in (("sampling", 0, 0), ("data order", 0, 1), ("evaluation", 0, 2),
                                   ("mini-batches", 4, 7), ("samples", 0, 3), ("dropout", 2, 11)):
        seed = random.Random(f"5/17/{stream}").getrandbits(63)
        expected = torch.rand(3, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(torch.rand(3, generator=rng_for(5, 17, purpose, index)), expected)


# ---------------------------------------------------------------- shares, means and turns of a Run

def run_of(rank=0, world=1, *more):
    """A Run of grpo as process `rank` of `world` sees it, without any process."""
    run = Run("grpo", grpo.parse_args(["--device", "cpu", *more]))
    run.rank, run.world = rank, world
    return run


def test_three_processes_share_six_rows_in_order():
    rows, tensor = list("abcdef"), torch.arange(12).view(6, 2)
    assert [run_of(rank, 3).share(rows) for rank in range(3)] == [["a", "b"], ["c", "d"], ["e", "f"]]
    shares = [run_of(rank, 3).share(tensor) for rank in range(3)]
    assert torch.equal(torch.cat(shares), tensor) and {len(s) for s in shares} == {2}
    assert run_of().share(rows) == rows


def test_on_one_process_metrics_are_its_own(monkeypatch):
    run = run_of()
    run.skipped_updates, run.learning_rate, run.step_began = 2, 1e-3, 98.0
    monkeypatch.setattr(time, "time", lambda: 100.0)
    assert run.average({"reward": 1.5, "ratio_min": 0.5, "ratio_max": 1.5}, 30, {"kl": 0.1}) == {
        "reward": 1.5, "ratio_min": 0.5, "ratio_max": 1.5, "kl": 0.1, "skipped_updates": 2.0,
        "learning_rate": 1e-3, "tokens_per_second": 15.0}


def test_metrics_of_two_processes_by_hand(monkeypatch):
    """Two threads stand for the processes and meet in all_reduce. Over 30 and 10 tokens kl is .1 and .5: the
    mean over all forty is (3 + 5) / 40 = .2. Forty tokens in two seconds are 20 a second.
    """
    parts, meet, results = [None, None], threading.Barrier(2, timeout=20), [None, None]
    reduce = {"SUM": sum, "MIN": min, "MAX": max}

    def all_reduce(values, op="SUM"):
        parts[int(threading.current_thread().name)] = [float(v) for v in values]
        meet.wait()
        result = [reduce[op](pair) for pair in zip(*parts, strict=True)]
        meet.wait()
        return result

    def process(rank, metrics, tokens, kl):
        run = run_of(rank, 2)
        run.skipped_updates, run.learning_rate, run.step_began = 1, 1e-3, 98.0
        results[rank] = run.average(metrics, tokens, {"kl": kl})

    monkeypatch.setattr("support.run.all_reduce", all_reduce)
    monkeypatch.setattr(time, "time", lambda: 100.0)
    given = [({"reward": 1.0, "ratio_min": 0.5, "ratio_max": 1.2, "loss": -1.0}, 30, 0.1),
             ({"reward": 2.0, "ratio_min": 0.7, "ratio_max": 1.5, "loss": 2.0}, 10, 0.5)]
    threads = [threading.Thread(target=process, name=str(i), args=(i, *given[i])) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1] == pytest.approx({
        "reward": 1.5, "ratio_min": 0.5, "ratio_max": 1.5, "loss": 0.5, "kl": 0.2, "skipped_updates": 1.0,
        "learning_rate": 1e-3, "tokens_per_second": 20.0})


def test_a_turn_is_due_every_interval_and_at_the_last_step():
    run = run_of(0, 1, "--steps", "10")
    assert [step for step in range(1, 11) if run.due(step, 4)] == [4, 8, 10]
    assert [step for step in range(1, 11) if run.due(step, 5)] == [5, 10]
    assert [step for step in range(1, 11) if run.due(step, 99)] == [10]


# ---------------------------------------------------------------- resume

@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a 20k-parameter checkpoint over the embedded tokenizer, and a few rows of data."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    model = MiniMind(MiniMindConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1,
                                    num_attention_heads=2, num_key_value_heads=1,
                                    max_position_embeddings=128))
    save_checkpoint(model, folder / "model", BASE)
    for name, count in (("train", 9), ("test", 8), ("sft", 18)):
        lines = (ROOT / f"data/arithmetic/{name}.jsonl").read_text().splitlines(keepends=True)
        (folder / f"{name}.jsonl").write_text("".join(lines[:count]))
    return folder


def options(script, tiny, out, *more):
    """A tiny run of 8 steps: an epoch is 3 steps, the learning rate moves, two passes, several
    micro-batches.
    """
    common = ["--out_dir", out, "--eval_data", tiny / "test.jsonl", "--steps", 8, "--warmup_steps", 2,
              "--eval_interval", 4, "--sample_interval", 3, "--save_interval", 100, "--learning_rate", 1e-2,
              "--max_new_tokens", 6, "--micro_batch_tokens", 90, "--device", "cpu", *more]
    if script == "distill":
        common += ["--teacher", tiny / "model", "--data", tiny / "sft.jsonl", "--hidden_size", 16,
                   "--batch_size", 6, "--num_hidden_layers", 1, "--on_policy_fraction", 0.5, "--alpha", 0.3]
    else:
        common += ["--model", tiny / "model", "--data", tiny / "train.jsonl", "--batch_size", 3,
                   "--num_generations", 2, "--beta", 0.05]
    return [str(option) for option in common]


class StopAt:
    """Stands for the list of caught signals: full once it has been looked at `step` times."""

    def __init__(self, step):
        self.left = step

    def __bool__(self):
        self.left -= 1
        return self.left <= 0

    def __getitem__(self, i):
        return signal.SIGINT


def run_until(script, argv, stop_after, monkeypatch):
    """Run in this process; `stop_after` steps later Ctrl-C arrives (None: never). Returns the exit status."""
    monkeypatch.setattr("support.run.catch_signals", lambda: StopAt(stop_after) if stop_after else [])
    try:
        SCRIPTS[script].main(argv)
    except SystemExit as e:
        return e.code
    return 0


def result_of(folder):
    """(weights and optimizer state, metrics without clocks, samples) of a run."""
    state = torch.load(folder / "state.pt", weights_only=True)
    with open(folder / "metrics.csv", newline="") as f:
        rows = [{k: v for k, v in row.items() if k not in ("tokens_per_second", "seconds")}
                for row in csv.DictReader(f)]
    return state, rows, (folder / "samples.jsonl").read_text()


def assert_same_state(a, b):
    for name in a["model"]:
        assert torch.equal(a["model"][name], b["model"][name]), name
    for i in a["optimizer"]["state"]:
        for name, value in a["optimizer"]["state"][i].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(b["optimizer"]["state"][i][name]))
    assert a["step"] == b["step"] and a["held_out"] == b["held_out"]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("stop_after", [1, 3, 5])       # the first step, an epoch's end, the middle of one
def test_stopping_and_resuming_gives_the_same_run_bit_for_bit(script, stop_after, tiny, tmp_path,
                                                              monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_until(script, options(script, tiny, whole), None, monkeypatch) == 0
    assert run_until(script, options(script, tiny, parts), stop_after, monkeypatch) == 130
    assert len(result_of(parts)[1]) == stop_after + 1
    assert run_until(script, options(script, tiny, parts, "--resume"), None, monkeypatch) == 0
    a, b = result_of(whole), result_of(parts)
    assert_same_state(a[0], b[0])
    assert a[1] == b[1] and a[2] == b[2]                # no row missing, none twice
    assert [row["step"] for row in a[1]] == [str(i) for i in range(9)]


def test_resume_takes_back_what_a_killed_run_logged_past_its_last_checkpoint(tiny, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_until("grpo", options("grpo", tiny, whole), None, monkeypatch) == 0
    assert run_until("grpo", options("grpo", tiny, parts), 3, monkeypatch) == 130
    saved = (parts / "state.pt").read_bytes()
    assert run_until("grpo", options("grpo", tiny, parts, "--resume"), 4, monkeypatch) == 130     # to step 7
    (parts / "state.pt").write_bytes(saved)             # as if steps 4 to 7 had been logged, then kill -9
    with open(parts / "metrics.csv", "a") as f:
        f.write("8,0.5,")                               # in the middle of a row, at that
    assert run_until("grpo", options("grpo", tiny, parts, "--resume"), None, monkeypatch) == 0
    a, b = result_of(whole), result_of(parts)
    assert_same_state(a[0], b[0])
    assert a[1] == b[1] and a[2] == b[2]


def test_resuming_another_algorithm_or_other_sizes_names_both(tiny, tmp_path, monkeypatch):
    out = tmp_path / "run"
    assert run_until("grpo", options("grpo", tiny, out), 1, monkeypatch) == 130
    with pytest.raises(InputError, match="grpo.py.*cispo.py"):
        run_until("cispo", options("cispo", tiny, out, "--resume"), None, monkeypatch)
    argv = options("grpo", tiny, out, "--resume")
    argv[argv.index("--model") + 1] = str(BASE)
    with pytest.raises(InputError, match="hidden_size 32 there, 128 here"):
        run_until("grpo", argv, None, monkeypatch)
    with pytest.raises(InputError, match="--beta 0.05, now 0.5; give the same again"):
        run_until("grpo", options("grpo", tiny, out, "--resume") + ["--beta", "0.5"], None, monkeypatch)
    with pytest.raises(InputError, match="no run to go on with"):
        run_until("grpo", options("grpo", tiny, tmp_path / "empty", "--resume"), None, monkeypatch)
    with pytest.raises(InputError, match="already holds a run"):
        run_until("grpo", options("grpo", tiny, out), None, monkeypatch)
    assert run_until("grpo", options("grpo", tiny, out, "--overwrite"), 2, monkeypatch) == 130
    assert len(result_of(out)[1]) == 3


def test_resume_restores_a_checkpoint_that_a_kill_left_out_and_keeps_samples(tiny, tmp_path, monkeypatch):
    """Killed between state.pt and checkpoint/ of the last step; somebody deleted metrics.csv as well."""
    out = tmp_path / "run"
    assert run_until("grpo", options("grpo", tiny, out), None, monkeypatch) == 0
    weights = (out / "checkpoint/model.safetensors").read_bytes()
    samples = (out / "samples.jsonl").read_text()
    shutil.rmtree(out / "checkpoint")
    (out / "metrics.csv").unlink()
    with pytest.raises(InputError, match="already holds a run"):
        run_until("grpo", options("grpo", tiny, out), None, monkeypatch)
    (out / "samples.jsonl").write_text(samples + '{"step": broken}\n')
    assert run_until("grpo", options("grpo", tiny, out, "--resume"), None, monkeypatch) == 0
    assert (out / "checkpoint/model.safetensors").read_bytes() == weights
    assert (out / "samples.jsonl").read_text() == samples


# ---------------------------------------------------------------- signals, kill -9, a full disk

def start(script, argv):
    return subprocess.Popen([sys.executable, str(ROOT / f"{script}.py"), *argv], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_saves_and_says_how_to_resume(number, status, tiny, tmp_path):
    process = start("grpo", options("grpo", tiny, tmp_path / "run", "--steps", "100000"))
    while not process.stdout.readline().startswith("step"):
        assert process.poll() is None
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert "the same options and --resume --out_dir" in out and "stopping after this step" in err
    stopped = int(out.split("stopped after step ")[1].split(";")[0])
    state, rows, _ = result_of(tmp_path / "run")
    assert state["step"] == stopped and rows[-1]["step"] == str(stopped)
    load_checkpoint(tmp_path / "run/checkpoint")


def fork(work):
    """Run work() in a child process -> its pid. Forked, so that torch need not be imported again."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def test_kill_9_while_saving_leaves_a_checkpoint_and_a_state_that_load(tmp_path):
    """At random moments of a loop that only saves; `KILLS=50 python -m pytest -k kill_9` for more."""
    model = MiniMind(MiniMindConfig(vocab_size=320, hidden_size=128, num_hidden_layers=2))
    optimizer = torch.optim.AdamW(model.parameters())
    save_run(tmp_path, "grpo", model, optimizer, 0, {}, BASE, ARGS)

    def save_for_ever():
        for step in range(1, 10 ** 9):
            with torch.no_grad():
                model.model["norm"].weight.fill_(step)
            save_run(tmp_path, "grpo", model, optimizer, step, {}, BASE, ARGS)

    rng, steps = random.Random(0), []
    for _ in range(int(os.environ.get("KILLS", 10))):
        pid = fork(save_for_ever)
        time.sleep(rng.uniform(0.02, 0.3))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        fresh = MiniMind(model.config)
        step, _ = load_run(tmp_path, "grpo", fresh, torch.optim.AdamW(fresh.parameters()), ARGS)
        assert step == 0 or fresh.model["norm"].weight.unique().tolist() == [step]
        weights = load_checkpoint(tmp_path / "checkpoint").model["norm"].weight.unique()
        assert len(weights) == 1
        load_tokenizer(tmp_path / "checkpoint")
        steps.append(step)
    assert max(steps) > 0                               # it did save


def test_a_full_disk_ends_in_one_line_and_keeps_the_last_checkpoint(tmp_path):
    """A limit on the size of a file stands for the full disk: the write fails in its middle just the same."""
    model = MiniMind(MiniMindConfig(vocab_size=320, hidden_size=128, num_hidden_layers=2))
    optimizer = torch.optim.AdamW(model.parameters())
    save_run(tmp_path, "grpo", model, optimizer, 1, {}, BASE, ARGS)
    files = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}

    def save_on_full_disk():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            save_run(tmp_path, "grpo", model, optimizer, 2, {}, BASE, ARGS)
        except InputError as e:
            (tmp_path / "message").write_text(str(e))

    os.waitpid(fork(save_on_full_disk), 0)
    assert "cannot save step 2" in (tmp_path / "message").read_text()
    assert all(f.read_bytes() == content for f, content in files.items())
    assert not list(tmp_path.rglob("*.tmp"))            # nothing left that keeps the disk full


def test_a_folder_that_cannot_be_written_is_refused_before_training(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        run_until("grpo", options("grpo", tiny, tmp_path / "file/run"), None, monkeypatch)


# ---------------------------------------------------------------- numbers that are none

def spoil(monkeypatch, bad_calls):
    """Let grpo_loss give NaN in these of its calls (counted from 1)."""
    calls, real = [0], grpo.grpo_loss

    def sometimes_nan(*args):
        calls[0] += 1
        return real(*args) * (math.nan if calls[0] in bad_calls else 1.0)

    monkeypatch.setattr(grpo, "grpo_loss", sometimes_nan)


def test_a_loss_that_is_not_finite_skips_the_update_and_is_counted(tiny, tmp_path, monkeypatch):
    spoil(monkeypatch, {1, 2})
    argv = options("grpo", tiny, tmp_path / "run", "--micro_batch_tokens", "9999", "--steps", "1")
    assert run_until("grpo", argv, None, monkeypatch) == 0
    state, rows, _ = result_of(tmp_path / "run")
    assert rows[1]["skipped_updates"] == "2"
    before = load_checkpoint(tiny / "model").state_dict()
    assert all(torch.equal(before[name], weights) for name, weights in state["model"].items())


def test_ten_updates_in_a_row_that_are_not_finite_end_the_run(tiny, tmp_path, monkeypatch):
    spoil(monkeypatch, range(3, 100))
    argv = options("grpo", tiny, tmp_path / "run", "--micro_batch_tokens", "9999")
    with pytest.raises(InputError, match="step 6: ten updates in a row.*learning_rate"):
        run_until("grpo", argv, None, monkeypatch)


def test_a_nan_reward_ends_the_run_before_any_update(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("reward.length_reward", lambda completion: math.nan)
    with pytest.raises(InputError, match="'length' is nan for the completion"):
        run_until("grpo", options("grpo", tiny, tmp_path / "run"), None, monkeypatch)


# ---------------------------------------------------------------- compiled, and on several processes

def torchrun(script, argv, processes):
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}",
         str(ROOT / f"{script}.py"), *argv], cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_compiled_pass_takes_the_same_steps(script, tiny, tmp_path, monkeypatch):
    """The trace and its gradients are checked; generated code would need a C++ compiler where this runs."""
    size = ["--steps", "3"]
    assert run_until(script, options(script, tiny, tmp_path / "plain") + size, None, monkeypatch) == 0
    compiled, real = [], torch.compile

    def traced(model, **kwargs):
        compiled.append(model)
        return real(model, backend="aot_eager", **kwargs)

    monkeypatch.setattr(torch, "compile", traced)
    argv = options(script, tiny, tmp_path / "compiled", "--compile") + size
    assert run_until(script, argv, None, monkeypatch) == 0
    plain, traced_state = result_of(tmp_path / "plain")[0], result_of(tmp_path / "compiled")[0]
    assert len(compiled) == 1 and plain["model"].keys() == traced_state["model"].keys()
    for name, weights in plain["model"].items():
        torch.testing.assert_close(traced_state["model"][name], weights, rtol=1e-4, atol=1e-4)


def test_a_machine_without_a_compiler_is_told_so(tiny, tmp_path):
    """A fresh cache, since code that was generated before would need no compiler."""
    done = subprocess.run(
        [sys.executable, ROOT / "grpo.py", *options("grpo", tiny, tmp_path / "run", "--compile")], cwd=ROOT,
        capture_output=True, text=True, timeout=200,
        env={**os.environ, "CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and last.startswith("grpo.py: error: --compile failed") and "g++" in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_processes_take_the_same_steps_as_one(script, tiny, tmp_path, monkeypatch):
    """Three steps over rows of unequal length: weights equal to 1e-5, metrics averaged, one set of files."""
    size = ["--steps", "3", "--batch_size", "6", "--eval_interval", "3"]
    assert run_until(script, options(script, tiny, tmp_path / "one") + size, None, monkeypatch) == 0
    done = torchrun(script, options(script, tiny, tmp_path / "two") + size, 2)
    assert done.returncode == 0, done.stderr
    one, rows_one, _ = result_of(tmp_path / "one")
    two, rows_two, _ = result_of(tmp_path / "two")
    for name, weights in one["model"].items():
        torch.testing.assert_close(two["model"][name], weights, rtol=1e-5, atol=1e-5)
    moved = max((one["model"][n] - w).abs().max().item() for n, w in (
        load_checkpoint(tiny / "model").state_dict() if script != "distill" else one["model"]).items())
    assert moved > 1e-3 or script == "distill"
    for a, b in zip(rows_one, rows_two):
        for name in ("step", "eval_accuracy", "reward", "accuracy", "trained_tokens", "learning_rate",
                     "on_policy", "entropy", "ratio_mean", "completion_length"):
            if a.get(name):
                assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-5), name
    assert done.stdout.count("checkpoint in") == 1


def test_a_process_that_fails_ends_the_whole_run_with_its_message(tiny, tmp_path):
    done = torchrun("grpo", options("grpo", tiny, tmp_path / "run", "--batch_size", "3"), 2)
    assert done.returncode != 0 and "--batch_size 3 must be a multiple of the 2 processes" in done.stderr


def test_out_of_gpu_memory_says_what_to_lower(monkeypatch, capsys):
    def main():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    with pytest.raises(SystemExit) as end:
        run_script(main, "grpo.py", lambda: grpo.parse_args(["--micro_batch_tokens", "77"]))
    assert end.value.code == 2 and "--micro_batch_tokens first (now 77)" in capsys.readouterr().err


# ---------------------------------------------------------------- fuzz

def mutate(data, rng):
    """Change, drop, double or insert a few bytes."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, kind = rng.randrange(len(data)), rng.randrange(5)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at:at + rng.randint(1, 8)]
        elif kind == 2:
            data[at:at] = data[at:at + rng.randint(1, 8)]
        elif kind == 3:
            data[at:at] = rng.choice([b"{", b"}", b'"', b"[", b"-1", b"null", b"1e999", b"9999999999", b"\\",
                                      b"\0"])
        else:
            del data[at:]
        data = data or bytearray(b" ")
    return bytes(data)


def survives(check, path, pristine, rng, count):
    """check() either works or raises an InputError of one line, for `count` mutations of the file at path."""
    outcomes = {True: 0, False: 0}
    for _ in range(count):
        path.write_bytes(mutate(pristine, rng))
        try:
            check()
            outcomes[True] += 1
        except InputError as e:
            assert str(e) and len(str(e).splitlines()) == 1
            outcomes[False] += 1
    path.write_bytes(pristine)
    return outcomes


@pytest.mark.parametrize("name, count", [("train.jsonl", 700), ("sft.jsonl", 300), ("config.json", 500),
                                         ("model.safetensors", 500)])
def test_two_thousand_mutations_end_in_success_or_one_line(name, count, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "t")
    chat, folder = load_tokenizer(tiny / "model"), tmp_path / "t"
    path = folder / name if name.endswith("jsonl") else folder / "model" / name
    pristine = path.read_bytes()
    check = {"train.jsonl": lambda: read_prompts(path, chat, 100, 320),
             "sft.jsonl": lambda: read_rows(path, chat, 100, 320),
             "config.json": lambda: load_checkpoint(folder / "model")}.get(name)
    if name == "model.safetensors":     # the header: eight bytes of length, then JSON
        header = pristine[:8 + int.from_bytes(pristine[:8], "little")]
        rest, write = pristine[len(header):], path.write_bytes
        rng, refused = random.Random(2), 0
        for _ in range(count):
            write(mutate(header, rng) + rest)
            try:
                load_checkpoint(folder / "model")
            except InputError as e:
                assert len(str(e).splitlines()) == 1
                refused += 1
        assert refused > count // 2
    else:
        outcomes = survives(check, path, pristine, random.Random(1), count)
        assert outcomes[False] > count // 10


def test_nothing_in_a_state_file_is_executed(tiny, tmp_path):
    """state.pt is read with weights_only: a pickle that calls a function is refused, not run."""

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'exploded'}",)

    torch.save({"script": "grpo", "bomb": Bomb()}, tmp_path / "state.pt")
    model = load_checkpoint(tiny / "model")
    with pytest.raises(InputError, match="cannot be read"):
        load_run(tmp_path, "grpo", model, torch.optim.AdamW(model.parameters()), ARGS)
    assert not (tmp_path / "exploded").exists()
