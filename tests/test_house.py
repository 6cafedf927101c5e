"""What the house promises of itself: who imports whom, how long a file is, that the lowest two run alone."""
import ast
import io
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the bottom up: each file, and what it may import beside the standard library.
MAY_IMPORT = {
    "model.py": {"torch"},
    "rollout.py": {"torch", "model"},
    "support/__init__.py": set(),
    "support/answers.py": set(),
    "support/chat.py": {"tokenizers", "jinja2", "support"},
    "support/prompts.py": {"support", "support.chat"},
    "support/checkpoint.py": {"torch", "safetensors", "model", "support"},
    "support/run.py": {"torch", "safetensors", "support", "support.checkpoint"},
    "reward.py": {"torch", "rollout", "support", "support.answers", "support.chat", "support.prompts",
                  "support.checkpoint", "support.run"},
}
SCRIPTS = ["grpo.py", "cispo.py", "distill.py"]


def module_of(file):
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MAY_IMPORT |= dict.fromkeys(SCRIPTS, set().union(*MAY_IMPORT.values(), map(module_of, MAY_IMPORT)))
OURS = {module_of(file): file for file in MAY_IMPORT}


def imports_of(file):
    """Every module that a file imports, wherever the import stands: ours in full, others by their package."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports by their whole name"
            deeper = [f"{node.module}.{alias.name}" for alias in node.names]    # from support import chat
            names = [name if name in OURS else node.module for name in deeper]
        found |= {name if name in OURS else name.split(".")[0] for name in names}
    return found - sys.stdlib_module_names


@pytest.mark.parametrize("file", MAY_IMPORT)
def test_a_file_imports_only_what_stands_below_it(file):
    assert imports_of(file) <= MAY_IMPORT[file]


def test_the_table_names_every_file_and_has_no_circle():
    assert {path.name for path in ROOT.glob("*.py")} == {
        "model.py", "rollout.py", "reward.py", "grpo.py", "cispo.py", "distill.py", "test_losses.py"}
    assert {f"support/{path.name}" for path in (ROOT / "support").rglob("*.py")} == {
        file for file in MAY_IMPORT if file.startswith("support/")}
    below = []
    for file in MAY_IMPORT:         # each imports, of ours, only what stands above it in the table
        assert imports_of(file) & OURS.keys() <= set(below), file
        below += [module_of(file)] if file not in SCRIPTS else []


def lines_of(file):
    return (ROOT / file).read_text(encoding="utf-8").removesuffix("\n").split("\n")


@pytest.mark.parametrize("files, most", [
    ("grpo.py", 290), ("cispo.py", 290), ("distill.py", 380), ("model.py", 400), ("rollout.py", 300),
    ("reward.py", 240), ("test_losses.py", 480), ("support/answers.py", 120),
    ("support/chat.py support/prompts.py support/answers.py", 600)])
def test_a_file_is_read_in_one_sitting(files, most):
    assert sum(len(lines_of(file)) for file in files.split()) <= most


@pytest.mark.parametrize("file", SCRIPTS)
def test_main_is_read_without_a_break(file):
    functions = ast.parse("\n".join(lines_of(file))).body
    main = next(f for f in functions if isinstance(f, ast.FunctionDef) and f.name == "main")
    assert main.end_lineno - main.lineno + 1 <= 110


EVERYWHERE = ("*.py", "support/**/*.py", "tests/**/*.py", "tools/**/*.py", "data/**/*.py")
PYTHON = sorted(path.relative_to(ROOT).as_posix() for where in EVERYWHERE for path in ROOT.glob(where))


@pytest.mark.parametrize("file", PYTHON)
def test_a_line_fits_the_screen_and_holds_one_statement(file):
    lines = lines_of(file)
    assert [n for n, line in enumerate(lines, 1) if len(line) > 110] == []      # characters, not bytes
    text = "\n".join(lines) + "\n"
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    assert [t.start[0] for t in tokens if t.type == tokenize.OP and t.string == ";"] == []
    for node in ast.walk(ast.parse(text)):
        for body in (getattr(node, name, []) for name in ("body", "orelse", "finalbody")):
            numbers = [statement.lineno for statement in body] if isinstance(body, list) else []
            assert len(numbers) == len(set(numbers)), f"{file}: {numbers}"


# ---------------------------------------------------------------- files that stand alone

ALONE = """
import sys
sys.path.insert(0, "")
for name in %(forbidden)r:
    sys.modules[name] = None            # whoever imports it gets an ImportError
import torch
from model import KVCache, MiniMind, MiniMindConfig
import model
assert model.__file__.startswith(%(folder)r), model.__file__
try:
    MiniMindConfig(num_attention_heads=4, num_key_value_heads=3)
    raise SystemExit("a bad config was taken")
except ValueError as e:
    assert "num_key_value_heads 3" in str(e)
torch.manual_seed(0)
tiny = MiniMind(MiniMindConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                               num_key_value_heads=2, use_moe=True)).eval()
ids = torch.arange(12).view(2, 6)
with torch.no_grad():
    logits, cache = tiny(ids), KVCache(2, 6)
    cached = torch.cat([tiny(piece, cache=cache) for piece in ids.split([4, 1, 1], dim=1)], dim=1)
assert logits.shape == (2, 6, 61) and torch.allclose(cached, logits, atol=1e-5)
"""

WITH_ROLLOUT = """
import rollout
assert rollout.__file__.startswith(%(folder)r), rollout.__file__
generator = torch.Generator().manual_seed(1)
r = rollout.generate(tiny, [[5, 6, 7], [8]], 3, 9, [2, 3, 4], generator=generator)
assert len(r.completion_ids) == 6
scores = rollout.per_token_logps(tiny, r.prompts, r.completion_ids, r.completion_mask)
assert torch.allclose(scores, r.per_token_logps, atol=1e-5) and (scores[r.completion_mask] < 0).all()
"""


@pytest.mark.parametrize("files, code", [
    (["model.py"], ALONE), (["model.py", "rollout.py"], ALONE + WITH_ROLLOUT)], ids=["model", "both"])
def test_the_lowest_files_run_alone_in_an_empty_folder(files, code, tmp_path):
    """Isolated (-I: neither this project nor PYTHONPATH is seen), and with nothing but torch to import."""
    for file in files:
        shutil.copy(ROOT / file, tmp_path)
    ours = {path.stem for path in ROOT.glob("*.py")} | {"support", "tools"}
    forbidden = sorted(ours - {file.removesuffix(".py") for file in files}) + [
        "safetensors", "tokenizers", "jinja2", "transformers"]
    code %= {"forbidden": forbidden, "folder": str(tmp_path)}
    done = subprocess.run([sys.executable, "-I", "-c", code + "print('done')"], cwd=tmp_path, text=True,
                          capture_output=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr
