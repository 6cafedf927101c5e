"""A run of a script: its processes, device and precision, its folder, what it logs and saves, how it ends.

The training loop is never in here. Each method of Run says what it does on several processes and at a resume.
"""
import argparse
import csv
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.nn.parallel import DistributedDataParallel

from support import InputError
from support.checkpoint import save_checkpoint, write_atomically

# ---------------------------------------------------------------- options

class OptionParser(argparse.ArgumentParser):
    """argparse, with every default in --help, and "--steps must .." where it has "argument --steps: must .."
    """

    def __init__(self, name):
        super().__init__(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)

    def error(self, message):
        super().error(re.sub(r"^argument (--\w+): must", r"\1 must", message))


def checked(kind, fits, must):
    """An argparse type: a finite number of `kind` that `fits`, else an error that names the option."""
    def read(text):
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"invalid {kind.__name__} value: {text!r}") from None
        if not (fits(value) and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"must {must}, not {value}")
        return value
    return read


positive_int = checked(int, lambda x: x > 0, "be positive")
positive_float = checked(float, lambda x: x > 0, "be positive")
non_negative_int = checked(int, lambda x: x >= 0, "not be negative")
non_negative = checked(float, lambda x: x >= 0, "not be negative")
fraction = checked(float, lambda x: 0 <= x <= 1, "lie in [0, 1]")


# ---------------------------------------------------------------- randomness: functions of seed and step

# Every use of randomness has a stream of its own, by number: a run begun with them goes on with them.
PURPOSES = {"sampling": 0, "data order": 1, "evaluation": 2, "mini-batches": 3, "samples": 3, "dropout": 9}


def rng_for(seed, step, purpose, index=0):
    """A random generator made of these alone: a resumed run needs no other state. `index` tells apart the
    uses of one purpose in one step (passes over the rollout, processes).
    """
    stream = PURPOSES[purpose] + index
    return torch.Generator().manual_seed(random.Random(f"{seed}/{step}/{stream}").getrandbits(63))


def batch_of_step(step, batch_size, num_rows, seed):
    """Row numbers of step 1, 2, ...: a fresh shuffle every epoch, a function of the step alone."""
    batch = []
    for k in range((step - 1) * batch_size, step * batch_size):
        epoch, place = divmod(k, num_rows)
        if place == 0 or not batch:
            order = torch.randperm(num_rows, generator=rng_for(seed, epoch, "data order"))
        batch.append(int(order[place]))
    return batch


def learning_rate_at(step, args):
    """Linear warm-up, then constant or a cosine down to a tenth of the peak at the last step."""
    warmup = min(1.0, step / args.warmup_steps) if args.warmup_steps else 1.0
    fall = 0.1 + 0.45 * (1 + math.cos(math.pi * step / args.steps)) if args.lr_schedule == "cosine" else 1.0
    return args.learning_rate * warmup * fall


# ---------------------------------------------------------------- processes

