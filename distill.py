"""Knowledge distillation of a language model (white box: the teacher's whole distribution), in one file.

    python distill.py                               # the embedded teacher into a student a third of its size
    python distill.py --alpha 1 --data FILE.jsonl   # labels alone: supervised fine-tuning, no teacher is read
    python distill.py --on_policy_fraction 1        # the teacher grades what the student itself writes
    python distill.py --help                        # every option

One step:

    a batch of conversations, or of prompts that the student completes itself
    -> student logits and, without gradients, teacher logits, only where a label is trained
    -> alpha * CE(labels) + (1 - alpha) * T^2 * KL(teacher || student), mean over the step's trained tokens
    -> backward, clip, optimizer step

Sources: the loss is Hinton et al. (arXiv 1503.02531); on-policy data, reverse KL and JSD are GKD's (arXiv
2306.13649).

Letters in shape comments: B conversations, T tokens, M trained tokens, m those of a chunk, C and C' hidden
size of student and teacher, V and V' their vocabularies.
"""
import math
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import MiniMind, MiniMindConfig
from reward import completion_texts, compute_rewards, evaluate
from rollout import generate, logits_chunk, micro_batches, rollout_policy, update_rollout_policy
from support import InputError
from support.chat import load_tokenizer
from support.checkpoint import load_checkpoint
from support.prompts import prompt_room, read_eval_prompts, read_rows
from support.run import (OptionParser, Run, all_reduce, batch_of_step, fraction, non_negative,
                         non_negative_int, positive_float, positive_int, rng_for, run_script)

# ---------------------------------------------------------------- the math

def token_divergence(student_logits, teacher_logits, temperature, divergence="forward", jsd_weight=0.5):
    """T^2 * D(teacher, student) for each token: [M,V] and [M,V'] -> [M], V' >= V.

    forward KL(teacher || student), reverse KL(student || teacher), or the generalised Jensen-Shannon
    divergence w KL(teacher || mix) + (1-w) KL(student || mix), mix = w teacher + (1-w) student. A wider
    teacher is cut to the student's width before the softmax: the surplus rows pad one and the same tokenizer.
    T^2 keeps the gradient's size independent of T.
    """
    V = student_logits.shape[-1]
    if teacher_logits.shape[-1] < V:
        raise InputError(f"the teacher's vocabulary ({teacher_logits.shape[-1]}) is narrower than the "
                         f"student's ({V})")
    student = F.log_softmax(student_logits.float() / temperature, dim=-1)           # [M,V]
    teacher = F.log_softmax(teacher_logits[..., :V].float() / temperature, dim=-1)

    def kl(p, q):       # KL(p || q) of log-probabilities
        return (p.exp() * (p - q)).sum(dim=-1)

    if divergence == "forward":
        value = kl(teacher, student)
    elif divergence == "reverse":
        value = kl(student, teacher)
    else:
        w = torch.tensor(jsd_weight, device=student.device)
        mix = torch.logaddexp(teacher + w.log(), student + (1 - w).log())
        value = w * kl(teacher, mix) + (1 - w) * kl(student, mix)
    return temperature ** 2 * value


def distillation_loss(student_logits, teacher_logits, labels, alpha, temperature, divergence="forward",
                      jsd_weight=0.5):
    """alpha * CE + (1 - alpha) * T^2 * KL, means over the trained tokens -> (loss, ce, kl), scalars.

    student_logits [B,T,V], teacher_logits [B,T,V'] or None (then kl is 0), labels [B,T] unshifted, -100 where
    not trained: the logits at position t are asked for the label at t+1. kl includes T^2. All masked: zeros.
    """
    labels = labels[:, 1:]
    trained = labels != -100                                                        # [B,T-1]
    logits, tokens = student_logits[:, :-1][trained].float(), max(1, int(trained.sum()))    # [M,V]
    ce = F.cross_entropy(logits, labels[trained], reduction="sum") / tokens
    kl = ce.new_zeros(())
    if teacher_logits is not None:
        teacher = teacher_logits[:, :-1][trained].detach()
        kl = token_divergence(logits, teacher, temperature, divergence, jsd_weight).sum() / tokens
    return alpha * ce + (1 - alpha) * kl, ce, kl


def chunked_distillation_sums(hidden, head, teacher_hidden, teacher_head, targets, temperature, divergence,
                              jsd_weight):
    """(sum of CE, sum of T^2*KL) over M trained tokens, without ever holding [M,V] in fp32.

    hidden [M,C], head [V,C], the teacher's [M,C'] and [V',C'] or None, targets [M]. Each chunk's logits are
    made from the heads' inputs and made again in the backward pass. Equal to distillation_loss, up to the
    division by M.
    """
    def sums(h, t, y):
        logits = F.linear(h, head).float()                                          # [m,V]
        ce = F.cross_entropy(logits, y, reduction="sum")
        if t is None:
            return ce, ce.new_zeros(())
        with torch.no_grad():
            teacher_logits = F.linear(t, teacher_head)                              # [m,V']
        return ce, token_divergence(logits, teacher_logits, temperature, divergence, jsd_weight).sum()

    size = logits_chunk(head)
    if len(targets) <= size:
        return sums(hidden, teacher_hidden, targets)
    hs, ys = hidden.split(size), targets.split(size)
    ts = teacher_hidden.split(size) if teacher_hidden is not None else [None] * len(hs)
    parts = [checkpoint(sums, h, t, y, use_reentrant=False) for h, t, y in zip(hs, ts, ys)]
    return sum(ce for ce, _ in parts), sum(kl for _, kl in parts)


# ---------------------------------------------------------------- data

def complete_by_student(student, tokenizer, rows, max_new_tokens, temperature, noise):
    """The student's own completions of the rows' prompts (all before the last trained turn) -> rows again."""
    prompts = []
    for ids, labels in rows:
        last = max(i for i, label in enumerate(labels) if label != -100)
        start = max((i for i in range(last) if labels[i] == -100), default=-1) + 1
        prompts.append(ids[:start])
    rollout = generate(student, prompts, 1, max_new_tokens, tokenizer.eos_ids, tokenizer.pad_id,
                       temperature, noise=noise)
    lengths = rollout.completion_mask.sum(dim=1).tolist()
    written = [ids[:n] for ids, n in zip(rollout.completion_ids.tolist(), lengths)]
    return [(p + w, [-100] * len(p) + w) for p, w in zip(prompts, written)]


def pad_right(rows, device):
    """Rows of (ids, labels) -> ids, labels, mask [B,T], padding behind."""
    T = max(len(ids) for ids, _ in rows)
    return (torch.tensor([ids + [0] * (T - len(ids)) for ids, _ in rows]).to(device),
            torch.tensor([labels + [-100] * (T - len(labels)) for _, labels in rows]).to(device),
            torch.tensor([[1] * len(ids) + [0] * (T - len(ids)) for ids, _ in rows]).to(device))


# ---------------------------------------------------------------- options

