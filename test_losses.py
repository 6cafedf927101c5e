"""The math of the three scripts against numbers worked out by hand, never against autograd of the formula.

    python -m pytest test_losses.py                     # seconds on one CPU core
    python -m pytest test_losses.py -k question -v      # the seven questions about CISPO

Old log-probs are -1 unless said; epsilon is .2 and CISPO's cap 1.2, so both clip a ratio of 1.5 to 1.2.
Letters: N completions, R response length, A advantage, r ratio, k = ref - new.
"""
import ast
import math
import re
from pathlib import Path

import pytest
import torch

import cispo
import grpo
import reward
from cispo import cispo_loss
from distill import chunked_distillation_sums, distillation_loss
from grpo import group_advantages, grpo_loss, token_kl
from model import InputError, MiniMind, MiniMindConfig
from rollout import generate, micro_batches, per_token_logps

torch.set_num_threads(1)
CLIP = {grpo_loss: 0.2, cispo_loss: 1.2}
both = pytest.mark.parametrize("loss_of", CLIP)
LN2 = math.log(2)


def assert_near(actual, expected, tolerance=1e-4):
    torch.testing.assert_close(torch.as_tensor(actual), torch.tensor(expected), atol=tolerance, rtol=0,
                               check_dtype=False)


def run_loss(loss_of, new, old, A, mask=None, ref=None, beta=0.0, clip=None):
    """Nested lists [N,R] and [N] in; the loss and its gradient with respect to per_token_logps [N,R] out."""
    new, old, A = torch.tensor(new, requires_grad=True), torch.tensor(old), torch.tensor(A)
    mask = torch.ones_like(old) if mask is None else torch.tensor(mask)
    loss = loss_of(new, old, None if ref is None else torch.tensor(ref), A, mask, clip or CLIP[loss_of], beta)
    return loss.item(), torch.autograd.grad(loss, new)[0]


def one_token(loss_of, ratio, A, old=-1.0, clip=None):
    """The loss and its gradient with respect to the log-prob of a single token."""
    loss, gradient = run_loss(loss_of, [[old + math.log(ratio)]], [[old]], [A], clip=clip)
    return loss, gradient.item()


def tiny_model(seed=0):
    """A MiniMind with weights large enough that every prompt gives another distribution."""
    torch.manual_seed(seed)
    model = MiniMind(MiniMindConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                    num_key_value_heads=1, intermediate_size=8))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model.eval()


def tiny_batch(prompt_lengths, lengths):
    """Random prompts (N lists of ids), completion_ids [N,R], and a mask [N,R] of the given lengths."""
    mask = torch.arange(max(*lengths, 1)) < torch.tensor(lengths)[:, None]
    return [torch.randint(11, (n,)).tolist() for n in prompt_lengths], torch.randint(11, mask.shape), mask


# ---------------------------------------------------------------- advantages and rewards

def test_a_group_is_neighbouring_rows_of_one_prompt():
    # [1,0]: mean .5, std .5 -> +-.5 / .5001 = +-.9998. [1,1]: 0. Interleaved groups would be [1,1], [0,1].
    assert_near(group_advantages(torch.tensor([1.0, 0, 1, 1]), 2), [0.9998, -0.9998, 0, 0])
    model, (a, b) = tiny_model(), ([3, 4], [5, 6, 7])
    rollout = generate(model, [a, b], 2, 4, eos_ids=[1], generator=torch.Generator().manual_seed(0))
    assert rollout.prompts == [a, a, b, b]
    scored = per_token_logps(model, [a, a, b, b], rollout.completion_ids, rollout.completion_mask)
    assert_near(rollout.per_token_logps, scored.tolist(), 1e-5)     # the sampler saw the same prompts


def test_the_std_of_a_group_is_the_population_std():
    # Population std .5: .5 / (.5 + 1e-4) = .99980. The unbiased one, sqrt(1/3) = .5774, would give .8659.
    assert_near(group_advantages(torch.tensor([0.0, 0, 1, 1]), 4), [-0.9998, -0.9998, 0.9998, 0.9998], 1e-5)


