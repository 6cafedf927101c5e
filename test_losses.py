"""The math of the three scripts as a lesson: each number is worked out by hand, and then asked of the code.

    python -m pytest test_losses.py                     # seconds on one CPU core
    python -m pytest test_losses.py -k question -v      # the seven questions about CISPO

Old log-probs are -1 unless said; epsilon is .2 and CISPO's cap 1.2, so both clip a ratio of 1.5 to 1.2.
Letters: N completions, R response length, G completions of one prompt, A advantage, r = new/old the ratio,
new, old and ref the log-probs of a token, k = ref - new, p and q laws over a vocabulary of V, T temperature.
"""
import ast
import itertools
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
from model import MiniMind, MiniMindConfig
from rollout import generate, micro_batches, per_token_logps
from support import InputError

torch.set_num_threads(1)
CLIP = {grpo_loss: 0.2, cispo_loss: 1.2}
both = pytest.mark.parametrize("loss_of", CLIP)
LN2 = math.log(2)


def assert_near(actual, expected, tolerance=1e-4):
    torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(expected), atol=tolerance, rtol=0,
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


# ---------------------------------------------------------------- the seven questions about CISPO

def test_question_1_why_cispo_still_needs_old_logps():
    """Why does CISPO still need the old log-probs? The old policy drew the completions: new/old is the weight
    that turns their average into the gradient of the policy as it is now."""
    # Old (.5, .5) drew each token once; the policy is now (.8, .2), A = 1, -1. On-policy, token i has the
    # gradient -p_i*A_i: -.8, +.2. From the old samples: -(p_i/.5)*A_i / 2 rows, the same.
    new = [[math.log(0.8)], [math.log(0.2)]]
    assert_near(run_loss(cispo_loss, new, [[-LN2], [-LN2]], [1.0, -1.0], clip=5.0)[1], [[-0.8], [0.2]])
    assert_near(run_loss(cispo_loss, new, new, [1.0, -1.0], clip=5.0)[1], [[-0.5], [0.5]])  # old forgotten


@pytest.mark.parametrize("old, ratio, slope, undetached", [
    # A = 1. The constant weight w = min(r, 1.2) gives -w*new the slope -w, wherever new = old + ln r stands.
    # Undetached, -r*new has the slope -(r'*new + r) = -r*(1 + new), since r' = r; at the cap r' is 0.
    (-0.2, 0.5, -0.5, -0.0534),     # new = -.8931: little of the push is left
    (-1.0, 1.0, -1.0, 0.0),         # new = -1: a token of probability 1/e learns nothing
    (-1.0, 0.5, -0.5, 0.3466),      # new = -1.6931: a rarer one is pushed the wrong way
    (-3.0, 0.5, -0.5, 1.3466),      # new = -3.6931: the harder the rarer
    (-3.0, 1.5, -1.2, -1.2)])       # capped: the same
def test_question_2_what_detach_does(old, ratio, slope, undetached):
    """What does clamped_ratio.detach() do? It makes the ratio a constant weight: how hard to push log pi, not
    where to. Without it a good token less likely than 1/e would be pushed down."""
    new = torch.tensor(old + math.log(ratio), requires_grad=True)
    loss = -torch.exp(new - old).clamp(max=1.2) * new                               # the formula, undetached
    assert_near([loss.item(), slope], one_token(cispo_loss, ratio, 1.0, old))       # one value, two slopes
    assert_near(torch.autograd.grad(loss, new)[0], undetached)


def test_question_3_which_variable_carries_the_gradient():
    """Through which variable does CISPO's policy gradient flow? Through per_token_logps, log pi itself, not
    through the ratio as GRPO's does."""
    # Only the ratio e^(new - old) holds old: a slope in old betrays a path through the ratio. With A = 1 and
    # r = e^.1 = 1.1052, GRPO's -r has the slopes -r in new and r in old; CISPO's -w*new has -w = -r and none.
    for loss_of, through_ratio in ((cispo_loss, False), (grpo_loss, True)):
        new, old = torch.tensor([[-0.9]], requires_grad=True), torch.tensor([[-1.0]], requires_grad=True)
        loss = loss_of(new, old, None, torch.ones(1), torch.ones(1, 1), CLIP[loss_of], 0.0)
        by_new, by_old = torch.autograd.grad(loss, (new, old), allow_unused=True)
        assert_near(by_new, [[-1.1052]])
        assert (by_old is not None) == through_ratio


@both
def test_question_4_why_one_advantage_multiplies_every_token(loss_of):
    """Why may advantages.unsqueeze(1) multiply every token? One reward judges the whole completion, so its
    tokens share one A: [N,1] spreads along R. A bare [N] would spread along N, silently where N = R."""
    # -A_i / (2 tokens * 2 rows) = -.25 in row 0, +.5 in row 1; wrongly spread, these would be the columns.
    new = [[-1.0, -1], [-1, -1]]
    assert_near(run_loss(loss_of, new, new, [1.0, -2.0])[1], [[-0.25, -0.25], [0.5, 0.5]])


def test_question_5_what_cispo_and_grpo_share():
    """Which parts do CISPO and GRPO share? Advantages, ratio, KL, mask and mean; the policy term differs, but
    where r = 1 its gradient does not."""
    x = torch.linspace(-2, 2, 8)
    assert torch.equal(grpo.group_advantages(x, 2), cispo.group_advantages(x, 2))
    assert torch.equal(grpo.token_kl(-x, x), cispo.token_kl(-x, x))
    # A token's gradient is -A + beta*(1 - e^k) = -A - .5 for k = ln 2, beta = .5. Lengths 1 and 2, 2 rows:
    # (-1 - .5) / (1*2) = -.75 and (1 - .5) / (2*2) = .125.
    new, ref = [[-1.0, -1], [-1, -1]], [[LN2 - 1] * 2] * 2
    for loss_of in CLIP:
        _, gradient = run_loss(loss_of, new, new, [1.0, -1.0], [[1, 0], [1, 1]], ref, 0.5)
        assert_near(gradient, [[-0.75, 0], [0.125, 0.125]])


def test_question_6_why_the_gradient_is_zero_beyond_the_clamp():
    """Why may the ratio's gradient be 0 once torch.clamp is at its bound? The output is that bound then, and
    no longer moves with the ratio. "May": where min chooses the ratio itself, it does move."""
    # A = 1: -min(1.5, 1.2) = -min(1.6, 1.2) = -1.2, a constant. A = -1: -min(-r, -1.2) = r, with slope r.
    for ratio in (1.5, 1.6):
        assert_near(one_token(grpo_loss, ratio, 1.0), [-1.2, 0.0])
        assert_near(one_token(grpo_loss, ratio, -1.0), [ratio, ratio])


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


# ---------------------------------------------------------------- what the gradient is on average: enumerated

# The policy p = softmax(logits) over three tokens, and the reward of each: E reward = .5 + 0 + .75 = 1.25.
# With onehot_a = 1 at a: d log p_a / d logits = onehot_a - p, so d p_a / d logits = p_a * (onehot_a - p).
P, REWARD = torch.tensor([.5, .25, .25]), torch.tensor([1.0, 0, 3])
GRADIENT = torch.tensor([.125, .3125, -.4375])      # of -E reward: the first test below derives it


def expected_gradient(loss_of, A_of, G=1):
    """d loss / d logits, averaged over every group of G tokens with the probability that p draws it."""
    logits, mean = P.log().requires_grad_(), 0
    for drawn in map(list, itertools.product(range(3), repeat=G)):
        new = logits.log_softmax(0)[drawn, None]                                    # [G,1]
        loss = loss_of(new, new.detach(), None, A_of(REWARD[drawn]), torch.ones(G, 1), CLIP[loss_of], 0.0)
        mean = mean + P[drawn].prod() * torch.autograd.grad(loss, logits)[0]
    return mean


def slopes(value_of):
    """How value_of(p) moves with each logit: measured by moving it a little, without autograd."""
    at, steps = P.double().log(), 1e-4 * torch.eye(3).double()
    return torch.stack([value_of((at + h).softmax(0)) - value_of((at - h).softmax(0)) for h in steps]) / 2e-4


@both
def test_the_loss_on_average_climbs_the_expected_reward(loss_of):
    """The score function: a loss that sees one drawn token has, on average, the gradient of -E reward."""
    # d E reward / d logits = sum_a reward_a * p_a * (onehot_a - p), entry by entry p * (reward - E reward):
    # (.5*-.25, .25*-1.25, .25*1.75) = (-.125, -.3125, .4375). Token 0 falls: its reward is below the mean.
    assert_near(slopes(lambda p: p @ REWARD.double()), -GRADIENT)
    # Where a is drawn, with probability p_a, the loss has the gradient -reward_a * (onehot_a - p): on average
    # -.5 * 1 * (.5, -.25, -.25) - .25 * 0 - .25 * 3 * (-.5, -.25, .75) = (.125, .3125, -.4375).
    assert_near(expected_gradient(loss_of, lambda rewards: rewards), GRADIENT)


@both
def test_a_baseline_changes_no_expected_gradient(loss_of):
    """Take any b off every reward: on average that adds sum_a p_a * b * (onehot_a - p) = b * (p - p) = 0."""
    # b = 1 leaves the rewards 0, -1, 2: -.5 * 0 + .25 * 1 * (-.5, .75, -.25) - .25 * 2 * (-.5, -.25, .75)
    # = (-.125, .1875, -.0625) + (.25, .125, -.375) = (.125, .3125, -.4375), what b = 0 gave above.
    for b in (1, 1.25, -10):
        assert_near(expected_gradient(loss_of, lambda rewards: rewards - b), GRADIENT)
    # A group's mean holds the row's own reward: reward - mean = (1 - 1/G) * (reward - the others' mean). The
    # others' mean is such a b: the average gradient keeps its direction and is 1 - 1/G as long.
    assert_near(expected_gradient(loss_of, lambda rewards: rewards - rewards.mean(), G=3), 2 / 3 * GRADIENT)


def test_k3_has_the_kls_value_and_the_other_kls_gradient():
    """k3, exp(k) - k - 1, is KL(p || q) on average; its gradient, the tokens once drawn, is KL(q || p)'s."""
    # k = ln(q/p) = (-ln 2, ln 2, 0). sum p*(q/p - ln(q/p) - 1) = 1 + KL - 1 with KL = sum p*ln(p/q) =
    # (.5 - .25) * ln 2 = .1733. The slope of k3 in new is 1 - e^k = 1 - q/p, so its gradient is on average
    # sum_a p_a*(1 - q_a/p_a)*(onehot_a - p) = sum_a (p_a - q_a)*(onehot_a - p) = p - q. KL(q || p) = const -
    # sum q*ln p has the same one: -sum_a q_a*(onehot_a - p) = p - q.
    q, logits = torch.tensor([.25, .5, .25]), P.log().requires_grad_()
    k3 = P @ token_kl(logits.log_softmax(0), q.log())       # P is a constant here: the tokens are drawn
    assert_near(k3, 0.1733)
    assert_near(torch.autograd.grad(k3, logits)[0], [.25, -.25, 0])
    assert_near(slopes(lambda p: q.double() @ (q / p).log()), [.25, -.25, 0])
    # KL(p || q) has p*(ln(p/q) - KL) = ln 2 * (.5*.75, .25*-1.25, .25*-.25): it counts, too, that p decides
    # which tokens are drawn. Both are 0 where p = q.
    assert_near(slopes(lambda p: p @ (p / q).log()), [.2599, -.2166, -.0433])


# ---------------------------------------------------------------- advantages and rewards

def tiny_model():
    """A MiniMind with weights large enough that every prompt gives another distribution."""
    torch.manual_seed(0)
    model = MiniMind(MiniMindConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                    num_key_value_heads=1, intermediate_size=8))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return model.eval()


