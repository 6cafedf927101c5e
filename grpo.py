"""GRPO (Group Relative Policy Optimization, arXiv 2402.03300) in one file.

    python grpo.py                                            # the embedded task, minutes on a CPU
    python grpo.py --model DIR --data FILE.jsonl --eval_data HELD_OUT.jsonl --learning_rate 1e-6    # yours
    torchrun --standalone --nproc_per_node=N grpo.py          # N processes, the gradient of one
    python grpo.py --help                                     # every option

One step:

    a batch of prompts -> num_generations completions each, with the log-prob of every sampled token (old)
    -> rewards, every term kept by name -> advantages inside each group -> reference log-probs (once)
    -> num_iterations passes, each of num_mini_batches optimizer steps: log-probs (new), KL, loss, backward in
       micro-batches, clipping of the gradient's norm, step
    -> the weights to sample from are brought up to date -> log, show samples, save

Left out on purpose: a value network (the group mean is the baseline); a mean over the batch's tokens (DAPO),
or a constant divisor and no std (Dr. GRPO): the loss below is the mean over a completion's tokens, then over
completions; filtering of groups that all got the same reward (advantage 0; zero_std_fraction counts them).

Letters in shape comments: B prompts of this process, G generations for each, N = B*G completions, R response
length, n the rows of a micro-batch, M their valid tokens.
"""
import torch

from reward import (TERM_NAMES, completion_texts, compute_rewards, evaluate, load_extra_terms, parse_weights,
                    reward_metrics)
from rollout import (generate, packed_batches, per_token_logps, rollout_policy, score_rollout,
                     update_rollout_policy)
from support import InputError
from support.chat import load_tokenizer
from support.checkpoint import load_checkpoint
from support.prompts import prompt_room, read_eval_prompts, read_prompts
from support.run import (OptionParser, Run, batch_of_step, fraction, non_negative, non_negative_int,
                         positive_float, positive_int, rng_for, run_script)

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
    return torch.expm1(k) - k       # exp(k) - 1 - k would round below 0 for small k


def token_loss(per_token_logps, old_per_token_logps, advantages, epsilon):
    """-min(ratio*A, clamp(ratio, 1-epsilon, 1+epsilon)*A) of each token, and where the clip cuts off its
    gradient (that of the KL still flows): A > 0 and ratio > 1+epsilon, or A < 0 and ratio < 1-epsilon.
    [N,R], [N,R], [N] -> [N,R], bool [N,R].
    """
    A, ratio = advantages[:, None], torch.exp(per_token_logps - old_per_token_logps)        # [N,1], [N,R]
    clipped_ratio = torch.clamp(ratio, 1 - epsilon, 1 + epsilon)
    is_clipped = ((A > 0) & (ratio > 1 + epsilon)) | ((A < 0) & (ratio < 1 - epsilon))
    return -torch.min(ratio * A, clipped_ratio * A), is_clipped


