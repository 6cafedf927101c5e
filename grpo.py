"""GRPO (Group Relative Policy Optimization, arXiv 2402.03300) in one file.

    python grpo.py                                            # the embedded task, minutes on a CPU
    python grpo.py --model DIR --data FILE.jsonl --eval_data HELD_OUT.jsonl --learning_rate 1e-6    # yours
    torchrun --standalone --nproc_per_node=N grpo.py          # N processes, the same gradient
    python grpo.py --help                                     # every option

One step:

    a batch of prompts -> num_generations completions each, with the log-prob of every sampled token (old)
    -> rewards, every term kept by name -> advantages inside each group -> reference log-probs (once)
    -> num_iterations passes: log-probs (new), KL, loss, backward, clip, optimizer step
    -> rollout weights brought up to date

Left out on purpose: a value network (the group mean is the baseline), token-level normalisation over the
batch (Dr. GRPO, DAPO: the loss below is the mean over a completion's tokens, then over completions), and
filtering of groups that all got the same reward (their advantage is 0; zero_std_fraction counts them).

Letters in shape comments: B prompts, G generations for each, N = B*G completions, R response length.
"""
import argparse
import math
import time
from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from model import (InputError, catch_signals, init_distributed, load_checkpoint, load_run, metrics_over_ranks,
                   over_ranks, run_script, save_run)
from reward import TERMS, completion_texts, compute_rewards, evaluate, load_scorers, parse_weights
from rollout import (RunLog, batch_of_step, generate, load_tokenizer, packed_batches, per_token_logps,
                     read_prompts, rollout_policy, run_dir, score_rollout, step_generator,
                     update_rollout_policy)

# ---------------------------------------------------------------- the math

def group_advantages(rewards, num_generations):
    """(r - mean) / (std + 1e-4) inside each group of consecutive rows, population std: rewards [N] -> [N].

    In fp64: the mean of equal numbers is then that number, and a group without contrast gives exactly 0. In
    fp32 rounding noise would remain, and Adam scales any gradient, however small, to a full step.
    """
    grouped = rewards.double().view(-1, num_generations)                            # [B,G]
    mean, std = grouped.mean(dim=1, keepdim=True), grouped.std(dim=1, unbiased=False, keepdim=True)
    return ((grouped - mean) / (std + 1e-4)).view(-1).float()       # [N]


def token_kl(per_token_logps, ref_per_token_logps):
    """KL(policy || reference) of each token [N,R], never negative: exp(k) - k - 1 with k = ref - new (the k3
    estimate).
    """
    k = ref_per_token_logps - per_token_logps
    return torch.expm1(k) - k       # expm1: exp(k) - 1 rounds to less than k for small k