def parse_args(argv=None):
    parser = OptionParser("distill.py")
    add = parser.add_argument
    add("--teacher", default="data/arithmetic/teacher", help="checkpoint folder; not read at alpha 1")
    add("--student", default="", help="checkpoint folder to start from; '' is from scratch, sizes below")
    add("--tokenizer", default="", help="tokenizer folder; '': the student's, else the teacher's")
    add("--data", default="data/arithmetic/sft.jsonl", help="conversations or prompt/completion rows")
    add("--eval_data", default="data/arithmetic/test.jsonl", help="held-out prompts, answers; '' for none")
    add("--out_dir", default="", help="folder of the run; '' takes the next free out/distill ..")
    add("--resume", action="store_true", help="go on with the run in --out_dir")
    add("--overwrite", action="store_true", help="start anew in an --out_dir that holds a run")
    # the new student
    add("--first_layers", type=int, default=0, help="start from so many of the teacher's layers, no sizes")
    add("--hidden_size", type=int, default=64, help="of a student from scratch")
    add("--num_hidden_layers", type=int, default=4, help="of a student from scratch")
    add("--num_attention_heads", type=int, default=4, help="of a student from scratch")
    add("--num_key_value_heads", type=int, default=2, help="of a student from scratch")
    add("--max_position_embeddings", type=int, default=1024, help="of a student from scratch")
    add("--use_moe", action="store_true", help="a student from scratch with 4 experts")
    # the objective
    add("--alpha", type=fraction, default=0.0, help="weight of CE on the labels; the teacher's is 1 - alpha")
    add("--temperature", type=positive_float, default=1.0, help="softens both sides of the KL, and sampling")
    add("--divergence", choices=("forward", "reverse", "jsd"), default="forward", help="of the two models")
    add("--jsd_weight", type=fraction, default=0.5, help="the teacher's share of the JSD's mixture")
    add("--on_policy_fraction", type=fraction, default=0.0, help="share of batches the student completes")
    add("--max_new_tokens", type=positive_int, default=48, help="longest completion, in tokens")
    # the optimizer
    add("--steps", type=positive_int, default=1000, help="optimizer steps")
    add("--batch_size", type=positive_int, default=64, help="conversations for each step, over all processes")
    add("--max_length", type=positive_int, default=512, help="longer conversations are left out, in tokens")
    add("--learning_rate", type=positive_float, default=3e-3, help="peak; pretrained: try 5e-5")
    add("--lr_schedule", choices=("cosine", "constant"), default="cosine", help="cosine: to a tenth")
    add("--warmup_steps", type=non_negative_int, default=50, help="steps of linear warm-up")
    add("--weight_decay", type=non_negative, default=0.0, help="AdamW's")
    add("--grad_clip", type=positive_float, default=1.0, help="largest gradient norm")
    add("--micro_batch_tokens", type=positive_int, default=16384, help="tokens in a backward pass: memory")
    # the run
    add("--eval_interval", type=positive_int, default=250, help="steps between held-out measurements")
    add("--sample_interval", type=positive_int, default=250, help="steps between printed completions")
    add("--save_interval", type=positive_int, default=500, help="steps between checkpoints")
    add("--log_interval", type=positive_int, default=25, help="steps between lines on the terminal")
    add("--seed", type=int, default=0, help="of the student's weights, the data order and the sampling")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cuda:1, cpu")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto: bf16 if on CUDA")
    add("--compile", action="store_true", help="torch.compile the trained pass: a minute first, less memory")
    args = parser.parse_args(argv)
    if args.divergence == "jsd" and args.jsd_weight in (0, 1):
        parser.error("--jsd_weight must lie inside (0, 1); at the ends the JSD is 0: take forward or reverse")
    if args.first_layers < 0 or args.first_layers and args.student:
        parser.error("--first_layers must be positive, and excludes --student")
    if args.alpha == 1 and args.on_policy_fraction > 0:
        parser.error("--on_policy_fraction needs a teacher to grade the student's text: set --alpha below 1")
    return args


# ---------------------------------------------------------------- the run

COLUMNS = ("step", "eval_accuracy", "eval_greedy", "loss", "ce", "kl", "aux", "on_policy", "trained_tokens",
           "grad_norm", "skipped_updates", "learning_rate", "tokens_per_second", "seconds")


def new_student(args, tokenizer):
    """The teacher's first layers with its embedding, norm and head, or a MiniMind of the sizes on the command
    line over the tokenizer's vocabulary.
    """
    if args.first_layers:
        whole = load_checkpoint(args.teacher)
        if args.first_layers > whole.config.num_hidden_layers:
            raise InputError(f"--first_layers {args.first_layers}: the teacher has "
                             f"{whole.config.num_hidden_layers} layers")
        student = MiniMind(replace(whole.config, num_hidden_layers=args.first_layers))
        kept = student.state_dict().keys()
        student.load_state_dict({n: t for n, t in whole.state_dict().items() if n in kept})
        return student
    torch.manual_seed(args.seed)
    ends, begin = tokenizer.eos_ids, tokenizer.named["bos_token"] or ""
    try:
        return MiniMind(MiniMindConfig(
            vocab_size=tokenizer.tokenizer.get_vocab_size(), hidden_size=args.hidden_size,
            num_hidden_layers=args.num_hidden_layers, num_attention_heads=args.num_attention_heads,
            num_key_value_heads=args.num_key_value_heads, use_moe=args.use_moe,
            max_position_embeddings=args.max_position_embeddings, pad_token_id=tokenizer.pad_id,
            eos_token_id=ends[0] if len(ends) == 1 else ends,
            bos_token_id=tokenizer.tokenizer.token_to_id(begin)))
    except ValueError as e:     # sizes that do not go together
        raise InputError(str(e)) from None