def grpo_loss(per_token_logps, old_per_token_logps, ref_per_token_logps, advantages, completion_mask, epsilon,
              beta):
    """-(min(ratio*A, clamp(ratio, 1-epsilon, 1+epsilon)*A) - beta*KL), averaged over each completion's valid
    tokens, then over completions.

    *_logps [N,R] (the reference may be None when beta is 0), advantages [N], completion_mask [N,R] -> scalar.
    """
    mask = completion_mask.bool()
    new = per_token_logps.masked_fill(~mask, 0.0)       # padding may hold anything, NaN too
    old = old_per_token_logps.masked_fill(~mask, 0.0)
    per_token_loss, _ = token_loss(new, old, advantages, epsilon)
    if beta > 0:
        per_token_loss = per_token_loss + beta * token_kl(new, ref_per_token_logps.masked_fill(~mask, 0.0))
    return ((per_token_loss * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()


@torch.no_grad()
def token_stats(new, old, ref, advantages, completion_mask, epsilon):
    """Ratio, KL (0 without a reference) and 1 where clipped, of the M valid tokens of n rows -> [3,M]."""
    ratio, (_, is_clipped) = torch.exp(new - old), token_loss(new, old, advantages, epsilon)
    kl = token_kl(new, ref) if ref is not None else torch.zeros_like(new)
    return torch.stack((ratio, kl, is_clipped.float()))[:, completion_mask]


# ---------------------------------------------------------------- options

def parse_args(argv=None):
    parser = OptionParser("grpo.py")
    add = parser.add_argument
    add("--model", default="data/arithmetic/base", help="checkpoint to start from, also the reference")
    add("--tokenizer", default="", help="tokenizer folder; '': the model's (a bare .pth has none)")
    add("--data", default="data/arithmetic/train.jsonl", help="training prompts, JSON Lines")
    add("--eval_data", default="data/arithmetic/test.jsonl", help="held-out prompts, answers; '' for none")
    add("--out_dir", default="", help="folder of the run; '' takes the next free out/grpo, out/grpo-2 ..")
    add("--resume", action="store_true", help="go on with the run in --out_dir")
    add("--overwrite", action="store_true", help="start anew in an --out_dir that holds a run")
    # the rollout
    add("--steps", type=positive_int, default=60, help="rollouts to train on")
    add("--batch_size", type=positive_int, default=32, help="prompts for each step, over all processes")
    add("--num_generations", type=int, default=8, help="completions for each prompt: the group")
    add("--max_new_tokens", type=positive_int, default=48, help="longest completion, in tokens")
    add("--max_prompt_length", type=positive_int, default=512, help="longer prompts are left out, in tokens")
    add("--temperature", type=positive_float, default=1.0, help="divides the logits, in sampler and scorer")
    add("--system", default="", help="system message for prompts that have none")
    add("--thinking_ratio", type=fraction, default=1.0, help="share of the prompts that open a think block")
    add("--reward_weights", default="answer=1,length=1,thinking=1,repetition=1",
        help="of the terms, 1 if left out; further ones are model and fn")
    add("--reward_model", default="", help="checkpoint of a sequence classifier with one score: term model")
    add("--reward_clip", type=positive_float, default=3.0, help="its score is clipped to +- this")
    add("--reward_fn", default="", help="FILE.py:FUNCTION of (messages, completion, answer): term fn")
    # the objective
    add("--epsilon", type=positive_float, default=0.2, help="the ratio is clipped to [1-epsilon, 1+epsilon]")
    add("--beta", type=non_negative, default=0.01, help="weight of the KL to the reference; 0 loads none")
    add("--num_iterations", type=positive_int, default=2, help="passes over each rollout (mu)")
    add("--num_mini_batches", type=positive_int, default=1, help="optimizer steps in each pass")
    add("--recompute_old", action="store_true", help="old log-probs by a forward pass, not as sampled")
    # the optimizer
    add("--learning_rate", type=positive_float, default=3e-4, help="peak; pretrained: try 1e-6")
    add("--lr_schedule", choices=("cosine", "constant"), default="cosine", help="cosine: to a tenth")
    add("--warmup_steps", type=non_negative_int, default=5, help="steps (rollouts) of linear warm-up")
    add("--weight_decay", type=non_negative, default=0.0, help="AdamW's")
    add("--grad_clip", type=positive_float, default=1.0, help="largest gradient norm")
    add("--micro_batch_tokens", type=positive_int, default=16384, help="tokens in a forward pass: memory")
    # the run
    add("--eval_interval", type=positive_int, default=20, help="steps between held-out measurements")
    add("--sample_interval", type=positive_int, default=10, help="steps between printed completions")
    add("--save_interval", type=positive_int, default=50, help="steps between checkpoints")
    add("--seed", type=int, default=0, help="of the data order and the sampling")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cuda:1, cpu")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto: bf16 if on CUDA")
    add("--compile", action="store_true", help="torch.compile the trained pass: a minute first, less memory")
    args = parser.parse_args(argv)
    if args.num_generations < 2:
        parser.error(f"--num_generations must be at least 2, not {args.num_generations}: one has no contrast")
    return args


# ---------------------------------------------------------------- the run

# of metrics.csv; further reward terms have theirs behind these
COLUMNS = ("step", "eval_accuracy", "reward", *(f"reward_{name}" for name in TERM_NAMES), "accuracy", "kl",
           "clip_fraction", "ratio_mean", "ratio_min", "ratio_max", "entropy", "completion_length",
           "truncated_fraction", "zero_std_fraction", "loss", "grad_norm", "skipped_updates", "learning_rate",
           "tokens_per_second", "seconds")
SHOWN = ("reward", "accuracy", "eval_accuracy", "kl", "clip_fraction", "completion_length")


def main(argv=None):
    args = parse_args(argv)
    run, G = Run("grpo", args), args.num_generations
    if (N := args.batch_size // run.world * G) % args.num_mini_batches:
        raise InputError(f"--num_mini_batches {args.num_mini_batches} must divide the {N} completions of a "
                         f"process")

    # rewards, policy, data, reference, optimizer
    extra_terms = load_extra_terms(args.reward_model, args.reward_fn, args.reward_clip, run.device, run.dtype,
                                   args.micro_batch_tokens)       # {name: function of prompts, texts}
    weights = parse_weights(args.reward_weights, (*TERM_NAMES, *extra_terms))
    tokenizer = load_tokenizer(args.tokenizer or args.model)
    policy = load_checkpoint(args.model).to(run.device).eval()      # dropout would make new differ from old
    longest = min(args.max_prompt_length, prompt_room(policy.config, args.max_new_tokens))
    reading = tokenizer, longest, policy.config.vocab_size, args.system, args.thinking_ratio
    train, left_out = read_prompts(args.data, *reading)
    held_out = read_eval_prompts(args.eval_data, *reading)
    reference = (rollout_policy(load_checkpoint(args.model).to(run.device), run.dtype).eval()
                 if args.beta > 0 else None)            # the policy's start, never trained
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, betas=(0.9, 0.95),
                                  weight_decay=args.weight_decay, fused=run.device.type == "cuda")

    # a new run, or the state of an old one; then two more views of the policy: to sample, and to train
    columns = (*COLUMNS, *(f"reward_{name}" for name in extra_terms))
    start_step = run.begin(policy, optimizer, columns, tokenizer.folder, (
        f"{len(train)} prompts of {args.data} ({left_out} too long, {sum(p.answer is None for p in train)} "
        f"without an answer), {len(held_out)} held out of {args.eval_data or '-'}; {args.steps} steps of "
        f"{args.batch_size} x {G}"))
    sampler = rollout_policy(policy, run.dtype)     # in fp32 the policy itself, in bf16 a copy of its weights
    forward = run.wrap(policy)                      # the policy under DDP and torch.compile, where asked for
    scoring = args.temperature, args.micro_batch_tokens

    def measure():
        with run.autocast():
            return evaluate(sampler, tokenizer, held_out, max_new_tokens=args.max_new_tokens, temperature=1.0,
                            seed=args.seed, rank=run.rank, world=run.world)

    run.before_training(measure() if held_out and not run.eval_scores else "")  # a resumed run has its scores
    for step in range(start_step + 1, args.steps + 1):
        run.begin_step(step)

        # a batch of prompts, and a uniform number for each token to sample: drawn alike, then shared out
        batch = [train[i] for i in batch_of_step(step, args.batch_size, len(train), args.seed)]
        noise = torch.rand(len(batch) * G, args.max_new_tokens, dtype=torch.float64,
                           generator=rng_for(args.seed, step, "sampling"))
        batch, noise = run.share(batch), run.share(noise)

        # rollout: N completions, with the log-prob of each token as it was sampled
        with run.autocast():
            rollout = generate(sampler, [p.ids for p in batch], G, args.max_new_tokens, tokenizer.eos_ids,
                               tokenizer.pad_id, args.temperature, noise=noise)
        mask = rollout.completion_mask                                                      # [N,R]

        # rewards: every term by name, and their weighted sum
        texts, prompts = completion_texts(tokenizer, rollout), [p for p in batch for _ in range(G)]
        extra = {name: term(prompts, texts) for name, term in extra_terms.items()}
        rewards, terms = compute_rewards(texts, [p.answer for p in prompts], [p.text for p in prompts],
                                         weights, extra)                                    # [N], on the CPU

        # advantages inside each group
        advantages = group_advantages(rewards, G).to(run.device)                            # [N]

        # old and reference log-probs, once for each rollout and without gradient
        with run.autocast():
            old = score_rollout(policy, rollout, *scoring) if args.recompute_old else rollout.per_token_logps
            ref = score_rollout(reference, rollout, *scoring) if reference is not None else None    # [N,R]

        # num_iterations passes: policy log-probs (new) -> KL -> loss -> backward -> clip -> optimizer step
        stats, losses, grad_norms = [], [], []      # of each micro-batch; of each optimizer step
        for iteration in range(args.num_iterations):
            order = torch.randperm(len(mask), generator=rng_for(args.seed, step, "mini-batches", iteration))
            for mini_batch in order.view(args.num_mini_batches, -1).tolist():
                optimizer.zero_grad(set_to_none=True)
                losses.append(0.0)
                micro_batches = packed_batches(rollout, mini_batch, args.micro_batch_tokens)
                for rows in micro_batches:
                    run.sync_next_backward(rows is micro_batches[-1])   # processes: once for each step
                    with run.autocast():            # aux_loss: of a mixture of experts, else 0
                        new, aux_loss = per_token_logps(forward, *rollout.take(rows), args.temperature,
                                                        return_aux_loss=True)               # [n,R]
                    constants = (old[rows], ref[rows] if ref is not None else None, advantages[rows],
                                 mask[rows], args.epsilon)           # no gradient flows into these
                    loss = aux_loss + grpo_loss(new, *constants, args.beta)
                    # a mean over the mini-batch's rows, in parts: their len(rows) / len(mini_batch) sum to 1
                    (loss * len(rows) / len(mini_batch)).backward()
                    losses[-1] += loss.item() * len(rows) / len(mini_batch)
                    stats.append(token_stats(new, *constants))
                grad_norms.append(torch.nn.utils.clip_grad_norm_(policy.parameters(), args.grad_clip).item())
                if run.all_finite(step, losses[-1], grad_norms[-1]):    # else skipped by all, and counted
                    optimizer.step()

        # the weights to sample from are brought up to date
        update_rollout_policy(sampler, policy)

        # log, show samples, save
        ratio, kl, is_clipped = torch.cat(stats, dim=1)         # of every valid token, in every pass
        metrics = run.average({     # over processes: a mean; the extremes; of tokens a mean over all tokens
            **reward_metrics(rewards, terms, G), **rollout.metrics(), "ratio_min": ratio.min().item(),
            "ratio_max": ratio.max().item(), "loss": sum(losses) / len(losses),
            "grad_norm": sum(grad_norms) / len(grad_norms)},
            tokens=mask.sum().item(), token_means={
                "kl": kl.mean().item(), "clip_fraction": is_clipped.mean().item(),
                "ratio_mean": ratio.mean().item(),
                "entropy": -rollout.per_token_logps[mask].mean().item()})   # an estimate, from the samples
        metrics["eval_accuracy"] = measure() if held_out and run.due(step, args.eval_interval) else ""
        run.log(step, metrics, SHOWN, [     # the first group's best and worst completion
            {"prompt": prompts[i].text, "completion": texts[i], **terms[i], "reward": rewards[i].item(),
             "advantage": advantages[i].item()} for i in (rewards[:G].argmax(), rewards[:G].argmin())])
        run.save_if_due(step)
    run.finish(f"{len(held_out)} prompts, one sample each at temperature 1" if held_out else "")


if __name__ == "__main__":
    run_script(main, "grpo.py", parse_args)