@both
@pytest.mark.parametrize("value", [0.2, 0.7, 0.9])      # an fp32 mean leaves |A| of 1e-4 and more
def test_a_group_of_equal_rewards_changes_no_weight(loss_of, value):
    advantages = group_advantages(torch.full((8,), value), 8)
    assert advantages.abs().max() < 1e-3
    model, (prompts, ids, mask) = tiny_model(), tiny_batch([2] * 8, [1, 2, 3, 4] * 2)
    before = [p.detach().clone() for p in model.parameters()]
    new = per_token_logps(model, prompts, ids, mask)
    loss_of(new, new.detach(), None, advantages, mask, CLIP[loss_of], 0.0).backward()
    torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0).step()  # Adam blows a whisper up to lr
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_an_error_naming_term_and_completion(monkeypatch, value):
    monkeypatch.setattr(reward, "length_reward", lambda text: value if text == "odd" else 0.5)
    with pytest.raises(InputError, match="'length'.*'odd'"):
        reward.compute_rewards(["fine", "odd"], ["1", "1"], ["", ""])
    assert reward.compute_rewards(["fine"], ["1"], [""])[0].isfinite().all()


# ---------------------------------------------------------------- the terms of the loss, one token at a time

@pytest.mark.parametrize("ratio, A, loss, gradient", [
    # -min(r*A, clamp(r, .8, 1.2)*A); d r / d new = r: the gradient is -r*A, and 0 where the clamp was chosen
    (0.5, 1, -0.5, -0.5),       # min(.5, .8) = .5: below the clip, yet free to rise
    (0.5, -1, 0.8, 0.0),        # min(-.5, -.8) = -.8: clamped
    (1.5, 1, -1.2, 0.0),        # min(1.5, 1.2) = 1.2: clamped
    (1.5, -1, 1.5, 1.5),        # min(-1.5, -1.2) = -1.5: above the clip, yet free to fall
    (1.1, 1, -1.1, -1.1), (1.1, -1, 1.1, 1.1), (0.9, 2, -1.8, -1.8), (0.9, -2, 1.8, 1.8)])      # inside
def test_grpo_cuts_the_gradient_only_where_the_clip_binds(ratio, A, loss, gradient):
    assert_near(one_token(grpo_loss, ratio, A), [loss, gradient])
    assert grpo.clipped_tokens(torch.tensor(ratio), torch.tensor(A), 0.2) == (gradient == 0)


@pytest.mark.parametrize("ratio, A, cap, loss, gradient", [
    # -w*A*new with new = ln r - 1 and the weight w = min(r, cap) held constant: the gradient is -w*A
    (0.5, 1, 1.2, 0.8466, -0.5), (0.5, -1, 1.2, -0.8466, 0.5),      # new = -1.6931
    (1.5, 1, 1.2, 0.7134, -1.2), (1.5, -1, 1.2, -0.7134, 1.2),      # new = -.5945; capped tokens still learn
    (1.1, 1, 1.2, 0.9952, -1.1), (1.1, -1, 1.2, -0.9952, 1.1),      # new = -.9047; inside
    (0.01, 2, 1.2, 0.1121, -0.02),                                  # new = -5.6052; there is no lower bound
    (6.0, 1, 5.0, -3.9588, -5.0)])                                  # new = .7918; the cap is 5, not 1 + 5
def test_cispo_caps_the_weight_and_keeps_the_gradient(ratio, A, cap, loss, gradient):
    assert_near(one_token(cispo_loss, ratio, A, clip=cap), [loss, gradient])
    assert cispo.clipped_tokens(torch.tensor(ratio), torch.tensor(A), cap) == (ratio > cap)


@both
@pytest.mark.parametrize("k, kl, slope", [
    # e^k - k - 1; its slope in new is 1 - e^k: descent moves new towards ref
    (0.0, 0.0, 0.0),
    (LN2, 0.3069, -1.0),        # 2 - .6931 - 1; 1 - 2: new is below ref and rises
    (-LN2, 0.1931, 0.5),        # .5 + .6931 - 1; 1 - .5: new is above ref and falls
    (-1.0, 0.3679, 0.6321)])    # new -1, ref -2: .3679 + 1 - 1; 1 - .3679
def test_kl_is_never_negative_and_pulls_the_policy_to_the_reference(loss_of, k, kl, slope):
    assert_near(token_kl(torch.tensor(-1.0), torch.tensor(k - 1)), kl)
    assert token_kl(torch.linspace(-8, 0, 4001), torch.tensor(k - 1)).min() > -1e-6     # but for rounding
    for A in (0.0, 1.0):        # alone, then beside the policy term: -r*A = -1, its value -1 or (CISPO) +1
        loss, gradient = run_loss(loss_of, [[-1.0]], [[-1.0]], [A], ref=[[k - 1]], beta=0.1)
        policy_loss = -A if loss_of is grpo_loss else A
        assert_near([loss, gradient.item()], [0.1 * kl + policy_loss, 0.1 * slope - A])