def tiny_batch(prompt_lengths, lengths):
    """Random prompts (N lists of ids), completion_ids [N,R], and a mask [N,R] of the given lengths."""
    mask = torch.arange(max(*lengths, 1)) < torch.tensor(lengths)[:, None]
    return [torch.randint(11, (n,)).tolist() for n in prompt_lengths], torch.randint(11, mask.shape), mask


@pytest.mark.parametrize("rewards, G, A", [
    ([1.0, 0, 1, 1], 2, [0.9998, -0.9998, 0, 0]),   # [1,0]: +-.5 / (.5 + 1e-4); interleaved: [1,1], [0,1]
    ([0.0, 0, 1, 1], 4, [-0.9998, -0.9998, 0.9998, 0.9998]),    # std .5; the unbiased, sqrt(1/3), gives .8659
    ([0, 1, 0, 0.1], 2, [-0.9998, 0.9998, -0.9980, 0.9980]),    # +-.05 / (.05 + 1e-4); undivided +-.5, +-.05
    ([0, 0.0002], 2, [-0.5, 0.5])])                 # +-.0001 / (.0001 + 1e-4): only noise is held back
def test_the_population_std_lets_groups_of_any_spread_pull_alike(rewards, G, A):
    """Each group is measured in its own unit. A tenth of the difference trains as hard, worth it or not."""
    assert_near(group_advantages(torch.tensor(rewards), G), A, 1e-5)


def test_a_group_is_neighbouring_rows_of_one_prompt():
    model, (a, b) = tiny_model(), ([3, 4], [5, 6, 7])
    rollout = generate(model, [a, b], 2, 4, eos_ids=[1], generator=torch.Generator().manual_seed(0))
    assert rollout.prompts == [a, a, b, b]
    scored = per_token_logps(model, [a, a, b, b], rollout.completion_ids, rollout.completion_mask)
    assert_near(rollout.per_token_logps, scored, 1e-5)          # the sampler saw the same prompts


@both
@pytest.mark.parametrize("rewards, lengths", [
    *(([value] * 8, [1, 2, 3, 4] * 2) for value in (0.2, 0.7, 0.9)),    # an fp32 mean leaves |A| > 1e-4
    ([0.0, 1] * 4, [0] * 8)])                                           # nothing was written
def test_a_group_of_equal_rewards_or_without_tokens_changes_no_weight(loss_of, rewards, lengths):
    A = group_advantages(torch.tensor(rewards), 8)
    model, (prompts, ids, mask) = tiny_model(), tiny_batch([2] * 8, lengths)
    assert not A.any() or not mask.any()
    before = [p.detach().clone() for p in model.parameters()]
    new = per_token_logps(model, prompts, ids, mask)
    loss = loss_of(new, new.detach(), new.detach(), A, mask, CLIP[loss_of], 0.1)
    loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0).step()  # Adam blows a whisper up to lr
    assert loss == 0 and all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_an_error_naming_term_and_completion(monkeypatch, value):
    monkeypatch.setattr(reward, "length_reward", lambda text: value if text == "odd" else 0.5)
    with pytest.raises(InputError, match="'length'.*'odd'"):
        reward.compute_rewards(["fine", "odd"], ["1", "1"], ["", ""])
    assert reward.compute_rewards(["fine"], ["1"], [""])[0].isfinite().all()


# ---------------------------------------------------------------- the loss

