"""Make the embedded default task: two- and three-digit arithmetic with the working shown.

    python data/arithmetic/prepare.py            # train.jsonl, test.jsonl, sft.jsonl and base/'s tokenizer

Everything is a function of the seed below: run it again and the files are the same byte for byte. The weights
in base/ are made from sft.jsonl by

    python distill.py --alpha 1 ...             # the exact command stands in the README

Why reinforcement learning has something to do here: half of the demonstrations are spoiled, so base/ knows
how to calculate but often does not. HASTY of them skip the working and guess; SLIP of them make one mistake
in the working and carry it through. Rewarding right answers brings out the careful mode, and the completions
grow longer as it does.
"""
import itertools
import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 20240601
SFT_ROWS, TRAIN_ROWS, TEST_ROWS = 16000, 4000, 512
HASTY, SLIP = 0.30, 0.20
VOCAB_SIZE = 320
PLACES = ("ones", "tens", "hundreds", "thousands")
HERE = Path(__file__).resolve().parent

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}
{{- '<think>\\n' }}
{%- endif %}
{%- endif %}"""


def digits(n):
    """Digits of n, ones first."""
    return [int(d) for d in reversed(str(n))]


def solve(a, op, b, slip_at=None, rng=None):
    """Work a problem by columns -> (lines of working, answer), with one false result at `slip_at`."""
    lines, result, carry = [], 0, 0
    columns = digits(a)
    other = digits(b) if op != "*" else [b] * len(columns)
    columns += [0] * (len(other) - len(columns))
    other += [0] * (len(columns) - len(other))
    for place, (x, y) in enumerate(zip(columns, other)):
        if op == "-":
            x -= carry
            carry = int(x < y)
            shown, value = f"{x + 10 * carry}-{y}", x + 10 * carry - y
        else:
            shown = f"{x}{op}{y}" + (f"+{carry}" if carry else "")
            value = (x * y if op == "*" else x + y) + carry
        if place == slip_at:
            value = max(0, value + rng.choice((-2, -1, 1, 2)))
        lines.append(f"{PLACES[place]}: {shown}={value}")
        last = place == len(columns) - 1
        result += (value if last or op == "-" else value % 10) * 10 ** place
        if op != "-":
            carry = value // 10
    return lines, result


def demonstration(a, op, b, rng):
    """A completion as the model should write it, behind "<think>\\n", or one spoiled on purpose."""
    lines, answer = solve(a, op, b)
    fate = rng.random()
    if fate < HASTY:
        lines = ["I just see it."]
        answer = max(0, answer + rng.choice((-1, 1)) * rng.choice((0, 1, 2, 3, 10, 20, 100)))
    elif fate < HASTY + SLIP:
        lines, answer = solve(a, op, b, rng.randrange(len(lines)), rng)
    return "\n".join(lines) + f"\n</think>\n\n{answer}"


def problems(rng):
    """Distinct problems without end: a third each of +, -, *."""
    seen = set()
    while True:
        op = rng.choice("+-*")
        a, b = (rng.randrange(10, rng.choice((100, 1000))) for _ in range(2))
        if op == "-" and a < b:
            a, b = b, a
        if op == "*":
            b = rng.randrange(2, 10)
        if (a, op, b) not in seen:
            seen.add((a, op, b))
            yield a, op, b


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_tokenizer(texts, folder):
    """Byte-level BPE with single digits; MiniMind's ids for the ChatML tokens (pad 0, start 1, end 2)."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False,
                                                                                use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False))
    # The trainer marks all five as special; the think tags must survive decoding, so they are plain added
    # tokens.
    state = json.loads(tokenizer.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in tokens[:3]
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(state, indent=1, ensure_ascii=False) + "\n",
                                           encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tokens[1], "eos_token": tokens[2],
              "pad_token": tokens[0], "unk_token": tokens[0], "clean_up_tokenization_spaces": False,
              "model_max_length": 1024, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n", encoding="utf-8")


def main():
    rng = random.Random(SEED)
    rows = [{"prompt": f"{a} {op} {b} = ?", "answer": str(solve(a, op, b)[1]),
             "completion": demonstration(a, op, b, rng)}
            for a, op, b in itertools.islice(problems(rng), SFT_ROWS + TRAIN_ROWS + TEST_ROWS)]
    sft, rest = rows[:SFT_ROWS], rows[SFT_ROWS:]        # the three files share no problem
    write_jsonl(HERE / "sft.jsonl", [{"prompt": r["prompt"], "completion": r["completion"]} for r in sft])
    prompts = [{"prompt": r["prompt"], "answer": r["answer"]} for r in rest]
    write_jsonl(HERE / "train.jsonl", prompts[:TRAIN_ROWS])
    write_jsonl(HERE / "test.jsonl", prompts[TRAIN_ROWS:])
    make_tokenizer([f"user\n{r['prompt']}\nassistant\n\n\n{r['completion'].replace('</think>', '')}"
                    for r in sft],
                   HERE / "base")


if __name__ == "__main__":
    main()