def init_distributed(device_name):
    """Join the processes that torchrun started, if any -> (rank, number of processes, device of this one)."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    try:
        device = torch.device(device_name)
    except RuntimeError:
        raise InputError(f"--device {device_name}: no such device; try cpu, cuda, cuda:0") from None
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise InputError(f"--device {device_name}: {torch.cuda.device_count()} CUDA devices here; try cpu")
    if world == 1:
        return 0, 1, device
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), world, device


def all_reduce(values, op="SUM"):
    """Sum (or MIN, MAX) of a list of numbers over all processes -> list of floats."""
    if not dist.is_initialized():
        return [float(v) for v in values]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
    tensor = torch.tensor([float(v) for v in values], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    return tensor.tolist()


def catch_signals():
    """Ctrl-C and SIGTERM let the step finish: the list then holds the signal. A second ends at once."""
    stop_signal, began = [], []

    def handler(number, frame):
        if stop_signal and time.time() - began[0] > 0.5:    # torchrun and its caller may both send the first
            os._exit(128 + number)
        if stop_signal:
            return
        stop_signal.append(number)
        began.append(time.time())
        print("stopping after this step; once more to stop at once", file=sys.stderr, flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
    return stop_signal


# ---------------------------------------------------------------- the folder of a run, and its state

def run_dir(out_dir, name, resume, overwrite):
    """The folder of a run, made: `out_dir`, or without one the next free of out/NAME, out/NAME-2, ...

    InputError if it holds a run that is neither to be resumed nor overwritten, or if it cannot be written.
    """
    if out_dir:
        folder = Path(out_dir)
        used = any((folder / name).exists() for name in ("metrics.csv", "state.pt"))
        if used and not (resume or overwrite):
            raise InputError(f"--out_dir {out_dir} already holds a run; add --resume or --overwrite, or name "
                             f"another folder")
    elif resume:
        raise InputError("--resume needs --out_dir, the folder of the run to go on with")
    else:
        tries = (Path("out") / (f"{name}-{i}" if i > 1 else name) for i in itertools.count(1))
        folder = next(f for f in tries if not f.exists())
    try:
        folder.mkdir(parents=True, exist_ok=bool(out_dir))      # of two runs with one name, one ends here
        tempfile.TemporaryFile(dir=folder).close()
        if overwrite and not resume:
            (folder / "state.pt").unlink(missing_ok=True)
    except OSError as e:
        raise InputError(f"--out_dir {folder}: cannot be written ({e.strerror})") from None
    return folder


# Options that may differ at a resume: they change where a run looks, how long it is, not what it computes.
FREE_OPTIONS = {"steps", "out_dir", "resume", "overwrite", "eval_data", "eval_interval", "sample_interval",
                "save_interval", "log_interval", "device", "micro_batch_tokens", "compile"}


def save_run(out_dir, script, model, optimizer, step, eval_scores, tokenizer_dir, args):
    """Save what --resume needs (state.pt: fp32 weights and optimizer in one file) and the checkpoint folder.

    Batches, noise and dropout are functions of seed and step, so the step stands for every random generator.
    """
    state = {"script": script, "config": vars(model.config), "step": step, "held_out": eval_scores,
             "options": {k: v for k, v in vars(args).items() if k not in FREE_OPTIONS},
             "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    try:
        write_atomically(Path(out_dir) / "state.pt", lambda tmp: torch.save(state, tmp))
        save_checkpoint(model, Path(out_dir) / "checkpoint", tokenizer_dir)
    except (OSError, RuntimeError, SafetensorError) as e:   # each library words a full disk in its own way
        raise InputError(f"{out_dir}: cannot save step {step} ({str(e).splitlines()[0]}); the last "
                         f"checkpoint there is whole: make room, go on with --resume") from None


def load_run(out_dir, script, model, optimizer, args):
    """Bring model and optimizer to the state that `save_run` left in out_dir -> (step, eval_scores)."""
    path = Path(out_dir) / "state.pt"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)   # a pickle can run code
        saved = {key: state[key] for key in ("script", "config", "options", "step", "held_out", "model",
                                             "optimizer")}
    except FileNotFoundError:
        raise InputError(f"--resume: {path} does not exist; there is no run to go on with") from None
    except Exception as e:
        raise InputError(f"--resume: {path} cannot be read ({str(e).splitlines()[0]})") from None
    if saved["script"] != script:
        raise InputError(f"--resume: {path} was written by {saved['script']}.py, this is {script}.py")
    differing = [f"{k} {saved['config'].get(k)} there, {v} here" for k, v in vars(model.config).items()
                 if saved["config"].get(k) != v]
    if differing:
        raise InputError(f"--resume: {path} holds a model of other sizes: {'; '.join(differing)}")
    changed = [f"--{k} {v!r}, now {getattr(args, k, None)!r}" for k, v in saved["options"].items()
               if getattr(args, k, None) != v]
    if changed:
        raise InputError(f"--resume: the run was started with {'; '.join(changed)}; give the same again")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"], saved["held_out"]


def rows_up_to(step, folder):
    """What metrics.csv (dicts) and samples.jsonl (lines) of a folder hold up to `step`. Later rows, of a run
    that was killed past its last checkpoint, are left out: those steps are done again.
    """
    rows, samples = [], []
    if step and (folder / "metrics.csv").exists():
        with open(folder / "metrics.csv", newline="", encoding="utf-8") as f:
            rows = [r for r in csv.DictReader(f) if r["step"].isdigit() and int(r["step"]) <= step]
    if step and (folder / "samples.jsonl").exists():
        with open(folder / "samples.jsonl", encoding="utf-8") as f:
            steps_of = ((line, re.match(r'\{"step": (\d+),', line)) for line in f if line.endswith("}\n"))
            samples = [line for line, found in steps_of if found and int(found[1]) <= step]
    return rows, samples


# ---------------------------------------------------------------- the run

class Run:
    """What a training loop stands on. In the order of use: begin, wrap, before_training; in every step
    begin_step, share, sync_next_backward, all_finite, average, log, save_if_due; at last finish.

    rank, world: this process and how many there are; is_main: it writes the files. device, dtype: where and
    in which precision forward passes run. eval_scores: held-out accuracy "before" training, and the "best".
    """

    def __init__(self, script, args):
        """Join the other processes and choose device and precision. Every process must get equally many
        prompts of a batch, else an InputError.
        """
        if args.resume and args.overwrite:
            raise InputError("--resume and --overwrite exclude each other")
        self.script, self.args = script, args
        self.rank, self.world, self.device = init_distributed(args.device)
        self.is_main = self.rank == 0
        if args.batch_size % self.world:
            raise InputError(f"--batch_size {args.batch_size} must be a multiple of the {self.world} "
                             f"processes")
        self.dtype = {"auto": torch.bfloat16 if self.device.type == "cuda" else torch.float32,
                      "bfloat16": torch.bfloat16, "float32": torch.float32}[args.dtype]
        self.start_step, self.eval_scores, self.bad_updates, self.last_metrics = 0, {}, 0, {}

    def autocast(self):
        """One precision path for every forward pass; master weights and optimizer stay fp32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def begin(self, model, optimizer, columns, tokenizer_dir, about):
        """A new run, or at a resume the state of the old one -> the last step that is done.

        Every process loads the state. The main one makes the folder and its files, `columns` those of
        metrics.csv; at a resume it drops what was logged past the last save. It prints `about`, a line that
        says what the run understood. From here on signals are caught.
        """
        args = self.args
        self.model, self.optimizer, self.columns = model, optimizer, columns
        self.tokenizer_dir = tokenizer_dir
        if args.resume and args.out_dir:
            self.start_step, self.eval_scores = load_run(args.out_dir, self.script, model, optimizer, args)
        if self.is_main:
            self.out_dir = run_dir(args.out_dir, self.script, args.resume, args.overwrite)
            rows, samples = rows_up_to(self.start_step, self.out_dir)
            self.began = time.time()
            self.seconds_before = float(rows[-1]["seconds"] or 0) if rows else 0.0
            (self.out_dir / "samples.jsonl").write_text("".join(samples), encoding="utf-8")
            with open(self.out_dir / "metrics.csv", "w", newline="", encoding="utf-8") as f:
                writer = csv.DictWriter(f, columns, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
            size = sum(p.numel() for p in model.parameters()) / 1e6
            print(f"{size:.2f}M parameters on {self.device}, {self.dtype}; {about}; in {self.out_dir}")
        self.stop_signal = catch_signals()
        return self.start_step

    def wrap(self, model):
        """The model as the trained forward pass calls it: compiled if asked for, and on several processes
        inside the wrapper that averages the gradients.
        """
        self.ddp = None
        if self.world > 1:
            index = [self.device.index] if self.device.type == "cuda" else None
            model = self.ddp = DistributedDataParallel(model, index)
        return torch.compile(model, dynamic=True) if self.args.compile else model

    def sync_next_backward(self, now):
        """Whether the next backward pass averages the gradients over the processes. They do so once for each
        optimizer step, in its last micro-batch. Nothing on one process.
        """
        if self.ddp is not None:
            self.ddp.require_backward_grad_sync = now

    def begin_step(self, step):
        """Set the optimizer's learning rate, a function of the step alone, and start the step's clock."""
        self.step_began, self.skipped_updates = time.time(), 0
        self.learning_rate = learning_rate_at(step, self.args)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate

    def share(self, rows):
        """This process's rows of a batch that every process has drawn alike: the rank-th of equal parts."""
        return rows[self.rank * len(rows) // self.world:(self.rank + 1) * len(rows) // self.world]

    def all_finite(self, step, loss, grad_norm):
        """Whether loss and gradient norm are finite on every process: only then the optimizer may step,
        weights are never touched by a NaN. Ten updates in a row that are not end the run.
        """
        finite = math.isfinite(all_reduce([loss + grad_norm])[0])
        self.bad_updates = 0 if finite else self.bad_updates + 1
        self.skipped_updates += not finite
        if self.bad_updates == 10:
            raise InputError(f"step {step}: ten updates in a row had a loss or gradient that is not finite; "
                             f"try a lower --learning_rate or --dtype float32")
        return finite

    def average(self, metrics, tokens, token_means=()):
        """Metrics of the whole batch from each process's own: the mean of each, the extremes of *_min and
        *_max; `token_means` were taken over this process's `tokens` and weigh by them. Adds what the run
        itself knows: learning rate, skipped updates, tokens for each second.
        """
        token_weight = self.world * tokens / all_reduce([tokens])[0]
        metrics = {**metrics, **{name: token_weight * value for name, value in dict(token_means).items()},
                   "skipped_updates": self.skipped_updates, "learning_rate": self.learning_rate,
                   "tokens_per_second": self.world * tokens / (time.time() - self.step_began)}
        for op, names in (("MIN", [n for n in metrics if n.endswith("_min")]),
                          ("MAX", [n for n in metrics if n.endswith("_max")]),
                          ("SUM", [n for n in metrics if not n.endswith(("_min", "_max"))])):
            values = all_reduce([metrics[name] for name in names], op)
            metrics.update({n: v / self.world if op == "SUM" else v for n, v in zip(names, values)})
        return metrics

    def before_training(self, accuracy):
        """Note the held-out accuracy before the first step ("" if none is measured): row 0 of metrics.csv.
        A resumed run has its row, and its scores unless it now measures for the first time.
        """
        if accuracy != "":
            self.eval_scores.update(before=accuracy, best=accuracy)
        if self.is_main and accuracy != "":
            print(f"held-out accuracy before training: {accuracy:.3f}", flush=True)
        if self.is_main and self.start_step == 0:
            self.write_row({"step": 0, "eval_accuracy": accuracy})

    def write_row(self, metrics):
        """Append {column: value} to metrics.csv; what a step has no value for stays empty."""
        metrics = {**metrics, "seconds": self.seconds_before + time.time() - self.began}
        with open(self.out_dir / "metrics.csv", "a", newline="", encoding="utf-8") as f:
            csv.DictWriter(f, self.columns).writerow(
                {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in metrics.items()})

    def due(self, step, interval):
        """Every `interval` steps, and at the last one."""
        return step == self.args.steps or step % interval == 0

    def log(self, step, metrics, shown, samples=()):
        """The main process writes `metrics` (of all processes) as a row and, every --log_interval steps,
        prints those named in `shown`; every --sample_interval steps it shows and keeps its own `samples`.
        """
        accuracy, self.last_metrics = metrics["eval_accuracy"], metrics
        if accuracy != "":
            self.eval_scores["best"] = max(self.eval_scores["best"], accuracy)
        if not self.is_main:
            return
        self.write_row({"step": step, **metrics})
        if self.due(step, vars(self.args).get("log_interval", 1)) or accuracy != "":
            values = "  ".join(f"{n}       -" if metrics[n] == "" else f"{n} {metrics[n]:7.3f}"
                               for n in shown)
            done, steps = step - self.start_step, self.args.steps
            left = round((time.time() - self.began) / done * (steps - step))
            print(f"step {step:4d}/{steps}  {values}  {metrics['tokens_per_second']:6.0f} tok/s"
                  f"  left {left // 60}:{left % 60:02d}", flush=True)
        if self.due(step, self.args.sample_interval):
            with open(self.out_dir / "samples.jsonl", "a", encoding="utf-8") as f:
                f.writelines(json.dumps({"step": step, **row}, ensure_ascii=False) + "\n" for row in samples)
            for row in samples:
                numbers = "  ".join(f"{k} {v:+.2f}" for k, v in row.items() if isinstance(v, float))
                print(f"    | {row['prompt']!r}\n    | {row['completion']!r}\n    | {numbers}", flush=True)

    def save(self, step):
        """The main process saves the resume state and the checkpoint folder."""
        if self.is_main:
            save_run(self.out_dir, self.script, self.model, self.optimizer, step, self.eval_scores,
                     self.tokenizer_dir, self.args)

    def save_if_due(self, step):
        """Save every --save_interval steps, at the last one, and when any process has caught a signal: then
        all of them end here, and --resume goes on with the next step.
        """
        stop = max(all_reduce([self.stop_signal[0] if self.stop_signal else 0], "MAX"))
        if stop or self.due(step, self.args.save_interval):
            self.save(step)
        if stop and step < self.args.steps:
            if self.is_main:
                print(f"stopped after step {step}; go on with the same options and --resume --out_dir "
                      f"{self.out_dir}", flush=True)
            raise SystemExit(128 + int(stop))

    def finish(self, measured):
        """Say what came of it; `measured` says what the held-out accuracy was taken over, "" if nothing."""
        metrics = self.last_metrics
        if not metrics:     # a resume with nothing left to do but what a kill between two files left undone
            self.save(self.start_step)
        elif measured and self.is_main:
            after = f"{metrics['eval_accuracy']:.3f}, best {self.eval_scores['best']:.3f}"
            if "eval_greedy" in metrics:
                after = f"{metrics['eval_accuracy']:.3f} sampled, {metrics['eval_greedy']:.3f} greedy"
            print(f"held-out accuracy {self.eval_scores['before']:.3f} -> {after} ({measured})")
        if self.is_main:
            print(f"checkpoint in {self.out_dir / 'checkpoint'}")


def run_script(main, name, parse_args):
    """Call main(); what the user can mend ends in one line on stderr and exit status 2."""
    message, status = "", 2
    try:
        main()
        status = 0
    except SystemExit as e:     # argparse, or a signal that let the step finish
        status = e.code
    except InputError as e:
        message = str(e)
    except OSError as e:
        message = f"{e.filename or 'a file of the run'}: {e.strerror or e}"
    except torch.OutOfMemoryError as e:
        now = parse_args()
        message = (f"out of GPU memory ({str(e).splitlines()[0]}); lower --micro_batch_tokens first (now "
                   f"{now.micro_batch_tokens}), then --batch_size (now {now.batch_size}) or "
                   f"--max_new_tokens (now {now.max_new_tokens})")
    except RuntimeError as e:
        if type(e).__name__ != "InductorError":     # torch.compile's: to import it takes seconds
            raise
        message = (f"--compile failed ({str(e).splitlines()[0]}); on a CPU it needs a C++ compiler: install "
                   f"g++, or leave --compile out")
    if message:
        print(f"{name}: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    if dist.is_initialized():
        # At once: after an error other ranks still train and must not be waited for; and while Python is
        # taken down in order, a gloo thread that wants the interpreter lock can abort the process.
        sys.stdout.flush()
        os._exit(status)
    if status:
        sys.exit(status)
