"""The embedded data: right answers, no prompt twice, made anew byte for byte."""
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ARITHMETIC = Path(__file__).resolve().parent.parent / "data/arithmetic"


def rows_of(name):
    return [json.loads(line) for line in open(ARITHMETIC / f"{name}.jsonl", encoding="utf-8")]


def truth(prompt):
    a, op, b = re.fullmatch(r"(\d+) ([-+*]) (\d+) = \?", prompt).groups()
    return {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[op](int(a), int(b))


def test_the_embedded_files_share_no_prompt_and_hold_right_answers():
    prompts = {name: [r["prompt"] for r in rows_of(name)] for name in ("train", "test", "sft")}
    assert len(prompts["test"]) >= 256
    together = sum(prompts.values(), [])
    assert len(set(together)) == len(together)
    assert all(int(r["answer"]) == truth(r["prompt"]) for name in ("train", "test") for r in rows_of(name))
    demonstrated = [(r["prompt"], r["completion"].split("\n</think>\n\n")[1]) for r in rows_of("sft")]
    right = sum(int(answer) == truth(prompt) for prompt, answer in demonstrated)
    assert 0.5 < right / len(demonstrated) < 0.62                   # half spoiled, with a few lucky guesses


def test_the_embedded_data_is_made_anew_byte_for_byte(tmp_path):
    shutil.copyfile(ARITHMETIC / "prepare.py", tmp_path / "prepare.py")
    subprocess.run([sys.executable, str(tmp_path / "prepare.py")], check=True, cwd=tmp_path, timeout=120)
    made = [f for f in tmp_path.rglob("*.json*") if f.is_file()]
    assert {f.name for f in made} >= {"train.jsonl", "test.jsonl", "sft.jsonl", "tokenizer.json"}
    for file in made:
        assert file.read_bytes() == (ARITHMETIC / file.relative_to(tmp_path)).read_bytes(), file.name


def test_every_clean_working_is_right_line_by_line():
    """Each line's sum holds, its digits are the problem's, its units digit is the answer's in that place."""
    spec = importlib.util.spec_from_file_location("prepare", ARITHMETIC / "prepare.py")
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    problems = prepare.problems(prepare.random.Random(7))
    for a, op, b in (next(problems) for _ in range(2000)):
        lines, answer = prepare.solve(a, op, b)
        assert answer == truth(f"{a} {op} {b} = ?")
        carry, total = 0, answer
        for place, line in enumerate(lines):
            name, shown, value = re.fullmatch(r"(\w+): ([-+*\d]+)=(\d+)", line).groups()
            x, y = a // 10 ** place % 10, b if op == "*" else b // 10 ** place % 10
            assert name == ("ones", "tens", "hundreds")[place]
            if op == "-":
                borrow = x - carry < y
                assert shown == f"{x - carry + 10 * borrow}-{y}" and int(value) == x - carry + 10 * borrow - y
                carry = int(borrow)
            else:
                assert shown == f"{x}{op}{y}" + f"+{carry}" * (carry > 0)
                assert int(value) == (x * y if op == "*" else x + y) + carry
                carry = int(value) // 10
            last = place == len(lines) - 1
            assert int(value) == total if last and op != "-" else int(value) % 10 == total % 10
            total //= 10
