"""Sums and products of two digits, as questions to an instruct model: writes train.jsonl and test.jsonl here.

    python data/digits/prepare.py

100 sums and 100 products; a fifth of each is held out. Every held-out question stands eight times in
test.jsonl, so that an evaluation of one sample a row measures each with eight samples.
"""
import json
import random
from pathlib import Path


def main():
    folder, rng, train, test = Path(__file__).parent, random.Random(0), [], []
    for sign in "+*":
        pairs = [(a, b) for a in range(10) for b in range(10)]
        rng.shuffle(pairs)
        rows = []
        for a, b in pairs:
            result = a + b if sign == "+" else a * b
            rows.append({"prompt": f"What is {a} {sign} {b}? Answer with only the number.",
                         "answer": str(result),
                         "completion": f"{a} {sign} {b} = {result}"})       # for distill.py
        train, test = train + rows[20:], test + rows[:20] * 8
    for name, rows in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(train)} training questions, {len(test)} held-out rows in {folder}")


if __name__ == "__main__":
    main()
