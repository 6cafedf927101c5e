"""tools.single_file: one file that runs alone, does what the script does bit for bit, and holds no more."""
import ast
import csv
import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model import MiniMind, MiniMindConfig
from support.checkpoint import save_checkpoint
from tools.single_file import main, single_file

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "data/arithmetic/base"
SCRIPTS = ["grpo", "cispo", "distill"]


def defined(text):
    """The functions, classes and constants at the top level of a source text, in order."""
    names = []
    for node in ast.parse(text).body:
        names += [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
        names += [target.id for target in node.targets] if isinstance(node, ast.Assign) else []
    return names


# ---------------------------------------------------------------- it runs alone

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
    (folder / "bonus.py").write_text("def bonus(messages, completion, answer):\n    return len(completion)\n")
    return folder


def options(script, tiny, out):
    common = ["--out_dir", out, "--eval_data", tiny / "test.jsonl", "--steps", 4, "--warmup_steps", 1,
              "--eval_interval", 2, "--sample_interval", 2, "--learning_rate", 1e-2, "--max_new_tokens", 6,
              "--micro_batch_tokens", 90, "--seed", 7, "--device", "cpu"]
    if script == "distill":
        common += ["--teacher", tiny / "model", "--data", tiny / "sft.jsonl", "--hidden_size", 16,
                   "--batch_size", 6, "--num_hidden_layers", 1, "--on_policy_fraction", 0.5, "--alpha", 0.3]
    else:
        common += ["--model", tiny / "model", "--data", tiny / "train.jsonl", "--batch_size", 3,
                   "--num_generations", 2, "--beta", 0.05, "--reward_fn", f"{tiny / 'bonus.py'}:bonus"]
    return [str(option) for option in common]


def alone(*arguments, cwd):
    """Run Python, isolated: it imports nothing from PYTHONPATH, the script's folder or the current one."""
    return subprocess.run([sys.executable, "-I", *map(str, arguments)], cwd=cwd, text=True, timeout=120,
                          capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def result_of(folder):
    """(metrics without clocks, samples, the bytes of each file of the checkpoint) of a run."""
    with open(folder / "metrics.csv", newline="") as f:
        rows = [{k: v for k, v in row.items() if k not in ("tokens_per_second", "seconds")}
                for row in csv.DictReader(f)]
    return (rows, (folder / "samples.jsonl").read_bytes(),
            {path.name: path.read_bytes() for path in (folder / "checkpoint").iterdir()})


@pytest.fixture
def signals():
    """main() catches them; give them back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_file_alone_in_an_empty_folder_makes_the_same_run_bit_for_bit(script, tiny, tmp_path, signals):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "file.py").write_text(single_file(script), encoding="utf-8")
    assert "No module named 'support'" in alone("-c", "import support", cwd=empty).stderr
    done = alone("file.py", *options(script, tiny, tmp_path / "theirs"), cwd=empty)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in empty.iterdir()] == ["file.py"]
    importlib.import_module(script).main(options(script, tiny, tmp_path / "ours"))
    (rows, samples, checkpoint), theirs = result_of(tmp_path / "ours"), result_of(tmp_path / "theirs")
    assert len(rows) == 5 and samples and "model.safetensors" in checkpoint
    assert rows == theirs[0]
    assert samples == theirs[1]
    assert checkpoint == theirs[2]


# ---------------------------------------------------------------- what is in it

@pytest.mark.parametrize("script", SCRIPTS)
def test_it_imports_torch_and_what_comes_with_it_or_a_checkpoint(script):
    tree, packages = ast.parse(single_file(script)), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            packages.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
    assert packages - sys.stdlib_module_names <= {"torch", "numpy", "tokenizers", "safetensors", "jinja2"}
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert tree.body[1:1 + len(imports)] == imports                 # right behind the docstring
    assert len({ast.unparse(node) for node in imports}) == len(imports)


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_holds_the_whole_script_behind_what_the_script_reaches_and_nothing_twice(script):
    text, source = single_file(script), (ROOT / f"{script}.py").read_text(encoding="utf-8")
    names = defined(text)
    assert len(set(names)) == len(names)
    assert names[-len(defined(source)):] == defined(source)
    assert ast.get_docstring(ast.parse(text)) == ast.get_docstring(ast.parse(source))
    assert f"# Made by: python -m tools.single_file {script} > FILE.py\n" in text
    assert text.endswith(source[source.index("\nif __name__ =="):])
    assert text.replace("\n# ", " ").count("Letters in shape comments: B ") >= 3      # model, rollout, script
    unused = set(names) - {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    assert unused <= {"distillation_loss"}      # of distill.py itself: the formula, for the reader


@pytest.mark.parametrize("script, absent", [
    ("grpo", "token_divergence completion_labels read_rows cispo_loss pad_right"),
    ("cispo", "token_divergence completion_labels read_rows grpo_loss pad_right"),
    ("distill", "group_advantages Packed per_token_logps parse_weights load_extra_terms TERM_NAMES")])
def test_what_another_script_alone_needs_is_left_out(script, absent):
    files = [*(f"{name}.py" for name in ("model", "rollout", "reward", *SCRIPTS)), "support/prompts.py",
             "support/chat.py"]
    assert set(absent.split()) <= {name for f in files for name in defined((ROOT / f).read_text("utf-8"))}
    assert set(absent.split()).isdisjoint(defined(single_file(script)))


@pytest.mark.parametrize("script", SCRIPTS)
def test_ruff_finds_no_undefined_or_unused_name_and_no_long_line(script, tmp_path):
    (tmp_path / "file.py").write_text(single_file(script), encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--config",
                           ROOT / "pyproject.toml", tmp_path / "file.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---------------------------------------------------------------- a project of a few lines

PROJECT = {
    "main.py": '''
"""A script.

With more \\n in it.
"""
import os
from fractions import Fraction as Exact

from lib.deep import DEPTH, Deep
from low import twice


# ---------------------------------------------------------------- the run

def unused():
    """A script keeps all of its own."""


def main():
    os = Exact(twice(DEPTH), 3)         # a local variable: the module os is not needed
    print(os, Deep(5).triple())


if __name__ == "__main__":
    main()
''',
    "low.py": '''
"""The lowest
file.

More of it.

Letters in shape comments: B rows.
"""
import functools
import math
import sys

import numpy

# ---------------------------------------------------------------- gone

ALSO_GONE = sys.maxsize

# ---------------------------------------------------------------- numbers

# two, and how it is written
TWO = 2
NAMES = {TWO: "two"}
# a comment of what is gone
GONE = math.pi
HALF = 7 / TWO


# a comment on its own

@functools.cache
def twice(x):
    """2 * x."""
    return numpy.multiply(TWO, x).item() if x in NAMES else TWO * x


if __name__ == "__main__":
    print(GONE)
''',
    "lib/__init__.py": '"""All of a folder."""\n',
    "lib/deep.py": '''
import math

from low import HALF

DEPTH = math.floor(HALF)


class Deep:
    sys = 3

    def __init__(self, math):
        self.math = math

    def triple(self):
        return self.sys * self.math
''',
}

EXPECTED = f'''
"""A script.

With more \\n in it.
"""
# Made by: python -m tools.single_file main > FILE.py

import functools
import math
from fractions import Fraction as Exact

import numpy


# {"=" * 64} low.py
# The lowest file. Letters in shape comments: B rows.


# ---------------------------------------------------------------- numbers

# two, and how it is written
TWO = 2
NAMES = {{TWO: "two"}}


HALF = 7 / TWO


# a comment on its own

@functools.cache
def twice(x):
    """2 * x."""
    return numpy.multiply(TWO, x).item() if x in NAMES else TWO * x


# {"=" * 64} lib/deep.py


DEPTH = math.floor(HALF)


class Deep:
    sys = 3

    def __init__(self, math):
        self.math = math

    def triple(self):
        return self.sys * self.math


# {"=" * 64} main.py


# ---------------------------------------------------------------- the run

def unused():
    """A script keeps all of its own."""


def main():
    os = Exact(twice(DEPTH), 3)         # a local variable: the module os is not needed
    print(os, Deep(5).triple())


if __name__ == "__main__":
    main()
'''


def project(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text.removeprefix("\n"), encoding="utf-8")
    return folder


def test_a_small_project_by_hand(tmp_path):
    text = single_file("main", project(tmp_path, PROJECT))
    assert text == EXPECTED.removeprefix("\n")
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone/file.py").write_text(text, encoding="utf-8")
    done = alone("file.py", cwd=tmp_path / "alone")
    assert done.stdout == "2 15\n", done.stderr         # 2 * floor(7 / 2) / 3


MAIN = "from a import one\nfrom b import two\n\n\ndef main():\n    return one() + two()\n"


@pytest.mark.parametrize("a, b, message", [
    ("def name(): pass\ndef one(): name()", "def name(): pass\ndef two(): name()", "a.py and b.py"),
    ("name = 1\ndef one(): name", "from json import name\ndef two(): name",
     "a.py and from json import name"),
    ("import json as name\ndef one(): name", "import math as name\ndef two(): name",
     "import json as name and import math as name"),
    ("def name(): pass\ndef one(): name()", "def two(): name()", "a.py and Python's own"),
    ("import os.name\ndef one(): os", "from sys import path as os\ndef two(): os",
     "import os and from sys import path as os")])
def test_a_name_that_means_two_things_is_refused(a, b, message, tmp_path):
    project(tmp_path, {"main.py": MAIN, "a.py": a, "b.py": b})
    name = "os" if "import os" in message else "name"
    with pytest.raises(ValueError) as error:
        single_file("main", tmp_path)
    assert str(error.value) == f"{name} means two things: {message}"


def test_what_is_left_out_local_or_one_thing_twice_is_no_collision(tmp_path):
    a = "import os.path\nimport json\nname = 1\ndef one(json): return os, json\n"
    b = "import os\nimport math as name\ndef two():\n    import json as os\n    name = os\n    return name\n"
    text = single_file("main", project(tmp_path, {"main.py": MAIN, "a.py": a, "b.py": b}))
    assert defined(text) == ["one", "two", "main"]
    assert [line for line in text.splitlines() if line.startswith("import ")] == ["import os.path"]


@pytest.mark.parametrize("a, message", [
    ("import b as other", "a.py:1: import b as other: must be `from MODULE import NAME` at the top level"),
    ("import b", "a.py:1: import b: must be"),
    ("from b import two as other", "a.py:1: from b import two as other: must be"),
    ("from b import *", "a.py:1: from b import *: must be"),
    ("from math import *", "a.py:1: from math import *: must be"),
    ("from . import b", "a.py:1: from . import b: must be"),
    ("def one():\n    from b import two", "a.py:2: from b import two: must be"),
    ("from b import nothing", "a.py: b.py does not define nothing"),
    ("print(1)", "a.py:1: must be a function, a class or NAME = VALUE"),
    ("if 1:\n    x = 2", "a.py:1: must be a function"),
    ("x, y = 1, 2", "a.py:1: must be a function")])
def test_what_cannot_be_followed_is_refused_by_place(a, message, tmp_path):
    with pytest.raises(ValueError) as error:
        single_file("main", project(tmp_path, {"main.py": MAIN, "a.py": a, "b.py": "def two(): pass"}))
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


# ---------------------------------------------------------------- the command

def command(*arguments, cwd):
    return subprocess.run([sys.executable, "-m", "tools.single_file", *arguments], cwd=cwd, timeout=60,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C",
                                                    "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_command_writes_to_stdout_from_any_folder_in_any_locale(script, tmp_path):
    done = command(script, cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == b""
    assert done.stdout.decode("utf-8") == single_file(script) and "°" in single_file(script)


def test_an_unknown_script_ends_with_status_2(tmp_path):
    done = command("ppo", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == b""
    assert done.stderr.count(b"error:") == 1 and b"'ppo'" in done.stderr


def test_a_refusal_is_one_line_and_status_2(monkeypatch, capsys):
    def refuse(script):
        raise ValueError("name means two things: a.py and b.py")

    monkeypatch.setattr("tools.single_file.single_file", refuse)
    with pytest.raises(SystemExit) as end:
        main(["grpo"])
    printed = capsys.readouterr()
    assert end.value.code == 2 and printed.out == ""
    assert printed.err == "tools.single_file: error: name means two things: a.py and b.py\n"