def load_teacher(args, tokenizer, student, run):
    """The frozen teacher: no gradients, no dropout, and under bf16 one copy with bf16 linear weights."""
    if Path(args.teacher).is_dir() and (load_tokenizer(args.teacher).tokenizer.get_vocab()
                                        != tokenizer.tokenizer.get_vocab()):    # a bare .pth has no tokenizer
        raise InputError(f"--teacher {args.teacher} and the student's {tokenizer.folder} have different "
                         f"tokenizers: the KL compares token by token and needs one vocabulary")
    teacher = rollout_policy(load_checkpoint(args.teacher).to(run.device), run.dtype).eval()
    if teacher.config.vocab_size < student.config.vocab_size:
        raise InputError(f"the teacher's vocabulary ({teacher.config.vocab_size} rows) is narrower than the "
                         f"student's ({student.config.vocab_size} rows)")
    return teacher.requires_grad_(False)


def write_samples(student, tokenizer, prompts, max_new_tokens, generator):
    """A completion of each held-out prompt at temperature 1, with its reward terms: rows of samples.jsonl."""
    rollout = generate(student, [p.ids for p in prompts], 1, max_new_tokens, tokenizer.eos_ids,
                       tokenizer.pad_id, 1.0, generator)
    texts = completion_texts(tokenizer, rollout)
    rewards, terms = compute_rewards(texts, [p.answer for p in prompts], [p.text for p in prompts])
    return [{"prompt": p.text, "completion": text, **row, "reward": reward}
            for p, text, row, reward in zip(prompts, texts, terms, rewards.tolist())]


