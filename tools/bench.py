"""Speed and memory of the rollout, the update, a distillation step and a whole step, beside what a user would
otherwise run: transformers' generate (hf), TRL's GRPOTrainer (trl), a checkout of MiniMind (minimind:PATH).

    python -m tools.bench rollout --peers hf,minimind:../minimind
    python -m tools.bench update --peers minimind:../minimind
    python -m tools.bench step --peers trl
    python -m tools.bench distill --peers minimind:../minimind
    python -m tools.bench growth --peers hf
    python -m tools.bench gpu --dtype bfloat16 --repeats 2 --peers hf,trl       # on one CUDA card

Random weights of equal sizes, the same prompts, completion lengths, sampling law (temperature 1, no top-k or
top-p) and number of threads for all; contestants take turns (A B A B ...), medians are shown with the
spread. Seconds of the processor are steadier than those on the clock where a machine is shared: ratios use
them, except on a GPU. "limit" is the share of what this machine reaches in a matrix product or, where that
takes longer, in reading the weights and the cache.
"""
import argparse
import contextlib
import ctypes
import importlib.util
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from distill import chunked_distillation_sums, pad_right
from grpo import group_advantages, grpo_loss
from model import MiniMind, MiniMindConfig
from rollout import (Rollout, generate, micro_batches, packed_batches, per_token_logps, rollout_policy,
                     score_rollout, update_rollout_policy)

# ---------------------------------------------------------------- measuring

def parse_args(argv=None):
    parser = argparse.ArgumentParser("tools.bench", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("what", choices=list(BENCHES), nargs="?", default="rollout")
    add("--peers", default="", help="hf, trl, minimind:PATH, with commas between")
    add("--repeats", type=int, default=5, help="turns of each contestant, after one that warms up")
    add("--hidden_size", type=int, default=512, help="of the policy")
    add("--num_layers", type=int, default=8, help="of the policy")
    add("--num_heads", type=int, default=8, help="of the policy")
    add("--num_kv_heads", type=int, default=4, help="of the policy")
    add("--head_dim", type=int, default=0, help="0: hidden_size / num_heads")
    add("--intermediate_size", type=int, default=0, help="0: pi times hidden_size, as MiniMind has it")
    add("--vocab_size", type=int, default=6400, help="of the policy")
    add("--batch_size", type=int, default=8, help="prompts, of 16 to 64 tokens")
    add("--num_generations", type=int, default=8, help="completions for each prompt")
    add("--max_new_tokens", type=int, default=128, help="completions end spread from an eighth of it")
    add("--micro_batch_tokens", type=int, default=2048, help="tokens in one backward pass")
    add("--beta", type=float, default=0.01, help="0: no reference in update and step")
    add("--threads", type=int, default=1, help="of the processor, for all contestants")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="bf16 is autocast for training")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cpu")
    add("--compile", action="store_true", help="torch.compile the policy of the update")
    add("--json", default="", help="write all figures to this file")
    return parser.parse_args(argv)


def synchronize(args):
    if args.device != "cpu":
        torch.cuda.synchronize()


def resident(peak=False):
    """Resident memory of this process in MiB, now or at its highest since `forget_peak`."""
    with open("/proc/self/status") as f:
        lines = dict(line.split(":", 1) for line in f if line.startswith(("VmHWM", "VmRSS")))
    return int(lines["VmHWM" if peak else "VmRSS"].split()[0]) / 1024


def forget_peak(args):
    """Start to watch the highest memory anew -> MiB in use now."""
    if args.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2 ** 20
    ctypes.CDLL("libc.so.6").malloc_trim(0)         # else memory that was freed counts as in use
    with open("/proc/self/clear_refs", "w") as f:
        f.write("5")
    return resident()


def peak(args):
    return torch.cuda.max_memory_allocated() / 2 ** 20 if args.device != "cpu" else resident(peak=True)


def no_turns():
    """What the turns of a contestant are noted in: seconds, and MiB above the start."""
    return {"cpu": [], "wall": [], "peak": []}


def start_turn(args):
    before = forget_peak(args)
    synchronize(args)
    return before, time.process_time(), time.perf_counter()


def end_turn(started, result, args, warms_up):
    """Note what passed since start_turn; a turn that warms up is not noted."""
    synchronize(args)
    before, cpu, wall = started
    if not warms_up:
        result["cpu"].append(time.process_time() - cpu)
        result["wall"].append(time.perf_counter() - wall)
        result["peak"].append(peak(args) - before)