@pytest.mark.parametrize("ratio, A, cap, of_grpo, of_cispo", [
    # (loss, slope in new). GRPO: -min(r*A, clamp(r, .8, 1.2)*A), and -r*A, or 0 where the clamp was chosen.
    # CISPO: -w*A*new, new = ln r - 1, and -w*A with the weight w = min(r, cap) held constant.
    (1.0, 1, 1.2, (-1.0, -1.0), (1.0, -1.0)),       # new = -1; inside the clip both slopes are -r*A
    (1.1, 1, 1.2, (-1.1, -1.1), (0.9952, -1.1)), (1.1, -1, 1.2, (1.1, 1.1), (-0.9952, 1.1)),    # -.9047
    (0.9, 2, 1.2, (-1.8, -1.8), (1.9896, -1.8)), (0.9, -2, 1.2, (1.8, 1.8), (-1.9896, 1.8)),    # -1.1054
    (0.5, 1, 1.2, (-0.5, -0.5), (0.8466, -0.5)),    # min(.5, .8) = .5: free to rise; new = -1.6931
    (0.5, -1, 1.2, (0.8, 0.0), (-0.8466, 0.5)),     # min(-.5, -.8) = -.8: clamped; CISPO has no lower bound
    (1.5, 1, 1.2, (-1.2, 0.0), (0.7134, -1.2)),     # min(1.5, 1.2) = 1.2: clamped; capped tokens still learn
    (1.5, -1, 1.2, (1.5, 1.5), (-0.7134, 1.2)),     # min(-1.5, -1.2) = -1.5: free to fall; new = -.5945
    (0.01, 2, 1.2, (-0.02, -0.02), (0.1121, -0.02)),            # new = -5.6052
    (6.0, 1, 5.0, (-1.2, 0.0), (-3.9588, -5.0))])   # new = .7918; the cap is 5, not 1 + 5
def test_grpo_equals_cispo_to_first_order_until_the_clip_binds(ratio, A, cap, of_grpo, of_cispo):
    """Inside the clip values differ, slopes agree. Where it binds, GRPO's slope is 0, CISPO's is capped."""
    assert_near(one_token(grpo_loss, ratio, A), of_grpo)
    assert_near(one_token(cispo_loss, ratio, A, clip=cap), of_cispo)
    token = torch.tensor([[math.log(ratio)]]), torch.zeros(1, 1), torch.tensor([A])
    assert grpo.token_loss(*token, 0.2)[1] == (of_grpo[1] == 0)
    assert cispo.token_loss(*token, cap)[1] == (ratio > cap)


@both
@pytest.mark.parametrize("k, kl, slope", [
    (0.0, 0.0, 0.0),            # e^k - k - 1; its slope in new is 1 - e^k: descent moves new towards ref
    (LN2, 0.3069, -1.0),        # 2 - .6931 - 1; 1 - 2: new is below ref and rises
    (-LN2, 0.1931, 0.5),        # .5 + .6931 - 1; 1 - .5: new is above ref and falls
    (-1.0, 0.3679, 0.6321)])    # new -1, ref -2: .3679 + 1 - 1; 1 - .3679
def test_kl_is_never_negative_and_pulls_the_policy_to_the_reference(loss_of, k, kl, slope):
    assert_near(token_kl(torch.tensor(-1.0), torch.tensor(k - 1)), kl)
    assert token_kl(torch.linspace(-8, 0, 4001), torch.tensor(k - 1)).min() > -1e-6     # but for rounding
    for A in (0.0, 1.0):        # alone, then beside the policy term: -r*A = -1, its value -1 or (CISPO) +1
        loss, by_new = run_loss(loss_of, [[-1.0]], [[-1.0]], [A], ref=[[k - 1]], beta=0.1)
        assert_near([loss, by_new.item()], [0.1 * kl + (-A if loss_of is grpo_loss else A), 0.1 * slope - A])


@pytest.mark.parametrize("script, clip, clipped", [(grpo, 0.2, [1, 0, 1]), (cispo, 1.2, [1, 1, 0])])
def test_token_stats_are_those_of_the_valid_tokens(script, clip, clipped):
    # Ratios 1.5 (A = 1), 1.5 and .5 (A = -1); garbage is masked. If ref = old, k = -ln r: KL 1/r + ln r - 1.
    new = torch.tensor([[math.log(1.5) - 1, math.nan], [math.log(1.5) - 1, -LN2 - 1]])
    old, A = torch.tensor([[-1.0, math.nan], [-1, -1]]), torch.tensor([1.0, -1])
    for ref, kl in ((old, [0.0721, 0.0721, 0.3069]), (None, [0.0, 0, 0])):
        stats = script.token_stats(new, old, ref, A, torch.tensor([[True, False], [True, True]]), clip)
        assert_near(stats, [[1.5, 1.5, 0.5], kl, clipped])