# ---------------------------------------------------------------- masks, reduction, micro-batches

@both
def test_a_fresh_policy_reads_a_loss_of_zero_and_still_learns(loss_of):
    # r = 1, equal lengths: losses -mean(A) and -mean(A*-1) are 0; gradients are -A / (2 tokens * 4 rows).
    A, new = group_advantages(torch.tensor([0.0, 0, 1, 1]), 4).tolist(), [[-1.0, -1]] * 4
    loss, gradient = run_loss(loss_of, new, new, A)
    assert abs(loss) < 1e-6
    assert_near(gradient, [[0.125] * 2, [0.125] * 2, [-0.125] * 2, [-0.125] * 2])


@both
def test_the_mean_is_over_each_completions_tokens_then_over_completions(loss_of):
    # Lengths 1 and 3, A = 2, -1, r = 1: -A / (length * 2 rows) = -1 and 1/6. Over all 4 tokens: -.5 and .25.
    # GRPO: rows -2, +1 -> -.5 (tokens: +.25). CISPO: rows 2, mean(-1,-2,-6) = -3 -> -.5 (tokens: -1.75).
    new = [[-1.0, -1, -1], [-1, -2, -6]]
    loss, gradient = run_loss(loss_of, new, new, [2.0, -1.0], [[1, 0, 0], [1, 1, 1]])
    assert_near(gradient, [[-1, 0, 0], [1 / 6] * 3])
    assert_near(loss, -0.5)


@both
def test_an_empty_mask_gives_a_finite_loss_and_no_gradient(loss_of):
    loss, gradient = run_loss(loss_of, [[-1.0]] * 2, [[-1.0]] * 2, [1.0, 1.0], [[1], [0]])
    assert math.isfinite(loss)
    assert_near(gradient, [[-0.5], [0]])        # -A / (1 token * 2 rows): the empty row counts
    model, (prompts, ids, mask) = tiny_model(), tiny_batch([2, 3], [0, 0])      # a batch of nothing
    new = per_token_logps(model, prompts, ids, mask)
    loss = loss_of(new, new.detach(), new.detach() - 1, torch.tensor([1.0, -1.0]), mask, CLIP[loss_of], 0.1)
    assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, list(model.parameters())))


@both
@pytest.mark.parametrize("garbage", [1e4, -1e4, math.inf, -math.inf, math.nan])
def test_garbage_in_masked_slots_changes_nothing(loss_of, garbage):
    def run(x):
        return run_loss(loss_of, [[-1.0, -2, x], [-3, x, x]], [[-1.1, -1.5, x], [-3.2, x, x]], [1.0, -1.0],
                        [[1, 1, 0], [1, 0, 0]], [[-1.0, -1, x], [-2, x, x]], 0.1)
    (loss, gradient), (clean_loss, clean_gradient) = run(garbage), run(-1.0)
    assert loss == clean_loss and torch.equal(gradient, clean_gradient)
    assert gradient[0, 2] == gradient[1, 1] == gradient[1, 2] == 0


@both
@pytest.mark.parametrize("token_budget, sizes", [(36, [4]), (12, [3, 1]), (1, [1, 1, 1, 1])])
def test_micro_batches_weighted_by_rows_give_the_gradient_of_the_whole_batch(loss_of, token_budget, sizes):
    model, A = tiny_model(), torch.tensor([1.0, -1.5, 0.5, -0.7])
    prompts, ids, mask = tiny_batch([2, 1, 1, 3], [1, 1, 3, 6])             # 3, 2, 4, 9 tokens
    with torch.no_grad():
        ref = per_token_logps(tiny_model(seed=1), prompts, ids, mask)
        old = per_token_logps(model, prompts, ids, mask) + 0.3 * torch.randn(mask.shape)    # some get clipped

    def rows_loss(rows):
        new = per_token_logps(model, [prompts[i] for i in rows], ids[rows], mask[rows])
        return loss_of(new, old[rows], ref[rows], A[rows], mask[rows], CLIP[loss_of], 0.1)

    whole = torch.autograd.grad(rows_loss([0, 1, 2, 3]), list(model.parameters()))
    parts = micro_batches([3, 2, 4, 9], token_budget)
    assert [len(rows) for rows in parts] == sizes and sorted(sum(parts, [])) == [0, 1, 2, 3]
    for rows in parts:
        (rows_loss(rows) * len(rows) / 4).backward()
    for p, gradient in zip(model.parameters(), whole):
        assert gradient.any()
        assert_near(p.grad, gradient.tolist(), 1e-6)