def take_turns(contestants, args):
    """{name: function} -> {name: its turns, as in no_turns}."""
    results = {name: no_turns() for name in contestants}
    for turn in range(args.repeats + 1):
        for name, run in contestants.items():
            started = start_turn(args)
            run()
            end_turn(started, results[name], args, warms_up=turn == 0)
    return results


def machine_limits(args):
    """(floating point operations per second in a large matrix product, bytes per second read from memory)."""
    dtype, size = getattr(torch, args.dtype), 2048 if args.device == "cpu" else 8192
    a, b = (torch.randn(size, size, device=args.device).to(dtype) for _ in range(2))
    big = torch.randn(2 ** 26, device=args.device)          # 256 MiB: beyond every cache

    clock = time.process_time if args.device == "cpu" else time.perf_counter

    def best(run, times=5):
        seconds = []
        for _ in range(times):
            synchronize(args)
            start = clock()
            run()
            synchronize(args)
            seconds.append(clock() - start)
        return min(seconds)

    return 2 * size ** 3 / best(lambda: a @ b) * args.threads, big.numel() * 4 / best(lambda: big.sum())


def table(title, results, tokens, limit_seconds, args):
    """Print a row for each contestant, ours first. `tokens` are useful ones, padding does not count."""
    clock = "cpu" if args.device == "cpu" else "wall"
    ours = statistics.median(next(iter(results.values()))[clock])
    print(f"\n{title}, {args.dtype}, {args.threads} thread(s), {args.device}")
    print(f"{'':28s} {'tokens/s':>9s} {'cpu s':>7s} {'wall s':>7s} {'spread':>7s} {'peak MiB':>9s} "
          f"{'limit':>6s} {'ours is':>8s}")
    for name, r in results.items():
        mid = {k: statistics.median(v) for k, v in r.items()}
        spread = (max(r[clock]) - min(r[clock])) / mid[clock]
        r.update(tokens=tokens, ratio=mid[clock] / ours, limit=limit_seconds / mid[clock])
        print(f"{name:28s} {tokens / mid[clock]:9.0f} {mid['cpu']:7.2f} {mid['wall']:7.2f} {spread:6.0%} "
              f"{mid['peak']:9.0f} {r['limit']:6.0%} {r['ratio']:7.2f}x", flush=True)
    return {"title": title, "results": results}


# ---------------------------------------------------------------- the work, the same for all

def make_config(args, hidden_size=None):
    return MiniMindConfig(
        vocab_size=args.vocab_size, hidden_size=hidden_size or args.hidden_size,
        num_hidden_layers=args.num_layers, num_attention_heads=args.num_heads,
        num_key_value_heads=args.num_kv_heads, head_dim=args.head_dim,
        intermediate_size=args.intermediate_size)       # 0: the config's own rule


def make_model(args, hidden_size=None):
    """A MiniMind with random weights, the same at every call."""
    torch.manual_seed(0)
    return MiniMind(make_config(args, hidden_size)).to(args.device).eval()


def make_reference(args):
    """The frozen copy that beta asks for, or None."""
    return (rollout_policy(make_model(args), getattr(torch, args.dtype)).requires_grad_(False) if args.beta
            else None)


def make_optimizer(model, args):
    return torch.optim.AdamW(model.parameters(), lr=1e-6, fused=args.device != "cpu")


def hf_model(ours, args):
    import transformers
    c = ours.config
    config = transformers.Qwen3Config(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim, intermediate_size=c.intermediate_size, rms_norm_eps=c.rms_norm_eps,
        max_position_embeddings=c.max_position_embeddings, tie_word_embeddings=True, bos_token_id=1,
        eos_token_id=0, pad_token_id=2, rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta})
    hf = transformers.Qwen3ForCausalLM(config)
    hf.load_state_dict(ours.state_dict())
    return hf.to(args.device).eval()


def minimind_model(ours, path, args):
    where = Path(path) / "model" / "model_minimind.py"
    spec = importlib.util.spec_from_file_location("model_minimind", where)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    c = ours.config
    theirs = module.MiniMindForCausalLM(module.MiniMindConfig(
        hidden_size=c.hidden_size, num_hidden_layers=c.num_hidden_layers, vocab_size=c.vocab_size,
        num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim, intermediate_size=c.intermediate_size))
    theirs.load_state_dict(ours.state_dict(), strict=False)
    return theirs.to(args.device).eval()