@both
@pytest.mark.parametrize("new, A, mask, values, gradient", [
    # A fresh policy, r = 1: -mean(A) and -mean(A*-1) are 0, yet it learns: -A / (2 tokens * 4 rows).
    ([[-1.0, -1]] * 4, [-1.0, -1, 1, 1], [[1, 1]] * 4, (0, 0), [[.125] * 2] * 2 + [[-.125] * 2] * 2),
    # Lengths 1 and 3: -A / (length * 2 rows) = -1 and 1/6. Over all 4 tokens it would be -.5 and .25.
    # GRPO: rows -2, +1 -> -.5 (tokens: +.25). CISPO: rows 2, mean(-1,-2,-6) = -3 -> -.5 (tokens: -1.75).
    ([[-1.0, -1, -1], [-1, -2, -6]], [2.0, -1], [[1, 0, 0], [1] * 3], (-.5, -.5), [[-1, 0, 0], [1 / 6] * 3]),
    ([[-1.0], [-1]], [1.0, 1], [[1], [0]], (-.5, .5), [[-.5], [0]])])       # an empty row counts, with loss 0
def test_the_mean_is_over_a_rows_tokens_then_over_rows(loss_of, new, A, mask, values, gradient):
    loss, measured = run_loss(loss_of, new, new, A, mask)
    assert_near(loss, values[loss_of is cispo_loss], 1e-6)
    assert_near(measured, gradient)


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
    logps = per_token_logps(model, prompts, ids, mask).detach()
    old, ref = (logps + 0.3 * torch.randn(mask.shape) for _ in range(2))    # some get clipped

    def gradients(rows):
        new = per_token_logps(model, [prompts[i] for i in rows], ids[rows], mask[rows])
        loss = loss_of(new, old[rows], ref[rows], A[rows], mask[rows], CLIP[loss_of], 0.1)
        return torch.autograd.grad(loss * len(rows) / 4, list(model.parameters()))

    parts = micro_batches([3, 2, 4, 9], token_budget)
    assert [len(rows) for rows in parts] == sizes and sorted(sum(parts, [])) == [0, 1, 2, 3]
    for whole, *of_parts in zip(gradients([0, 1, 2, 3]), *map(gradients, parts)):
        assert whole.any()
        assert_near(sum(of_parts), whole, 1e-6)


