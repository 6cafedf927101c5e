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
import argparse
import math
import re
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import rollout as sampling
from model import (InputError, MiniMind, MiniMindConfig, catch_signals, init_distributed, load_checkpoint,
                   load_run, metrics_over_ranks, over_ranks, run_script, save_run)
from reward import completion_texts, compute_rewards, evaluate
from rollout import (RunLog, answer_marks, batch_of_step, check_conversation, check_vocabulary,
                     encode_guarded, generate, load_tokenizer, micro_batches, read_jsonl, read_prompts,
                     render_chat, render_guarded, rollout_policy, run_dir, step_generator,
                     update_rollout_policy)

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

    size = max(1, sampling.LOGITS_AT_ONCE // len(head))
    if len(targets) <= size:
        return sums(hidden, teacher_hidden, targets)
    ts = teacher_hidden.split(size) if teacher_hidden is not None else [None] * -(-len(targets) // size)
    parts = [checkpoint(sums, h, t, y, use_reentrant=False)
             for h, t, y in zip(hidden.split(size), ts, targets.split(size))]
    return sum(ce for ce, _ in parts), sum(kl for _, kl in parts)


# ---------------------------------------------------------------- data

def chat_labels(chat, messages):
    """(ids, labels) of a conversation: every assistant turn is trained, its end-of-turn token included, and
    nothing else (-100). `messages` [{"role", "content"}, ...].

    The chat template marks where a turn starts: the text that it adds to ask for an answer.
    """
    user = [{"role": "user", "content": "x"}]
    asked, not_asked = (render_guarded(chat, user, False, ask) for ask in (True, False))
    header = asked[len(not_asked):] or answer_marks(chat)[0]    # some templates always or never ask
    match = re.match(r".*?assistant\S*\n*", header, re.DOTALL)
    header = match[0] if match else header
    if not header:
        raise InputError("the chat template does not mark where an answer starts")
    text = render_guarded(chat, messages, True, False)
    _, ids, starts = encode_guarded(chat, text)
    labels = [-100] * len(ids)
    for turn in re.finditer(re.escape(header), text):
        for i, (token, start) in enumerate(zip(ids, starts)):
            if start >= turn.end():
                labels[i] = token
                if token in chat.eos_ids:
                    break
    return ids, labels


def completion_labels(chat, prompt, completion, end_id):
    """(ids, labels) of a user's prompt and its completion; the end-of-turn token is trained too.

    A completion that closes a think block continues an open one, any other stands behind a closed one.
    """
    thinking = "</think>" in completion
    text, ids = render_chat(chat, [{"role": "user", "content": prompt}], thinking)
    if thinking and text.rstrip().endswith("<think>"):      # the template has opened the block already
        completion = completion.lstrip().removeprefix("<think>").removeprefix("\n")
    elif thinking and not completion.lstrip().startswith("<think>"):
        completion = "<think>\n" + completion
    answer = encode_guarded(chat, completion)[1] + [end_id]
    return ids + answer, [-100] * len(ids) + answer


def read_rows(path, chat, max_length, vocab_size):
    """(ids, labels) of each row of an SFT file: {"conversations"} or {"prompt", "completion"}.

    Returns (rows, how many were left out: longer than max_length tokens, or without a trained token).
    """
    turn = render_chat(chat, [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}], False,
                       False)
    end_id = next((i for i in reversed(turn[1]) if i in chat.eos_ids), chat.eos_ids[0])
    rows, left_out = [], 0
    for where, row in read_jsonl(path):
        try:
            if "conversations" in row:
                ids, labels = chat_labels(chat, check_conversation(where, row["conversations"]))
            elif all(isinstance(row.get(key), str) and row[key].strip() for key in ("prompt", "completion")):
                ids, labels = completion_labels(chat, row["prompt"], row["completion"], end_id)
            else:
                raise InputError(f"{where}: needs \"conversations\", or \"prompt\" and \"completion\", both "
                                 f"text and not empty; found {sorted(row)[:6]}")
        except InputError as e:
            raise InputError(str(e) if str(e).startswith(where) else f"{where}: {e}") from None
        check_vocabulary(where, ids, vocab_size)
        if len(ids) > max_length or all(label == -100 for label in labels[1:]):
            left_out += 1
        else:
            rows.append((ids, labels))
    if not rows:
        raise InputError(f"{path}: no row left ({left_out} longer than {max_length} tokens or without a "
                         f"trained one)")
    return rows, left_out


def complete_by_student(student, chat, rows, max_new_tokens, temperature, noise):
    """The student's own completions of the rows' prompts (all before the last trained turn) -> rows again."""
    prompts = []
    for ids, labels in rows:
        last = max(i for i, label in enumerate(labels) if label != -100)
        start = max((i for i in range(last) if labels[i] == -100), default=-1) + 1
        prompts.append(ids[:start])
    rollout = generate(student, prompts, 1, max_new_tokens, chat.eos_ids, chat.pad_id, temperature,
                       noise=noise)
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
    parser = argparse.ArgumentParser("distill.py", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
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
    add("--alpha", type=float, default=0.0, help="weight of CE on the labels; 1 - alpha weighs the teacher")
    add("--temperature", type=float, default=1.0, help="softens both sides of the KL, and sampling")
    add("--divergence", choices=("forward", "reverse", "jsd"), default="forward", help="of the two models")
    add("--jsd_weight", type=float, default=0.5, help="the teacher's share of the JSD's mixture")
    add("--on_policy_fraction", type=float, default=0.0, help="share of batches the student completes")
    add("--max_new_tokens", type=int, default=48, help="longest completion, in tokens")
    # the optimizer
    add("--steps", type=int, default=1000, help="optimizer steps")
    add("--batch_size", type=int, default=64, help="conversations for each step, over all processes")
    add("--max_length", type=int, default=512, help="longer conversations are left out, in tokens")
    add("--learning_rate", type=float, default=3e-3, help="peak; for a pretrained student try 5e-5")
    add("--lr_schedule", choices=("cosine", "constant"), default="cosine", help="cosine: to a tenth")
    add("--warmup_steps", type=int, default=50, help="steps of linear warm-up")
    add("--weight_decay", type=float, default=0.0, help="AdamW's")
    add("--grad_clip", type=float, default=1.0, help="largest gradient norm")
    add("--micro_batch_tokens", type=int, default=16384, help="tokens in one backward pass: the memory knob")
    # the run
    add("--eval_interval", type=int, default=250, help="steps between measurements on the held-out prompts")
    add("--sample_interval", type=int, default=250, help="steps between printed completions")
    add("--save_interval", type=int, default=500, help="steps between checkpoints")
    add("--log_interval", type=int, default=25, help="steps between lines on the terminal")
    add("--seed", type=int, default=0, help="of the student's weights, the data order and the sampling")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda, cuda:1, cpu")
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto: bf16 if on CUDA")
    add("--compile", action="store_true", help="torch.compile the trained pass: a minute first, less memory")
    args = parser.parse_args(argv)
    if args.resume and args.overwrite:
        parser.error("--resume and --overwrite exclude each other")
    for name in ("steps", "batch_size", "max_new_tokens", "max_length", "learning_rate", "temperature",
                 "grad_clip", "micro_batch_tokens", "eval_interval", "sample_interval", "save_interval",
                 "log_interval"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} must be positive, not {getattr(args, name)}")
    for name in ("alpha", "on_policy_fraction", "jsd_weight"):
        if not 0 <= getattr(args, name) <= 1:
            parser.error(f"--{name} must lie in [0, 1], not {getattr(args, name)}")
    for name in ("weight_decay", "warmup_steps"):
        if not 0 <= getattr(args, name) < math.inf:
            parser.error(f"--{name} must not be negative, not {getattr(args, name)}")
    if args.divergence == "jsd" and args.jsd_weight in (0, 1):
        parser.error("--jsd_weight must lie inside (0, 1); at the ends the JSD is 0: take forward or reverse")
    if args.first_layers < 0 or args.first_layers and args.student:
        parser.error("--first_layers must be positive, and excludes --student")
    if args.alpha == 1 and args.on_policy_fraction > 0:
        parser.error("--on_policy_fraction needs a teacher to grade the student's text: set --alpha below 1")
    return args


def learning_rate_at(step, args):
    """Linear warm-up, then constant or a cosine down to a tenth of the peak at the last step."""
    warmup = min(1.0, step / args.warmup_steps) if args.warmup_steps else 1.0
    fall = 0.1 + 0.45 * (1 + math.cos(math.pi * step / args.steps)) if args.lr_schedule == "cosine" else 1.0
    return args.learning_rate * warmup * fall


# ---------------------------------------------------------------- the run

COLUMNS = ("step", "eval_accuracy", "eval_greedy", "loss", "ce", "kl", "aux", "on_policy", "trained_tokens",
           "grad_norm", "skipped_updates", "learning_rate", "tokens_per_second", "seconds")


def new_student(args, chat):
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
    return MiniMind(MiniMindConfig(
        vocab_size=chat.tokenizer.get_vocab_size(), hidden_size=args.hidden_size, use_moe=args.use_moe,
        num_hidden_layers=args.num_hidden_layers, num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_key_value_heads, max_position_embeddings=args.max_position_embeddings,
        pad_token_id=chat.pad_id, eos_token_id=chat.eos_ids[0] if len(chat.eos_ids) == 1 else chat.eos_ids,
        bos_token_id=chat.tokenizer.token_to_id(chat.named["bos_token"] or "")))


def load_teacher(args, chat, tokenizer_dir, student, dtype, device):
    """The frozen teacher: no gradients, no dropout, and under bf16 one copy with bf16 linear weights."""
    if Path(args.teacher).is_dir() and (load_tokenizer(args.teacher).tokenizer.get_vocab()
                                        != chat.tokenizer.get_vocab()):     # a bare .pth has no tokenizer
        raise InputError(f"--teacher {args.teacher} and the student's {tokenizer_dir} have different "
                         f"tokenizers: the KL compares token by token and needs one vocabulary")
    teacher = rollout_policy(load_checkpoint(args.teacher).to(device), dtype).eval().requires_grad_(False)
    if teacher.config.vocab_size < student.config.vocab_size:
        raise InputError(f"the teacher's vocabulary ({teacher.config.vocab_size} rows) is narrower than the "
                         f"student's ({student.config.vocab_size} rows)")
    return teacher


def main(argv=None):
    args = parse_args(argv)
    rank, world, device = init_distributed(args.device)
    if args.batch_size % world:
        raise InputError(f"--batch_size {args.batch_size} must be a multiple of the {world} processes")
    dtype = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32,
             "bfloat16": torch.bfloat16, "float32": torch.float32}[args.dtype]

    def autocast():     # one precision path for teacher and student; master weights and optimizer stay fp32
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)

    # student, teacher, data, optimizer
    tokenizer_dir = args.tokenizer or args.student or args.teacher
    chat = load_tokenizer(tokenizer_dir)
    student = (load_checkpoint(args.student) if args.student else new_student(args, chat)).to(device).train()
    config = student.config
    teacher = load_teacher(args, chat, tokenizer_dir, student, dtype, device) if args.alpha < 1 else None
    positions = min(m.config.max_position_embeddings for m in (student, teacher) if m is not None)
    room = positions - args.max_new_tokens      # for the prompt of a row that the student completes
    if room < 1:
        raise InputError(f"--max_new_tokens {args.max_new_tokens} leaves no room for a prompt: student and "
                         f"teacher have {positions} positions")
    data, left_out = read_rows(args.data, chat, min(args.max_length, room if args.on_policy_fraction
                                                    else positions),
                               config.vocab_size)
    test = read_prompts(args.eval_data, chat, room, config.vocab_size)[0] if args.eval_data else []
    if any(p.answer is None for p in test):
        raise InputError(f"{args.eval_data}: every held-out row needs an answer")
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.learning_rate, betas=(0.9, 0.95),
                                  weight_decay=args.weight_decay, fused=device.type == "cuda")

    # a new run, or the state of an old one
    first, held_out = 0, {}
    if args.resume and args.out_dir:
        first, held_out = load_run(args.out_dir, "distill", student, optimizer, args)
    num_params = sum(p.numel() for p in student.parameters())
    if rank == 0:       # on disk: 16 bytes a parameter in state and checkpoint, the old ones and the new
        log = RunLog(run_dir(args.out_dir, "distill", args.resume, args.overwrite, 32 * num_params), COLUMNS,
                     args.steps, first)
        size = f"{sum(p.numel() for p in teacher.parameters()) / 1e6:.2f}M" if teacher is not None else "none"
        print(f"student {num_params / 1e6:.2f}M parameters, teacher {size}, on {device}, {dtype}; "
              f"{len(data)} rows ({left_out} left out), {len(test)} held out; {args.steps} steps of "
              f"{args.batch_size}; writing to {log.out_dir}")
    sampler, ddp = rollout_policy(student, dtype), student
    if world > 1:       # every forward that is trained goes through the wrapper: it averages the gradients
        ddp = DistributedDataParallel(student, [device.index] if device.type == "cuda" else None)
    forward = torch.compile(ddp, dynamic=True) if args.compile else ddp
    caught, bad_updates = catch_signals(), 0

    def eval_accuracy(temperature=1.0):
        with autocast():
            return evaluate(sampler, chat, test, args.max_new_tokens, temperature, args.seed, rank, world)

    if test and "before" not in held_out:
        held_out["before"] = held_out["best"] = eval_accuracy()
    if rank == 0 and first == 0:
        log.row({"step": 0, "eval_accuracy": held_out.get("before", "")})
    for step in range(first + 1, args.steps + 1):
        tic = time.time()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, args)
        torch.manual_seed(step_generator(args.seed, step, stream=9 + rank).initial_seed())      # for dropout

        # this process's share of the batch: rows of the file, or their prompts completed by the student
        batch = [data[i] for i in batch_of_step(step, args.batch_size, len(data), args.seed)]
        mine = slice(rank * len(batch) // world, (rank + 1) * len(batch) // world)
        f = args.on_policy_fraction         # spread evenly over the steps
        on_policy = math.floor(step * f) > math.floor((step - 1) * f)
        noise = torch.rand(len(batch), args.max_new_tokens, dtype=torch.float64,
                           generator=step_generator(args.seed, step))[mine]
        batch = batch[mine]
        if on_policy:
            with autocast():
                batch = complete_by_student(sampler, chat, batch, args.max_new_tokens, args.temperature,
                                            noise)
        # What the student wrote is no label: on its own text only the teacher's part of the loss remains.
        ce_weight = 0.0 if on_policy else args.alpha

        # micro-batches of similar length: sums over tokens, divided by the trained tokens of the whole step
        counts = [sum(label != -100 for label in labels[1:]) for _, labels in batch]
        tokens = over_ranks([sum(counts)])[0] / world       # of a process, on average: DDP takes the mean
        optimizer.zero_grad(set_to_none=True)
        totals = torch.zeros(4, device=device)              # loss, ce, kl, aux
        micro = micro_batches([len(ids) for ids, _ in batch], args.micro_batch_tokens)
        for m, part in enumerate(micro):
            ids, labels, mask = pad_right([batch[i] for i in part], device)             # [b,T]
            trained = labels[:, 1:] != -100                                             # [b,T-1]
            with ddp.no_sync() if world > 1 and m + 1 < len(micro) else nullcontext():
                with autocast():
                    teacher_hidden, teacher_head = None, None
                    if teacher is not None:
                        with torch.inference_mode():
                            hidden, _ = teacher(ids, mask, right_padded=True, return_hidden=True)
                        teacher_hidden = hidden[:, :-1][trained].clone()        # [M,C'], a plain tensor
                        teacher_head = teacher.lm_head.weight
                    hidden, aux = forward(ids, mask, right_padded=True, return_hidden=True)     # [b,T,C]
                    ce, kl = chunked_distillation_sums(
                        hidden[:, :-1][trained], student.lm_head.weight, teacher_hidden, teacher_head,
                        labels[:, 1:][trained], args.temperature, args.divergence, args.jsd_weight)
                # The load balancing of experts stands outside alpha: it is about the student alone.
                aux = torch.as_tensor(aux, device=device) * (sum(counts[i] for i in part) / tokens)
                loss = (ce_weight * ce + (1 - args.alpha) * kl) / tokens + aux
                loss.backward()
            totals += torch.stack([loss.detach(), ce.detach() / tokens, kl.detach() / tokens, aux.detach()])
        grad_norm = torch.nn.utils.clip_grad_norm_(student.parameters(), args.grad_clip).item()
        fine = math.isfinite(over_ranks([totals[0].item() + grad_norm])[0])
        if fine:
            optimizer.step()
        bad_updates = 0 if fine else bad_updates + 1            # weights are never touched by a NaN
        if bad_updates == 10:
            raise InputError(f"step {step}: ten updates in a row had a loss or gradient that is not finite; "
                             f"try a lower --learning_rate or --dtype float32")
        update_rollout_policy(sampler, student)

        # measure, log, show samples, save
        last = step == args.steps
        stop = max(over_ranks([caught[0] if caught else 0], "MAX"))
        metrics = metrics_over_ranks({
            "step": step, **dict(zip(("loss", "ce", "kl", "aux"), totals.tolist())),
            "on_policy": int(on_policy), "trained_tokens": world * tokens, "grad_norm": grad_norm,
            "skipped_updates": int(not fine),
            "learning_rate": learning_rate_at(step, args),
            "tokens_per_second": world * sum(len(ids) for ids, _ in batch) / (time.time() - tic)})
        metrics["eval_accuracy"] = metrics["eval_greedy"] = ""
        if test and (last or step % args.eval_interval == 0):
            metrics["eval_accuracy"], metrics["eval_greedy"] = eval_accuracy(), eval_accuracy(0.0)
            held_out["best"] = max(held_out["best"], metrics["eval_accuracy"])
        if rank == 0:
            log.row(metrics)
            if last or step % args.log_interval == 0 or metrics["eval_accuracy"] != "":
                log.line(metrics, ("loss", "ce", "kl", "eval_accuracy", "eval_greedy"))
            if test and (last or step % args.sample_interval == 0):
                shown = test[:2]
                with autocast():
                    rollout = generate(sampler, [p.ids for p in shown], 1, args.max_new_tokens, chat.eos_ids,
                                       chat.pad_id, 1.0, step_generator(args.seed, step, stream=3))
                texts = completion_texts(chat, rollout)
                rewards, terms = compute_rewards(texts, [p.answer for p in shown], [p.text for p in shown])
                log.samples([{"step": step, "prompt": p.text, "completion": text, **t, "reward": r}
                             for p, text, t, r in zip(shown, texts, terms, rewards.tolist())])
            if last or stop or step % args.save_interval == 0:
                save_run(log.out_dir, "distill", student, optimizer, step, held_out, tokenizer_dir, args)
        if stop and not last:
            if rank == 0:
                print(f"stopped after step {step}; go on with the same options and --resume --out_dir "
                      f"{log.out_dir}", flush=True)
            raise SystemExit(128 + int(stop))
    if rank == 0:
        if first >= args.steps:     # nothing was left to do but what a kill between two files left undone
            save_run(log.out_dir, "distill", student, optimizer, first, held_out, tokenizer_dir, args)
        elif test:
            print(f"held-out accuracy {held_out['before']:.3f} -> {metrics['eval_accuracy']:.3f} sampled, "
                  f"{metrics['eval_greedy']:.3f} greedy ({len(test)} prompts)")
        print(f"checkpoint in {log.out_dir / 'checkpoint'}")


if __name__ == "__main__":
    run_script(main, "distill.py", parse_args)