# ---------------------------------------------------------------- the seven questions about CISPO

def test_question_1_why_cispo_still_needs_old_logps():
    """Why does CISPO still need the old log-probs? The old policy drew the completions: new/old is the weight
    that turns their average into the gradient of the policy as it is now."""
    # Old (.5, .5) drew each token once; the policy is now (.8, .2), A = 1, -1. On-policy, token i has the
    # gradient -p_i*A_i: -.8, +.2. From the old samples: -(p_i/.5)*A_i / 2 rows, the same.
    new = [[math.log(0.8)], [math.log(0.2)]]
    assert_near(run_loss(cispo_loss, new, [[-LN2], [-LN2]], [1.0, -1.0], clip=5.0)[1], [[-0.8], [0.2]])
    assert_near(run_loss(cispo_loss, new, new, [1.0, -1.0], clip=5.0)[1], [[-0.5], [0.5]])  # old forgotten


def test_question_2_what_detach_does():
    """What does clamped_ratio.detach() do? It makes the ratio a constant weight. Else d(r*new) = r*(1 + new):
    for every token less likely than 1/e the update would turn round."""
    for old in (-1.0, -3.0):    # -r*A = -.5 wherever the token stood; undetached: +.3466 and +1.3466
        assert_near(one_token(cispo_loss, 0.5, 1.0, old=old)[1], -0.5)


def test_question_3_which_variable_carries_the_gradient():
    """Through which variable does CISPO's policy gradient flow? Through per_token_logps, log pi itself, not
    through the ratio as GRPO's does."""
    for loss_of, through_ratio in ((cispo_loss, False), (grpo_loss, True)):
        new, old = torch.tensor([[-0.9]], requires_grad=True), torch.tensor([[-1.0]], requires_grad=True)
        loss = loss_of(new, old, None, torch.ones(1), torch.ones(1, 1), CLIP[loss_of], 0.0)
        by_new, by_old = torch.autograd.grad(loss, (new, old), allow_unused=True)
        assert_near(by_new, [[-1.1052]])                    # -r = -e^.1 in both
        assert (by_old is not None) == through_ratio        # only the ratio holds old


@both
def test_question_4_why_one_advantage_multiplies_every_token(loss_of):
    """Why may advantages.unsqueeze(1) multiply every token? One reward judges the whole completion, so its
    tokens share one A: [N,1] spreads along R. A bare [N] would spread along N, silently where N = R."""
    # -A_i / (2 tokens * 2 rows) = -.25 in row 0, +.5 in row 1; wrongly spread, these would be the columns.
    new = [[-1.0, -1], [-1, -1]]
    assert_near(run_loss(loss_of, new, new, [1.0, -2.0])[1], [[-0.25, -0.25], [0.5, 0.5]])


def test_question_5_what_cispo_and_grpo_share():
    """Which parts do CISPO and GRPO share? Advantages, ratio, KL, mask and mean; the policy term differs,
    but where r = 1 its gradient does not."""
    rewards, k = torch.tensor([0.1, 0.9, 0.3, 0.3]), torch.linspace(-2, 2, 9)
    assert torch.equal(grpo.group_advantages(rewards, 2), cispo.group_advantages(rewards, 2))
    assert torch.equal(grpo.token_kl(-k, k), cispo.token_kl(-k, k))
    # A token's gradient is -A + beta*(1 - e^k) = -A - .5 for k = ln 2, beta = .5. Lengths 1 and 2, 2 rows:
    # (-1 - .5) / (1*2) = -.75 and (1 - .5) / (2*2) = .125.
    new, ref = [[-1.0, -1], [-1, -1]], [[LN2 - 1] * 2] * 2
    for loss_of in CLIP:
        _, gradient = run_loss(loss_of, new, new, [1.0, -1.0], [[1, 0], [1, 1]], ref, 0.5)
        assert_near(gradient, [[-0.75, 0], [0.125, 0.125]])