def test_the_two_scripts_differ_in_the_objective_alone():
    rest = []
    for name in ("grpo", "cispo"):
        text = (Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8").replace(name, "NAME")
        text = re.sub("GRPO|CISPO", "NAME", text).replace("epsilon_high", "epsilon")
        for objective in (r'(?<=^""")NAME[^\n]*', r"def token_loss\(.*?\n\n\n",       # the paper; the term
                          r'(?<=beta\):\n) +""".*?"""\n',           # the docstring of NAME_loss
                          r' *(# |add\("--)epsilon[^\n]*\n'):       # the clip option, and comments on it
            text = re.sub(objective, "", text, flags=re.DOTALL)
        rest.append(re.sub(r"(?<=\S) +|(?<=,)\n +", " ", text))     # a name's length moves spaces and breaks
    ours, theirs = rest
    assert [line.strip() for line in ours.split("\n")] == [line.strip() for line in theirs.split("\n")]
    assert ast.dump(ast.parse(ours)) == ast.dump(ast.parse(theirs))         # indentation included
    assert len(ours) > 10_000


# ---------------------------------------------------------------- distillation

# logits [1,2,3] whose position 0 has these probabilities; position 1 predicts nothing
TEACHER, STUDENT = (torch.tensor([[law, (1, 1, 1)]]).log() for law in ((.5, .25, .25), (.8, .1, .1)))
LABEL = [[-100, 0]]             # position 0 is asked for token 0


def distil(student, teacher, labels, alpha=0.0, T=1.0, *divergence):
    """(loss, CE, KL) and the gradient with respect to the student's logits."""
    student = student.clone().requires_grad_()
    values = distillation_loss(student, teacher, torch.tensor(labels), alpha, T, *divergence)
    return [value.item() for value in values], torch.autograd.grad(values[0], student)[0]


@pytest.mark.parametrize("divergence, weight, value", [
    ("forward", .5, .2231),     # .5 ln(.5/.8) + 2 * .25 ln(.25/.1) = -.2350 + .4581
    ("reverse", .5, .1927),     # .8 ln(.8/.5) + 2 * .1 ln(.1/.25) = .3760 - .1833
    ("jsd", .5, .0507),         # mix (.65,.175,.175): .5 * .04716 + .5 * .05419
    ("jsd", .25, .0396)])       # mix .25 t + .75 s = (.725,.1375,.1375): .25 * .11314 + .75 * .01506
def test_divergences_at_hand_computed_values(divergence, weight, value):
    """Teacher and student swapped would show: forward and reverse differ, and so do the mixtures."""
    values, _ = distil(STUDENT, TEACHER, LABEL, 0.0, 1.0, divergence, weight)
    assert_near(values, [value, .2231, value])      # alpha 0: nothing of the labels, but CE -ln .8 is shown
    logits, labels = torch.randn(2, 4, 5), [[-100, 1, 2, 3], [-100, -100, 4, 0]]
    (_, _, kl), gradient = distil(logits, logits, labels, 0.0, 1.5, divergence, weight)     # they agree
    assert abs(kl) < 1e-6 and gradient.abs().max() < 1e-6


@pytest.mark.parametrize("alpha, label, gradient", [
    (1.0, 1, (.8, -.9, .1)),                                        # CE: softmax(s) - onehot
    (0.0, 1, (.3, -.15, -.15)), (0.0, 0, (.3, -.15, -.15)),         # KL: softmax(s) - softmax(t), no label
    (0.25, 1, (.425, -.3375, -.0875))])                             # a quarter CE, three quarters KL
def test_ce_trains_the_label_and_kl_the_distribution(alpha, label, gradient):
    assert_near(distil(STUDENT, TEACHER, [[-100, label]], alpha)[1], [[gradient, (0.0, 0, 0)]], 1e-5)


def test_temperature_softens_and_t_squared_keeps_the_gradient():
    """Why T^2? The gradient shrinks twice by T: T divides the logits, and draws the softmaxes together."""
    # At T = 1000 softmax(s/T) is 1/3 + (s - mean)/(3T): the gradient T*(difference) tends to (s - t)/3, as
    # large as at T = 1, where it is softmax(1,0,-1) - 1/3. Without T^2 it would be a millionth.
    for T, gradient in ((1.0, (.3319, -.0886, -.2433)), (1000.0, (1 / 3, 0, -1 / 3))):
        _, measured = distil(torch.tensor([[[1., 0, -1], [0, 0, 0]]]), torch.zeros(1, 2, 3), LABEL, 0.0, T)
        assert_near(measured[0, 0], gradient, 1e-3)
    # T = 2, two trained tokens, logits 2 ln p: T * (softmax(s/T) - softmax(t/T)) / 2 = (.3, -.15, -.15).
    _, measured = distil(2 * STUDENT[:, [0, 0, 0]], 2 * TEACHER[:, [0, 0, 0]], [[-100, 1, 2]], 0.0, 2.0)
    assert_near(measured, [[(.3, -.15, -.15), (.3, -.15, -.15), (0, 0, 0)]], 1e-5)
    # Softer: a teacher of (4, 0) puts .0180 on the second token at T = 1 and .1192 at T = 2; a student at (0,
    # 0) then has KL = ln 2 - H(teacher): .6931 - .0904 = .6028, and 2^2 * (.6931 - .3653) = 1.3114.
    for T, value in ((1.0, .6028), (2.0, 1.3114)):
        (_, _, kl), _ = distil(torch.zeros(1, 2, 2), torch.tensor([[[4., 0], [0, 0]]]), LABEL, 0.0, T)
        assert_near(kl, value, 1e-3)


def test_the_teacher_is_cut_to_the_students_width_or_refused_and_gets_no_gradient():
    wide = torch.cat([TEACHER, torch.tensor([[[30.0, 0], [0, 0]]])], dim=-1).requires_grad_()
    student = STUDENT.clone().requires_grad_()
    loss, _, kl = distillation_loss(student, wide, torch.tensor(LABEL), 0.5, 1.0)
    loss.backward()
    assert_near(kl, .2231)      # the 30 is cut off before the softmax
    assert wide.grad is None and student.grad is not None
    with pytest.raises(InputError, match=r"\(2\).*\(3\)"):
        distil(STUDENT, torch.zeros(1, 2, 2), LABEL)


def test_labels_are_shifted_inside_and_masked_positions_get_no_gradient():
    # [-100,-100,a,b,-100]: positions 1 and 2 predict a and b; nothing else matters, whatever stands there.
    student, teacher, labels = torch.zeros(1, 5, 4), torch.zeros(1, 5, 4), [[-100, -100, 2, 3, -100]]
    student[0, 1, 2], student[0, 2, 3] = 50.0, 50.0     # sure of a = 2 at position 1, of b = 3 at position 2
    assert distil(student, None, labels, 1.0)[0][0] < 1e-6
    values, gradient = distil(student, teacher, labels, 0.5)
    assert gradient[0, [0, 3, 4]].abs().max() == 0 and gradient[0, [1, 2]].abs().amax(dim=1).min() > .1
    all_masked, no_gradient = distil(student, teacher, [[-100] * 5], 0.5, 2.0)
    assert all_masked == [0, 0, 0] and not no_gradient.any()
    student[0, [0, 3, 4]] = math.nan
    assert distil(student, teacher, labels, 0.5)[0] == values


@pytest.mark.parametrize("V", [2, 7])
def test_mean_is_over_trained_tokens_not_over_rows_or_vocabulary(V):
    # One row with one token at CE 1, one row with three at CE 3: (1 + 3*3)/4 = 2.5, whatever V is. The CE of
    # label 0 under (0, x) is ln(1 + e^x): x = ln(e - 1) gives 1, ln(e^3 - 1) gives 3; -1e9 is out of the way.
    logits = torch.full((2, 4, V), -1e9)
    logits[..., 0] = 0
    logits[0, :, 1], logits[1, :, 1] = math.log(math.e - 1), math.log(math.e ** 3 - 1)
    assert_near(distil(logits, None, [[-100, 0, -100, -100], [-100, 0, 0, 0]], 1.0)[0][0], 2.5, 1e-5)


@pytest.mark.parametrize("divergence", ["forward", "reverse", "jsd"])
def test_chunks_and_micro_batches_equal_the_whole_in_value_and_gradient(divergence, monkeypatch):
    # 7 + 4 trained tokens in chunks of 2, in two micro-batches, against distillation_loss at once
    monkeypatch.setattr("rollout.LOGITS_AT_ONCE", 2 * 11)
    torch.manual_seed(0)
    head, teacher_head = torch.randn(11, 6, requires_grad=True), torch.randn(13, 8)
    hidden, teacher_hidden = torch.randn(2, 8, 6, requires_grad=True), torch.randn(2, 8, 8)
    labels = torch.randint(0, 11, (2, 8))
    labels[1, :4] = -100
    logits, teacher_logits, parts = hidden @ head.T, teacher_hidden @ teacher_head.T, 0
    whole, _, _ = distillation_loss(logits, teacher_logits, labels, 0.3, 1.7, divergence)
    for h, t, y in zip(hidden[:, :-1], teacher_hidden[:, :-1], labels[:, 1:]):
        at = y != -100
        ce, kl = chunked_distillation_sums(h[at], head, t[at], teacher_head, y[at], 1.7, divergence, 0.5)
        parts = parts + (0.3 * ce + 0.7 * kl) / 11
    torch.testing.assert_close(parts, whole)
    for got, want in zip(*(torch.autograd.grad(loss, (hidden, head)) for loss in (parts, whole))):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