def grpo_loss(per_token_logps, old_per_token_logps, ref_per_token_logps, advantages, completion_mask, epsilon,
              beta):
    """-(min(ratio*A, clamp(ratio, 1-epsilon, 1+epsilon)*A) - beta*KL), averaged over each completion's valid
    tokens, then over completions.

    *_logps [N,R] (the reference may be None when beta is 0), advantages [N], completion_mask [N,R] -> scalar.
    The gradient is cut where the clip binds: A > 0 and ratio > 1+epsilon, or A < 0 and ratio < 1-epsilon.
    """
    mask = completion_mask.bool()
    new = per_token_logps.masked_fill(~mask, 0.0)       # padding may hold anything, NaN too
    old = old_per_token_logps.masked_fill(~mask, 0.0)
    ratio = torch.exp(new - old)
    clipped_ratio = torch.clamp(ratio, 1 - epsilon, 1 + epsilon)
    per_token_loss = -torch.min(ratio * advantages[:, None], clipped_ratio * advantages[:, None])
    if beta > 0:
        per_token_loss = per_token_loss + beta * token_kl(new, ref_per_token_logps.masked_fill(~mask, 0.0))
    return ((per_token_loss * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()


def clipped_tokens(ratio, advantages, epsilon):
    """Where the clip cuts the gradient off: ratio [N,R], advantages [N,1] -> bool [N,R]."""
    return ((advantages > 0) & (ratio > 1 + epsilon)) | ((advantages < 0) & (ratio < 1 - epsilon))


# ---------------------------------------------------------------- options

def parse_args(argv=None):
    parser = argparse.ArgumentParser("grpo.py", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model", default="data/arithmetic/base", help="checkpoint to start from, also the reference")
    add("--tokenizer", default="", help="tokenizer folder; '': the model's (a bare .pth has none)")
    add("--data", default="data/arithmetic/train.jsonl", help="training prompts, JSON Lines")
    add("--eval_data", default="data/arithmetic/test.jsonl", help="held-out prompts, answers; '' for none")
    add("--out_dir", default="", help="folder of the run; '' takes the next free out/grpo, out/grpo-2 ..")
    add("--resume", action="store_true", help="go on with the run in --out_dir")
    add("--overwrite", action="store_true", help="start anew in an --out_dir that holds a run")
    # the rollout
    add("--steps", type=int, default=60, help="rollouts to train on")
    add("--batch_size", type=int, default=32, help="prompts for each step, over all processes")
    add("--num_generations", type=int, default=8, help="completions for each prompt: the group")
    add("--max_new_tokens", type=int, default=48, help="longest completion, in tokens")
    add("--max_prompt_length", type=int, default=512, help="longer prompts are left out, in tokens")
    add("--temperature", type=float, default=1.0, help="divides the logits, in the sampler and in the scorer")
    add("--system", default="", help="system message for prompts that have none")
    add("--thinking_ratio", type=float, default=1.0, help="share of the prompts that open a think block")
    add("--reward_weights", default="answer=1,length=1,thinking=1,repetition=1",
        help="of the terms, 1 if left out; further ones are model and fn")
    add("--reward_model", default="", help="checkpoint of a sequence classifier with one score: term model")
    add("--reward_clip", type=float, default=3.0, help="its score is clipped to +- this")
    add("--reward_fn", default="", help="FILE.py:FUNCTION of (messages, completion, answer): term fn")
    # the objective
    add("--epsilon", type=float, default=0.2, help="the ratio is clipped to [1-epsilon, 1+epsilon]")
    add("--beta", type=float, default=0.01, help="weight of the KL to the reference; 0 loads no reference")
    add("--num_iterations", type=int, default=2, help="passes over each rollout (mu); with 1 the ratio is 1")
    add("--num_mini_batches", type=int, default=1, help="optimizer steps in each pass")
    add("--recompute_old", action="store_true", help="old log-probs from the scorer, not from the sampler")
    # the optimizer
    add("--learning_rate", type=float, default=3e-4, help="peak; for a pretrained checkpoint try 1e-6")
    add("--lr_schedule", choices=("cosine", "constant"), default="cosine", help="cosine: to a tenth")
    add("--warmup_steps", type=int, default=5, help="steps of linear warm-up")
    add("--weight_decay", type=float, default=0.0, help="AdamW's")
    add("--grad_clip", type=float, default=1.0, help="largest gradient norm")
    add("--micro_batch_tokens", type=int, default=16384, help="tokens in one backward pass: the memory knob")
    # the run
    add("--eval_interval", type=int, default=20, help="steps between measurements on the held-out prompts")
    add("--sample_interval", type=int, default=10, help="steps between printed completions")
    add("--save_interval", type=int, default=50, help="steps between checkpoints")
    add("--seed", type=int, default=0, help="of the data order and the sampling")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cuda:1, cpu")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto: bf16 if on CUDA")
    add("--compile", action="store_true", help="torch.compile the trained pass: a minute first, less memory")
    args = parser.parse_args(argv)
    if args.resume and args.overwrite:
        parser.error("--resume and --overwrite exclude each other")
    for name in ("steps", "batch_size", "max_new_tokens", "max_prompt_length", "num_iterations",
                 "num_mini_batches", "learning_rate", "temperature", "grad_clip", "micro_batch_tokens",
                 "eval_interval", "sample_interval", "save_interval", "reward_clip", "epsilon"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} must be positive, not {getattr(args, name)}")
    for name in ("beta", "weight_decay", "warmup_steps"):
        if not 0 <= getattr(args, name) < math.inf:
            parser.error(f"--{name} must not be negative, not {getattr(args, name)}")
    if args.num_generations < 2:
        parser.error(f"--num_generations must be at least 2, not {args.num_generations}: one has no contrast")
    if not 0 <= args.thinking_ratio <= 1:
        parser.error(f"--thinking_ratio must lie in [0, 1], not {args.thinking_ratio}")
    return args


def learning_rate_at(step, args):
    """Linear warm-up, then constant or a cosine down to a tenth of the peak at the last step."""
    warmup = min(1.0, step / args.warmup_steps) if args.warmup_steps else 1.0
    fall = 0.1 + 0.45 * (1 + math.cos(math.pi * step / args.steps)) if args.lr_schedule == "cosine" else 1.0
    return args.learning_rate * warmup * fall


# ---------------------------------------------------------------- the run

COLUMNS = ("step", "eval_accuracy", "reward", *(f"reward_{name}" for name in TERMS), "accuracy", "kl",
           "clip_fraction", "ratio_mean", "ratio_min", "ratio_max", "entropy", "completion_length",
           "truncated_fraction", "zero_std_fraction", "loss", "grad_norm", "skipped_updates", "learning_rate",
           "tokens_per_second", "seconds")


def main(argv=None):
    args = parse_args(argv)
    rank, world, device = init_distributed(args.device)
    if args.batch_size % world:
        raise InputError(f"--batch_size {args.batch_size} must be a multiple of the {world} processes")
    G = args.num_generations
    if args.batch_size // world * G % args.num_mini_batches:
        raise InputError(f"--num_mini_batches {args.num_mini_batches} must divide the "
                         f"{args.batch_size // world * G} completions of a process")
    dtype = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32,
             "bfloat16": torch.bfloat16, "float32": torch.float32}[args.dtype]

    def autocast():    # one precision path for old, new and reference; master weights and optimizer stay fp32
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)

    # rewards, data, policy, reference, optimizer
    scorers = load_scorers(args.reward_model, args.reward_fn, args.reward_clip, device, dtype,
                           args.micro_batch_tokens)
    names = (*TERMS, *scorers)
    weights = parse_weights(args.reward_weights, names)
    tokenizer_dir = args.tokenizer or args.model
    chat = load_tokenizer(tokenizer_dir)
    policy = load_checkpoint(args.model).to(device).eval()   # no dropout: new would differ from old
    config = policy.config
    longest_prompt = min(args.max_prompt_length, config.max_position_embeddings - args.max_new_tokens)
    if longest_prompt < 1:
        raise InputError(f"--max_new_tokens {args.max_new_tokens} leaves no room for a prompt: the model's "
                         f"max_position_embeddings is {config.max_position_embeddings}")
    train, left_out = read_prompts(args.data, chat, longest_prompt, config.vocab_size, args.system,
                                   args.thinking_ratio)
    test = read_prompts(args.eval_data, chat, longest_prompt, config.vocab_size, args.system,
                        args.thinking_ratio)[0] if args.eval_data else []
    if any(p.answer is None for p in test):
        raise InputError(f"{args.eval_data}: every held-out row needs an answer")
    reference = None
    if args.beta > 0:
        reference = rollout_policy(load_checkpoint(args.model).to(device), dtype)
        reference.eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95),
                                  weight_decay=args.weight_decay, fused=device.type == "cuda")

    # a new run, or the state of an old one
    first, held_out = 0, {}
    if args.resume and args.out_dir:
        first, held_out = load_run(args.out_dir, "grpo", policy, optimizer, args)
    num_params = sum(p.numel() for p in policy.parameters())
    if rank == 0:       # on disk: 16 bytes a parameter in state and checkpoint, the old ones and the new
        log = RunLog(run_dir(args.out_dir, "grpo", args.resume, args.overwrite, 32 * num_params),
                     (*COLUMNS, *(f"reward_{name}" for name in scorers)), args.steps, first)
        no_answer = sum(p.answer is None for p in train)
        print(f"{num_params / 1e6:.2f}M parameters on {device}, {dtype}; {len(train)} prompts of {args.data} "
              f"({left_out} too long, {no_answer} without an answer), {len(test)} held out of "
              f"{args.eval_data or '-'}; {args.steps} steps of {args.batch_size} x {G}; in {log.out_dir}")
    sampler, ddp = rollout_policy(policy, dtype), policy
    if world > 1:       # every forward that is trained goes through the wrapper: it averages the gradients
        ddp = DistributedDataParallel(policy, [device.index] if device.type == "cuda" else None)
    forward = torch.compile(ddp, dynamic=True) if args.compile else ddp
    caught, bad_updates = catch_signals(), 0

    def eval_accuracy():
        with autocast():
            return evaluate(sampler, chat, test, args.max_new_tokens, 1.0, args.seed, rank, world)

    if test and "before" not in held_out:
        held_out["before"] = held_out["best"] = eval_accuracy()
        if rank == 0:
            print(f"held-out accuracy before training: {held_out['before']:.3f}", flush=True)
    if rank == 0 and first == 0:
        log.row({"step": 0, "eval_accuracy": held_out.get("before", "")})
    for step in range(first + 1, args.steps + 1):
        tic = time.time()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, args)

        # rollout: this process's share of the batch, N completions with the log-probs they were sampled with
        batch = [train[i] for i in batch_of_step(step, args.batch_size, len(train), args.seed)]
        share = len(batch) // world
        noise = torch.rand(len(batch) * G, args.max_new_tokens, dtype=torch.float64,
                           generator=step_generator(args.seed, step))
        batch, noise = batch[rank * share:][:share], noise[rank * share * G:][:share * G]
        with autocast():
            rollout = generate(sampler, [p.ids for p in batch], G, args.max_new_tokens, chat.eos_ids,
                               chat.pad_id, args.temperature, noise=noise)
        mask = rollout.completion_mask                                                  # [N,R]

        # rewards and group advantages
        texts, prompts = completion_texts(chat, rollout), [p for p in batch for _ in range(G)]
        further = {name: score(prompts, texts) for name, score in scorers.items()}
        rewards, terms = compute_rewards(texts, [p.answer for p in prompts], [p.text for p in prompts],
                                         weights, further)
        advantages = group_advantages(rewards, G).to(device)                            # [N]

        # old and reference log-probs, once for each rollout
        with autocast():
            old, ref = rollout.per_token_logps, None                                    # [N,R]
            if args.recompute_old:
                old = score_rollout(policy, rollout, args.temperature, args.micro_batch_tokens)
            if reference is not None:
                ref = score_rollout(reference, rollout, args.temperature, args.micro_batch_tokens)

        # num_iterations passes; a mini-batch's gradient is the sum over micro-batches, weighted by their rows
        ratios, kls, clipped, losses, grad_norms, skipped = [], [], [], [], [], 0
        for iteration in range(args.num_iterations):
            generator = step_generator(args.seed, step, stream=3 + iteration)
            order = torch.randperm(len(mask), generator=generator)
            for mini in order.view(args.num_mini_batches, -1).tolist():
                optimizer.zero_grad(set_to_none=True)
                losses.append(0.0)
                micro = packed_batches(rollout, mini, args.micro_batch_tokens)
                for m, rows in enumerate(micro):
                    # processes exchange gradients once, in the last micro-batch
                    with ddp.no_sync() if world > 1 and m + 1 < len(micro) else nullcontext():
                        with autocast():
                            new, aux_loss = per_token_logps(forward, [rollout.prompts[i] for i in rows],
                                                            rollout.completion_ids[rows], mask[rows],
                                                            args.temperature, return_aux_loss=True)
                        loss = aux_loss + grpo_loss(new, old[rows], None if ref is None else ref[rows],
                                                    advantages[rows], mask[rows],
                                                    args.epsilon, args.beta)
                        (loss * len(rows) / len(mini)).backward()
                    with torch.no_grad():
                        ratio, kept = torch.exp(new - old[rows]), mask[rows]
                        bound = clipped_tokens(ratio, advantages[rows, None], args.epsilon)
                        ratios.append(ratio[kept])
                        clipped.append(bound[kept].float())
                        kls.append(token_kl(new, ref[rows])[kept] if ref is not None else 0 * ratio[kept])
                        losses[-1] += loss.item() * len(rows) / len(mini)
                grad_norms.append(torch.nn.utils.clip_grad_norm_(policy.parameters(), args.grad_clip).item())
                if math.isfinite(over_ranks([losses[-1] + grad_norms[-1]])[0]):
                    optimizer.step()
                    bad_updates = 0
                else:           # weights are never touched by a NaN
                    skipped, bad_updates = skipped + 1, bad_updates + 1
                    if bad_updates == 10:
                        raise InputError(f"step {step}: ten updates in a row had a loss or gradient that is "
                                         f"not finite; try a lower --learning_rate or --dtype float32")
        update_rollout_policy(sampler, policy)

        # measure, log, show samples, save
        last, ratio = step == args.steps, torch.cat(ratios)
        stop = max(over_ranks([caught[0] if caught else 0], "MAX"))
        here = world * mask.sum().item() / over_ranks([mask.sum().item()])[0]   # token means weigh by tokens
        metrics = metrics_over_ranks({
            "step": step, "reward": rewards.mean().item(),
            **{f"reward_{name}": sum(t[name] for t in terms) / len(terms) for name in names},
            "accuracy": sum(t["answer"] for t in terms) / len(terms),
            "kl": here * torch.cat(kls).mean().item(),
            "clip_fraction": here * torch.cat(clipped).mean().item(),
            "ratio_mean": here * ratio.mean().item(), "ratio_min": ratio.min().item(),
            "ratio_max": ratio.max().item(),
            "entropy": -here * rollout.per_token_logps[mask].mean().item(),
            "completion_length": mask.sum(dim=1).float().mean().item(),
            "truncated_fraction": 1 - rollout.finished.float().mean().item(),
            "zero_std_fraction": (rewards.view(-1, G).std(dim=1) < 1e-6).float().mean().item(),
            "loss": sum(losses) / len(losses), "grad_norm": sum(grad_norms) / len(grad_norms),
            "skipped_updates": skipped, "learning_rate": learning_rate_at(step, args),
            "tokens_per_second": world * mask.sum().item() / (time.time() - tic)})
        metrics["eval_accuracy"] = ""
        if test and (last or step % args.eval_interval == 0):
            metrics["eval_accuracy"] = eval_accuracy()
            held_out["best"] = max(held_out["best"], metrics["eval_accuracy"])
        if rank == 0:
            log.row(metrics)
            log.line(metrics, ("reward", "accuracy", "eval_accuracy", "kl", "clip_fraction",
                               "completion_length"))
            if last or step % args.sample_interval == 0:
                log.samples([{"step": step, "prompt": prompts[i].text, "completion": texts[i], **terms[i],
                              "reward": rewards[i].item(), "advantage": advantages[i].item()}
                             for i in (rewards[:G].argmax().item(), rewards[:G].argmin().item())])
            if last or stop or step % args.save_interval == 0:
                save_run(log.out_dir, "grpo", policy, optimizer, step, held_out, tokenizer_dir, args)
        if stop and not last:
            if rank == 0:
                print(f"stopped after step {step}; go on with the same options and --resume --out_dir "
                      f"{log.out_dir}", flush=True)
            raise SystemExit(128 + int(stop))
    if rank == 0:
        if first >= args.steps:     # nothing was left to do but what a kill between two files left undone
            save_run(log.out_dir, "grpo", policy, optimizer, first, held_out, tokenizer_dir, args)
        elif test:
            after = metrics["eval_accuracy"]
            print(f"held-out accuracy {held_out['before']:.3f} -> {after:.3f}, best {held_out['best']:.3f} "
                  f"({len(test)} prompts, one sample each at temperature 1)")
        print(f"checkpoint in {log.out_dir / 'checkpoint'}")


if __name__ == "__main__":
    run_script(main, "grpo.py", parse_args)