def test_question_6_why_the_gradient_is_zero_beyond_the_clamp():
    """Why may the ratio's gradient be 0 once torch.clamp is at its bound? The output is that bound then, and
    no longer moves with the ratio. "May": where min chooses the ratio itself, it does move."""
    for ratio in (1.5, 1.6):
        assert_near(one_token(grpo_loss, ratio, 1.0), [-1.2, 0.0])      # the ratio moved, the loss did not
        assert_near(one_token(grpo_loss, ratio, -1.0), [ratio, ratio])  # min(-r, -1.2) = -r


@both
@pytest.mark.parametrize("A, probability", [(1.0, 0.7311), (-1.0, 0.2689), (0.0, 0.5)])
def test_question_7_why_an_advantage_without_gradient_moves_the_policy(loss_of, A, probability):
    """No gradient flows back through A; why does it still steer the policy? It is the factor in front of the
    gradient of log pi: its sign says up or down, its size how far."""
    # Logits (0, 0), token 0, r = 1: d log pi / d logits = (.5, -.5). One step of descent with rate 1 gives
    # (A/2, -A/2), so p = sigmoid(A).
    logits, A = torch.zeros(2, requires_grad=True), torch.tensor([A])
    new = logits.log_softmax(0)[:1, None]
    loss_of(new, new.detach(), None, A, torch.ones(1, 1), CLIP[loss_of], 0.0).backward()
    assert not A.requires_grad
    assert_near((logits - logits.grad).softmax(0)[0], probability)


# ---------------------------------------------------------------- grpo.py against cispo.py

def without_objective(name):
    """A script without its loss, its clip option and comments on it, its name, and alignment inside lines."""
    text = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    functions = {f.name: f for f in ast.parse(text).body if isinstance(f, ast.FunctionDef)}
    dropped = [s for s in functions["parse_args"].body
               if re.search(r"--epsilon|args\.epsilon", ast.get_source_segment(text, s))]
    dropped += functions[f"{name}_loss"], functions["clipped_tokens"]
    lines = [line for n, line in enumerate(text.split("\n"), start=1) if not re.match(" *#.*epsilon", line)
             and not any(node.lineno <= n <= node.end_lineno for node in dropped)]
    lines[0] = '"""'                                        # the first docstring line names the paper
    text = re.sub("GRPO|CISPO", "NAME", "\n".join(lines).replace(name, "NAME"))
    return re.sub(r"(?<=\S) +", " ", text.replace("epsilon_high", "epsilon"))


def test_the_two_scripts_differ_in_the_objective_alone():
    ours, theirs = without_objective("grpo"), without_objective("cispo")
    assert [line.strip() for line in ours.split("\n")] == [line.strip() for line in theirs.split("\n")]
    assert ast.dump(ast.parse(ours)) == ast.dump(ast.parse(theirs))         # indentation included
    assert len(ours) > 10_000


# ---------------------------------------------------------------- distillation (cases 24-30)

def logits_of(*probabilities):
    """[1,2,V] logits whose position 0 has these probabilities; position 1 predicts nothing."""
    row = torch.tensor(probabilities).log()
    return torch.stack([row, torch.zeros_like(row)])[None]


TEACHER, STUDENT = (.5, .25, .25), (.8, .1, .1)
LABEL = torch.tensor([[-100, 0]])       # position 0 is asked for token 0


@pytest.mark.parametrize("divergence, weight, value", [
    ("forward", .5, .2231),     # .5 ln(.5/.8) + 2 * .25 ln(.25/.1) = -.2350 + .4581
    ("reverse", .5, .1927),     # .8 ln(.8/.5) + 2 * .1 ln(.1/.25) = .3760 - .1833
    ("jsd", .5, .0507),         # mix (.65,.175,.175): .5 * .04716 + .5 * .05419
    ("jsd", .25, .0396)])       # mix .25 t + .75 s = (.725,.1375,.1375): .25 * .11314 + .75 * .01506
def test_divergences_at_hand_computed_values(divergence, weight, value):
    """Fails if teacher and student are swapped (forward and reverse differ, so do the mixtures)."""
    loss, ce, kl = distillation_loss(logits_of(*STUDENT), logits_of(*TEACHER), LABEL, 0.0, 1.0, divergence,
                                     weight)
    assert kl.item() == pytest.approx(value, abs=1e-4)
    assert loss.item() == pytest.approx(value, abs=1e-4)            # alpha 0: nothing of the labels
    assert ce.item() == pytest.approx(.2231, abs=1e-4)              # -ln .8, shown all the same