def main(argv=None):
    args = parse_args(argv)
    run = Run("distill", args)

    # student, teacher, data, optimizer
    tokenizer = load_tokenizer(args.tokenizer or args.student or args.teacher)
    student = load_checkpoint(args.student) if args.student else new_student(args, tokenizer)
    student = student.to(run.device).train()
    teacher = load_teacher(args, tokenizer, student, run) if args.alpha < 1 else None
    shorter = min((m.config for m in (student, teacher) if m is not None),
                  key=lambda config: config.max_position_embeddings)
    room = prompt_room(shorter, args.max_new_tokens)    # for the prompt of a row that the student completes
    longest = min(args.max_length, room if args.on_policy_fraction else shorter.max_position_embeddings)
    data, left_out = read_rows(args.data, tokenizer, longest, student.config.vocab_size)
    held_out = read_eval_prompts(args.eval_data, tokenizer, room, student.config.vocab_size)
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.learning_rate, betas=(0.9, 0.95),
                                  weight_decay=args.weight_decay, fused=run.device.type == "cuda")

    # a new run, or the state of an old one; the weights to sample from; the forward pass that is trained
    size = f"{sum(p.numel() for p in teacher.parameters()) / 1e6:.2f}M" if teacher is not None else "none"
    start_step = run.begin(student, optimizer, COLUMNS, tokenizer.folder, (
        f"teacher {size}; {len(data)} rows of {args.data} ({left_out} left out), {len(held_out)} held out of "
        f"{args.eval_data or '-'}; {args.steps} steps of {args.batch_size}"))
    sampler, forward = rollout_policy(student, run.dtype), run.wrap(student)

    def measure(temperature):
        with run.autocast():
            return evaluate(sampler, tokenizer, held_out, max_new_tokens=args.max_new_tokens, seed=args.seed,
                            temperature=temperature, rank=run.rank, world=run.world)

    run.before_training(measure(1.0) if held_out and not run.eval_scores else "")   # a resumed run has them
    for step in range(start_step + 1, args.steps + 1):
        run.begin_step(step)
        torch.manual_seed(rng_for(args.seed, step, "dropout", run.rank).initial_seed())

        # a batch: this process's share of the file's rows, or their prompts completed by the student
        batch = run.share([data[i] for i in batch_of_step(step, args.batch_size, len(data), args.seed)])
        f = args.on_policy_fraction         # spread evenly over the steps
        on_policy = math.floor(step * f) > math.floor((step - 1) * f)
        if on_policy:
            noise = run.share(torch.rand(args.batch_size, args.max_new_tokens, dtype=torch.float64,
                                         generator=rng_for(args.seed, step, "sampling")))
            with run.autocast():
                batch = complete_by_student(sampler, tokenizer, batch, args.max_new_tokens, args.temperature,
                                            noise)
        # What the student wrote is no label: on its own text only the teacher's part of the loss remains.
        ce_weight = 0.0 if on_policy else args.alpha

        # micro-batches of similar length: sums over tokens, divided by the trained tokens of the whole step
        counts = [sum(label != -100 for label in labels[1:]) for _, labels in batch]
        tokens = all_reduce([sum(counts)])[0] / run.world       # of a process: gradients become their mean
        optimizer.zero_grad(set_to_none=True)
        totals = torch.zeros(4, device=run.device)              # loss, ce, kl, aux
        parts = micro_batches([len(ids) for ids, _ in batch], args.micro_batch_tokens)
        for part in parts:
            run.sync_next_backward(part is parts[-1])
            ids, labels, mask = pad_right([batch[i] for i in part], run.device)         # [b,T]
            trained, labels = labels[:, 1:] != -100, labels[:, 1:]                      # [b,T-1]
            with run.autocast():
                teacher_hidden, teacher_head = None, None
                if teacher is not None:
                    with torch.inference_mode():
                        hidden, _ = teacher(ids, mask, right_padded=True, return_hidden=True)   # [b,T,C']
                    teacher_hidden = hidden[:, :-1][trained].clone()        # [M,C'], a plain tensor
                    teacher_head = teacher.lm_head.weight
                hidden, aux = forward(ids, mask, right_padded=True, return_hidden=True)         # [b,T,C]
                ce, kl = chunked_distillation_sums(
                    hidden[:, :-1][trained], student.lm_head.weight, teacher_hidden, teacher_head,
                    labels[trained], args.temperature, args.divergence, args.jsd_weight)
            # The load balancing of experts stands outside alpha: it is about the student alone.
            aux = torch.as_tensor(aux, device=run.device) * (sum(counts[i] for i in part) / tokens)
            loss = (ce_weight * ce + (1 - args.alpha) * kl) / tokens + aux
            loss.backward()
            totals += torch.stack([loss.detach(), ce.detach() / tokens, kl.detach() / tokens, aux.detach()])
        grad_norm = torch.nn.utils.clip_grad_norm_(student.parameters(), args.grad_clip).item()
        if run.all_finite(step, totals[0].item(), grad_norm):
            optimizer.step()

        # the sampling weights are brought up to date
        update_rollout_policy(sampler, student)

        # log, show samples, save
        metrics = run.average({
            **dict(zip(("loss", "ce", "kl", "aux"), totals.tolist())), "on_policy": int(on_policy),
            "trained_tokens": run.world * tokens, "grad_norm": grad_norm},
            tokens=sum(len(ids) for ids, _ in batch))
        measured = held_out and run.due(step, args.eval_interval)
        metrics["eval_accuracy"], metrics["eval_greedy"] = map(measure, (1.0, 0.0)) if measured else ("", "")
        samples = []
        if held_out and run.is_main and run.due(step, args.sample_interval):
            with run.autocast():
                samples = write_samples(sampler, tokenizer, held_out[:2], args.max_new_tokens,
                                        rng_for(args.seed, step, "samples"))
        run.log(step, metrics, ("loss", "ce", "kl", "eval_accuracy", "eval_greedy"), samples)
        run.save_if_due(step)
    run.finish(f"{len(held_out)} prompts" if held_out else "")


if __name__ == "__main__":
    run_script(main, "distill.py", parse_args)