def make_prompts(args):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, args.vocab_size, (n,), generator=generator).tolist()
            for n in torch.linspace(16, 64, args.batch_size).long().tolist()]


def make_lengths(args):
    """Completion lengths of the N rows, spread evenly, in an order that mixes them."""
    N, R = args.batch_size * args.num_generations, args.max_new_tokens
    lengths = torch.linspace(max(1, R // 8), R, N).round().long()
    return lengths[torch.randperm(N, generator=torch.Generator().manual_seed(2))].tolist()


def ending_noise(lengths, args):
    """Noise that makes generate sample token 0, its end of turn, at each row's length and nowhere else: the
    inverse CDF of 0 is token 0, and that of anything beyond its probability is another.
    """
    noise = 0.01 + 0.99 * torch.rand(len(lengths), args.max_new_tokens, dtype=torch.float64,
                                     generator=torch.Generator().manual_seed(3))
    noise[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = 0
    return noise


def left_padded(prompts, num_generations, args):
    P = max(map(len, prompts))
    ids = torch.tensor([[2] * (P - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (P - len(p)) + [1] * len(p) for p in prompts])
    return tuple(x.repeat_interleave(num_generations, 0).to(args.device) for x in (ids, mask))


def made_rollout(args):
    """Random completions of the given lengths, as a rollout to update on."""
    prompts, lengths = make_prompts(args), make_lengths(args)
    R = max(lengths)
    mask = torch.arange(R) < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, args.vocab_size, mask.shape, generator=torch.Generator().manual_seed(4))
    return Rollout([p for p in prompts for _ in range(args.num_generations)], ids.to(args.device),
                   mask.to(args.device), torch.full(mask.shape, -8.0, device=args.device),
                   torch.ones(len(lengths), dtype=torch.bool))


def autocast(args):
    return torch.autocast(args.device.split(":")[0], torch.bfloat16, enabled=args.dtype == "bfloat16")


def flops(model, passes, tokens, scored):
    """Of so many forward passes (a backward pass counts as two): every linear weight multiplies and adds once
    for each of `tokens`, but the head only for those that are `scored`.
    """
    head = model.lm_head.weight.numel()
    body = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear)) - head
    return 2 * passes * (body * tokens + head * scored)


# ---------------------------------------------------------------- rollout

def bench_rollout(args, limits):
    model, prompts, lengths = make_model(args), make_prompts(args), make_lengths(args)
    noise, G = ending_noise(lengths, args), args.num_generations
    sampler = rollout_policy(model, getattr(torch, args.dtype))

    def ours():
        with autocast(args):
            rollout = generate(sampler, prompts, G, args.max_new_tokens, [0], 2, noise=noise)
        assert rollout.completion_mask.sum(dim=1).tolist() == lengths

    contestants = {"ours, with log-probs": ours}
    for peer in args.peers:
        ids, mask = left_padded(prompts, G, args)
        if peer == "hf":
            contestants.update(hf_rollouts(model, ids, mask, lengths, args))
        elif peer.startswith("minimind:"):
            theirs = minimind_model(model, peer[9:], args).to(getattr(torch, args.dtype))

            @torch.no_grad()
            def minimind():         # its engine: generate, then the log-probs by a second forward, row by row
                out = theirs.generate(input_ids=ids, attention_mask=mask, max_new_tokens=args.max_new_tokens,
                                      temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None)
                out, R = out.clone(), args.max_new_tokens
                logits = theirs(out, logits_to_keep=R + 1).logits[:, :-1]
                torch.stack([x.log_softmax(dim=-1).gather(1, y[:, None])
                             for x, y in zip(logits, out[:, -R:])])

            contestants["MiniMind's engine"] = minimind
    tokens = sum(lengths)
    work = flops(model, 1, tokens + sum(map(len, prompts)), tokens)
    weights = sum(p.numel() for p in model.parameters()) * (2 if args.dtype == "bfloat16" else 4)
    c = model.config
    cache = 8 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * sum(
        n * (len(p) + n / 2) for p, n in zip([p for p in prompts for _ in range(G)], lengths))
    limit = max(work / limits[0], (args.max_new_tokens * weights + cache) / limits[1])
    return table(f"rollout, {len(prompts)} x {G} completions of {min(lengths)}..{max(lengths)} tokens",
                 take_turns(contestants, args), tokens, limit, args)


def hf_rollouts(model, ids, mask, lengths, args):
    hf, ends = hf_model(model, args).to(getattr(torch, args.dtype)), torch.tensor(lengths, device=args.device)
    hf.generation_config.eos_token_id = None

    def at_length(input_ids, scores, **kwargs):         # ends each row where ours ends
        return input_ids.shape[1] - ids.shape[1] >= ends

    @torch.no_grad()
    def generate_only():
        return hf.generate(ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                           max_new_tokens=args.max_new_tokens, stopping_criteria=[at_length], pad_token_id=2)

    @torch.no_grad()
    def with_logps():
        out = generate_only()
        R = out.shape[1] - ids.shape[1]
        full = F.pad(mask, (0, R), value=1)
        positions = (full.cumsum(1) - 1).clamp(min=0)
        logits = hf(out, attention_mask=full, position_ids=positions, logits_to_keep=R + 1).logits[:, :-1]
        logits.float().log_softmax(dim=-1).gather(2, out[:, -R:, None])

    return {"transformers, no log-probs": generate_only, "transformers, and log-probs": with_logps}


# ---------------------------------------------------------------- update

def our_update(model, reference, rollout, advantages, optimizer, args):
    """One optimizer step of grpo.py on a rollout."""
    N, mask, ref = len(advantages), rollout.completion_mask, None
    if reference is not None:
        with autocast(args):
            ref = score_rollout(reference, rollout, 1.0, args.micro_batch_tokens)
    optimizer.zero_grad(set_to_none=True)
    for rows in packed_batches(rollout, range(N), args.micro_batch_tokens):
        with autocast(args):
            new = per_token_logps(model, [rollout.prompts[i] for i in rows], rollout.completion_ids[rows],
                                  mask[rows])
        loss = grpo_loss(new, rollout.per_token_logps[rows], None if ref is None else ref[rows],
                         advantages[rows], mask[rows], 0.2, args.beta)
        (loss * len(rows) / N).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def minimind_update(model, reference, ids, prompt_length, mask, real, old, advantages, optimizer, beta):
    """The same with MiniMind's model, laid out as its trainer does: all rows and all logits at once."""
    def logps(m):
        logits = m(ids, attention_mask=real).logits[:, :-1]
        return F.log_softmax(logits, dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)[:, prompt_length - 1:]

    new, ref = logps(model), None
    if reference is not None:
        with torch.no_grad():
            ref = logps(reference)
    optimizer.zero_grad(set_to_none=True)
    grpo_loss(new, old, ref, advantages, mask, 0.2, beta).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def bench_update(args, limits):
    rollout, model, reference = made_rollout(args), make_model(args), make_reference(args)
    generator = torch.Generator().manual_seed(5)
    advantages = group_advantages(torch.rand(len(rollout.prompts), generator=generator),
                                  args.num_generations).to(args.device)
    optimizer = make_optimizer(model, args)
    policy = torch.compile(model, dynamic=True) if args.compile else model
    contestants = {"ours": lambda: our_update(policy, reference, rollout, advantages, optimizer, args)}
    for peer in args.peers:
        if peer.startswith("minimind:"):
            theirs = minimind_model(model, peer[9:], args).train()
            their_reference = None
            if args.beta:
                their_reference = minimind_model(model, peer[9:], args).requires_grad_(False)
            their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-6)
            ids, real = left_padded(rollout.prompts, 1, args)
            P, mask = ids.shape[1], rollout.completion_mask
            ids = torch.cat((ids, rollout.completion_ids.masked_fill(~mask, 2)), dim=1)
            real = torch.cat((real, mask.long()), dim=1)
            contestants["MiniMind's step"] = lambda: minimind_update(
                theirs, their_reference, ids, P, mask, real, rollout.per_token_logps, advantages,
                their_optimizer, args.beta)
    scored = rollout.completion_mask.sum().item()
    prompt_tokens = sum(map(len, rollout.prompts[::args.num_generations]))
    # forward, backward, and the reference's forward
    work = flops(model, 3 + bool(args.beta), scored + prompt_tokens, scored)
    return table(f"update on {len(rollout.prompts)} rows, {scored} completion tokens, vocabulary "
                 f"{args.vocab_size}, beta {args.beta}", take_turns(contestants, args), scored,
                 work / limits[0], args)