def test_ce_trains_the_label_and_kl_the_distribution():
    """README question 1. Gradient of CE: softmax(s) - onehot; of KL: softmax(s) - softmax(t), label
    unseen.
    """
    student = logits_of(*STUDENT).requires_grad_()
    for alpha, label, gradient in ((1.0, 1, (.8, -.9, .1)), (0.0, 1, (.3, -.15, -.15)), (0.0, 0, (.3, -.15,
                                                                                                  -.15)),
                                   (0.25, 1, (.425, -.3375, -.0875))):      # a quarter CE, three quarters KL
        loss, _, _ = distillation_loss(student, logits_of(*TEACHER), torch.tensor([[-100, label]]), alpha,
                                       1.0)
        grad, = torch.autograd.grad(loss, student)
        torch.testing.assert_close(grad[0, 0], torch.tensor(gradient))
        assert grad[0, 1].abs().max() == 0


def test_temperature_softens_and_t_squared_keeps_the_gradient():
    """README question 2. At T = 1000 softmax(s/T) is 1/3 + (s - mean)/(3T): the gradient T*(difference) tends
    to (s - t)/3, as large as at T = 1, where it is softmax(1,0,-1) - 1/3. Without T^2 it would be a
    millionth.
    """
    student = torch.tensor([[[1., 0, -1], [0, 0, 0]]], requires_grad=True)
    teacher = torch.zeros(1, 2, 3)
    for T, gradient in ((1.0, (.3319, -.0886, -.2433)), (1000.0, (1 / 3, 0, -1 / 3))):
        loss, _, _ = distillation_loss(student, teacher, LABEL, 0.0, T)
        grad, = torch.autograd.grad(loss, student)
        torch.testing.assert_close(grad[0, 0], torch.tensor(gradient), atol=1e-3, rtol=0)
    # Softer: a teacher of (4, 0) puts .0180 on the second token at T = 1 and .1192 at T = 2; a student at (0,
    # 0) then has KL = ln 2 - H(teacher): .6931 - .0904 = .6028, and 2^2 * (.6931 - .3653) = 1.3114.
    teacher = torch.tensor([[[4., 0], [0, 0]]])
    for T, value in ((1.0, .6028), (2.0, 1.3114)):
        assert distillation_loss(torch.zeros(1, 2, 2), teacher, LABEL, 0.0,
                                 T)[2].item() == pytest.approx(value, abs=1e-3)


def test_gradient_is_t_times_the_difference_of_softmaxes_over_n():
    """T = 2, two trained tokens: T * (softmax(s/T) - softmax(t/T)) / 2, by hand from 2*ln p logits (p at T =
    2).
    """
    student = 2 * torch.tensor([[STUDENT, STUDENT, STUDENT]]).log()         # softmax(s/2) is STUDENT
    teacher = 2 * torch.tensor([[TEACHER, TEACHER, TEACHER]]).log()
    student.requires_grad_()
    loss, _, _ = distillation_loss(student, teacher, torch.tensor([[-100, 1, 2]]), 0.0, 2.0)
    grad, = torch.autograd.grad(loss, student)
    by_hand = torch.tensor([.3, -.15, -.15])                                # 2 * (.3, -.15, -.15) / 2
    torch.testing.assert_close(grad[0], torch.stack([by_hand, by_hand, 0 * by_hand]))


def test_equal_teacher_and_student_give_zero_and_no_gradient():
    student = torch.randn(2, 4, 5, requires_grad=True)
    labels = torch.tensor([[-100, 1, 2, 3], [-100, -100, 4, 0]])
    for divergence in ("forward", "reverse", "jsd"):
        loss, _, kl = distillation_loss(student, student.detach().clone(), labels, 0.0, 1.5, divergence)
        grad, = torch.autograd.grad(loss, student)
        assert abs(kl.item()) < 1e-6 and grad.abs().max() < 1e-6


def test_labels_are_shifted_inside_and_masked_positions_get_no_gradient():
    """[-100,-100,a,b,-100]: positions 1 and 2 predict a and b; nothing else matters, whatever stands
    there.
    """
    student = torch.zeros(1, 5, 4)
    student[0, 1, 2], student[0, 2, 3] = 50.0, 50.0     # sure of a = 2 at position 1, of b = 3 at position 2
    student.requires_grad_()
    teacher = torch.zeros(1, 5, 4)
    labels = torch.tensor([[-100, -100, 2, 3, -100]])
    assert distillation_loss(student, None, labels, 1.0, 1.0)[0].item() < 1e-6
    loss, _, _ = distillation_loss(student, teacher, labels, 0.5, 1.0)
    grad, = torch.autograd.grad(loss, student)
    assert grad[0, [0, 3, 4]].abs().max() == 0 and grad[0, 1].abs().max() > .1 and grad[0, 2].abs().max() > .1
    garbage = student.detach().clone()
    garbage[0, [0, 3, 4]] = float("nan")
    assert distillation_loss(garbage, teacher, labels, 0.5, 1.0)[0].item() == pytest.approx(loss.item())


def test_mean_is_over_trained_tokens_not_over_rows_or_vocabulary():
    """One row with one token at CE 1, one row with three at CE 3: (1 + 3*3)/4 = 2.5, whatever V is.
    CE of label 0 under (0, x) is ln(1 + e^x): x = ln(e - 1) gives 1, ln(e^3 - 1) gives 3; -1e9 is out of the
    way.
    """
    for V in (2, 7):
        logits = torch.full((2, 4, V), -1e9)
        logits[..., 0] = 0
        logits[0, :, 1], logits[1, :, 1] = math.log(math.e - 1), math.log(math.e ** 3 - 1)
        labels = torch.tensor([[-100, 0, -100, -100], [-100, 0, 0, 0]])
        assert distillation_loss(logits, None, labels, 1.0, 1.0)[0].item() == pytest.approx(2.5, abs=1e-5)


def test_all_masked_batch_is_zero_and_finite():
    student = torch.randn(1, 3, 4, requires_grad=True)
    loss, ce, kl = distillation_loss(student, torch.randn(1, 3, 4), torch.full((1, 3), -100), 0.5, 2.0)
    grad, = torch.autograd.grad(loss, student)
    assert loss.item() == ce.item() == kl.item() == 0 and grad.abs().max() == 0


def test_a_wider_teacher_is_cut_before_the_softmax():
    """README question 3. Two more columns, one huge: cut first, they change nothing (case 28)."""
    wide = torch.cat([logits_of(*TEACHER), torch.tensor([[[30.0, 0.0], [0.0, 0.0]]])], dim=-1)
    assert distillation_loss(logits_of(*STUDENT), wide, LABEL, 0.0, 1.0)[2].item() == pytest.approx(.2231,
                                                                                                    abs=1e-4)


def test_a_narrower_teacher_is_refused():
    with pytest.raises(InputError, match=r"\(2\).*\(3\)"):
        distillation_loss(logits_of(*STUDENT), torch.zeros(1, 2, 2), LABEL, 0.0, 1.0)


def test_the_teacher_gets_no_gradient():
    """README question 4. The teacher is a constant of the loss, even if its logits ask for a gradient."""
    student, teacher = logits_of(*STUDENT).requires_grad_(), logits_of(*TEACHER).requires_grad_()
    distillation_loss(student, teacher, LABEL, 0.5, 1.0)[0].backward()
    assert teacher.grad is None and student.grad is not None


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_chunks_and_micro_batches_equal_the_whole_in_value_and_gradient(divergence, monkeypatch):
    """7 + 4 trained tokens in chunks of 2, in two micro-batches, against distillation_loss at once (case
    29).
    """
    monkeypatch.setattr("rollout.LOGITS_AT_ONCE", 2 * 11)
    torch.manual_seed(0)
    head, teacher_head = torch.randn(11, 6, requires_grad=True), torch.randn(13, 8)
    hidden, teacher_hidden = torch.randn(2, 8, 6, requires_grad=True), torch.randn(2, 8, 8)
    labels = torch.randint(0, 11, (2, 8))
    labels[1, :4] = -100
    whole, _, _ = distillation_loss(hidden @ head.T, teacher_hidden @ teacher_head.T, labels, 0.3, 1.7,
                                    divergence)
    expected = torch.autograd.grad(whole, (hidden, head))
    parts = 0
    for row in (0, 1):
        trained = labels[row, 1:] != -100
        ce, kl = chunked_distillation_sums(hidden[row, :-1][trained], head, teacher_hidden[row, :-1][trained],
                                           teacher_head, labels[row, 1:][trained], 1.7, divergence, 0.5)
        parts = parts + (0.3 * ce + 0.7 * kl) / 11
    torch.testing.assert_close(parts, whole)
    for got, want in zip(torch.autograd.grad(parts, (hidden, head)), expected):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