# ---------------------------------------------------------------- a distillation step

def bench_distill(args, limits):
    """32 conversations of up to 340 tokens, student 512 x 8, teacher 768 x 8; a third is the prompt."""
    student, teacher = make_model(args), make_model(args, args.hidden_size * 3 // 2)
    frozen = rollout_policy(teacher, getattr(torch, args.dtype)).requires_grad_(False)
    generator, tables = torch.Generator().manual_seed(6), []
    for title, shortest in (("all of 340 tokens", 340), ("of 85..340 tokens", 85)):
        rows = []
        for n in torch.linspace(shortest, 340, 32).long().tolist():
            ids = torch.randint(3, args.vocab_size, (n,), generator=generator).tolist()
            rows.append((ids, [-100] * (n // 3) + ids[n // 3:]))
        optimizer = make_optimizer(student, args)
        count = sum(label != -100 for _, labels in rows for label in labels[1:])

        def ours():
            optimizer.zero_grad(set_to_none=True)
            for part in micro_batches([len(ids) for ids, _ in rows], args.micro_batch_tokens):
                ids, labels, mask = pad_right([rows[i] for i in part], args.device)
                trained = labels[:, 1:] != -100
                with autocast(args):
                    with torch.no_grad():
                        t, _ = frozen(ids, mask, right_padded=True, return_hidden=True)
                    s, _ = student(ids, mask, right_padded=True, return_hidden=True)
                    ce, kl = chunked_distillation_sums(
                        s[:, :-1][trained], student.lm_head.weight, t[:, :-1][trained], frozen.lm_head.weight,
                        labels[:, 1:][trained], 2.0, "forward", 0.5)
                ((0.5 * ce + 0.5 * kl) / count).backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()

        contestants = {"ours": ours}
        for peer in args.peers:
            if peer.startswith("minimind:"):
                small, large = (minimind_model(m, peer[9:], args) for m in (student, teacher))
                large.requires_grad_(False)
                small_optimizer = torch.optim.AdamW(small.parameters(), lr=1e-6)
                ids, labels, _ = pad_right(rows, args.device)
                shifted, V = labels[:, 1:].reshape(-1), args.vocab_size

                def minimind():         # as its trainer: all logits of both models, then the masked ones
                    with torch.no_grad():
                        their_teacher = large(ids).logits[:, :-1].reshape(-1, V)
                    logits = small(ids).logits[:, :-1].reshape(-1, V)
                    trained = shifted != -100
                    ce = F.cross_entropy(logits, shifted, ignore_index=-100)
                    probs = F.softmax(their_teacher[trained] / 2.0, dim=-1)
                    kl = F.kl_div(F.log_softmax(logits[trained] / 2.0, dim=-1), probs, reduction="batchmean")
                    small_optimizer.zero_grad(set_to_none=True)
                    (0.5 * ce + 0.5 * 4.0 * kl).backward()
                    torch.nn.utils.clip_grad_norm_(small.parameters(), 1.0)
                    small_optimizer.step()

                contestants["MiniMind's step"] = minimind
        tokens = sum(len(ids) for ids, _ in rows)
        work = flops(student, 3, tokens, count) + flops(teacher, 1, tokens, count)
        tables.append(table(f"distillation step, 32 rows {title}", take_turns(contestants, args), tokens,
                            work / limits[0], args))
    return tables


# ---------------------------------------------------------------- a whole step

def bench_step(args, limits):
    """Rollout and one update; all completions have max_new_tokens: TRL's lengths cannot be prescribed."""
    model, prompts, G = make_model(args), make_prompts(args), args.num_generations
    reference, optimizer = make_reference(args), make_optimizer(model, args)
    sampler = rollout_policy(model, getattr(torch, args.dtype))
    lengths = [args.max_new_tokens] * (len(prompts) * G)
    noise = ending_noise(lengths, args)

    def ours():
        with autocast(args):
            rollout = generate(sampler, prompts, G, args.max_new_tokens, [0], 2, noise=noise)
        rewards = torch.tensor([float(i % 7) for i in range(len(lengths))])
        advantages = group_advantages(rewards, G).to(args.device)
        our_update(model, reference, rollout, advantages, optimizer, args)
        update_rollout_policy(sampler, model)

    if "trl" in args.peers:
        results = {"ours": no_turns(), "TRL's GRPOTrainer": no_turns()}
        trl_steps(model, prompts, ours, results, args)
    else:
        results = take_turns({"ours": ours}, args)
    tokens = sum(lengths)       # rollout, forward, backward, and the reference's forward
    work = flops(model, 4 + bool(args.beta), tokens + sum(map(len, prompts)), tokens)
    return table(f"whole step, {len(prompts)} x {G} completions of {args.max_new_tokens} tokens, beta "
                 f"{args.beta}", results, tokens, work / limits[0], args)


def trl_steps(model, prompts, ours, results, args):
    """Let TRL train; before each of its steps ours takes its turn."""
    import tempfile

    import datasets
    import tokenizers
    import transformers
    import trl

    words = {f"w{i}": i for i in range(args.vocab_size)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w3"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w0", pad_token="w2")
    texts = [" ".join(f"w{i}" for i in p) for p in prompts]

    class Turns(transformers.TrainerCallback):
        def on_step_begin(self, trainer_args, state, control, **kwargs):
            started = start_turn(args)
            ours()
            end_turn(started, results["ours"], args, warms_up=state.global_step == 0)
            self.started = start_turn(args)

        def on_step_end(self, trainer_args, state, control, **kwargs):      # global_step has grown
            end_turn(self.started, results["TRL's GRPOTrainer"], args, warms_up=state.global_step == 1)

    with tempfile.TemporaryDirectory() as folder:
        hf_model(model, args).save_pretrained(folder + "/model")    # TRL reads its reference from there too
        config = trl.GRPOConfig(
            output_dir=folder, per_device_train_batch_size=len(prompts) * args.num_generations,
            num_generations=args.num_generations, max_completion_length=args.max_new_tokens, beta=args.beta,
            temperature=1.0, top_p=1.0, top_k=0, num_iterations=1, max_steps=args.repeats + 1, report_to=[],
            model_init_kwargs={"dtype": "float32"},
            save_strategy="no", logging_strategy="no", gradient_checkpointing=False, learning_rate=1e-6,
            bf16=args.dtype == "bfloat16", use_cpu=args.device == "cpu", disable_tqdm=True, loss_type="grpo")
        trainer = trl.GRPOTrainer(
            model=folder + "/model", processing_class=tokenizer, args=config, callbacks=[Turns()],
            reward_funcs=lambda completions, **kwargs: [float(i % 7) for i in range(len(completions))],
            train_dataset=datasets.Dataset.from_dict({"prompt": texts * (args.repeats + 1)}))
        trainer.train()


# ---------------------------------------------------------------- several of these

def changed(args, **changes):
    return argparse.Namespace(**{**vars(args), **changes})


def bench_growth(args, limits):
    """How tokens/s and memory grow: with the group, the length of the completions, the vocabulary."""
    tables = [bench_rollout(changed(args, num_generations=G), limits) for G in (1, 2, 4, 8, 16, 32)]
    for R in (64, 128, 256, 512, 1024) + (2048,) * (args.device != "cpu"):
        tables.append(bench_rollout(changed(args, max_new_tokens=R, num_generations=2), limits))
    for V in (6400, 49152, 151936):
        tables.append(bench_update(changed(args, vocab_size=V, batch_size=1), limits))
    return tables


def bench_gpu(args, limits):
    """Rollout and whole step of MiniMind 64M on 64 x 16 completions; an update of Qwen3 0.6B."""
    large = changed(args, hidden_size=768, batch_size=64, num_generations=16, max_new_tokens=512,
                    micro_batch_tokens=65536)
    qwen = changed(args, hidden_size=1024, num_layers=28, num_heads=16, num_kv_heads=8, head_dim=128,
                   intermediate_size=3072, vocab_size=151936, max_new_tokens=512, micro_batch_tokens=16384)
    return [bench_rollout(large, limits), bench_step(large, limits), bench_update(qwen, limits)]


BENCHES = {"rollout": bench_rollout, "update": bench_update, "distill": bench_distill, "step": bench_step,
           "growth": bench_growth, "gpu": bench_gpu}


def main(argv=None):
    args = parse_args(argv)
    args.peers = [p for p in args.peers.split(",") if p]
    torch.set_num_threads(args.threads)
    with contextlib.suppress(ImportError):
        import transformers
        transformers.logging.set_verbosity_error()
    limits = machine_limits(args)
    print(f"this machine: {limits[0] / 1e9:.0f} GFLOP/s in a matrix product, {limits[1] / 1e9:.1f} GB/s read")
    tables = BENCHES[args.what](args, limits)
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"options": vars(args), "limits": limits, "tables": tables}, f, indent=1)


if __name__ == "__main__":
    main()
