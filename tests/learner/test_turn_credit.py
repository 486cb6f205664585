"""Credit of turns in the learner: gradients of hand-written losses, KL in rewards, and a value model of turns, from one
rank or two."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from qurl_ray.config.learner import LearnerConfig
from qurl_ray.learner.batching import plan, to_tensors
from qurl_ray.learner.critic import Credit
from qurl_ray.learner.learner import PolicyLearner, make_learner
from qurl_ray.learner.passes import Penalty
from qurl_ray.learner.scorer import MODEL_PREFIX, Scores
from qurl_ray.policy.load import load_model
from qurl_ray.rl.advantages import dr_grpo
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.rl.surrogate import cispo, gspo, ppo
from qurl_ray.types import Trajectory, TurnCredit
from tests.learner.test_penalties import perturbed
from tests.learner.test_torch_backend import groups
from tests.ranks import run_ranks

KL = 0.5


def turned(sample: Trajectory, group: int) -> Trajectory:
    """The sample in turns of one to three tokens; an environment said the first token of every third one."""
    rng = np.random.default_rng([len(sample.token_ids), int(sample.token_ids.sum()), group])
    sizes = rng.integers(1, 4, size=len(sample.token_ids))
    ends = np.unique(np.append(sizes.cumsum().clip(max=len(sample.token_ids)), len(sample.token_ids))).astype(np.int32)
    mask = np.ones(len(sample.token_ids), dtype=bool)
    for k, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        mask[start] = k % 3 < 2 or end - start == 1
    rewards = rng.choice([0.0, 0.5, 1.0], size=len(ends))
    turns = TurnCredit(ends=ends, rewards=rewards, advantages=rng.normal(size=len(ends)))
    return replace(sample, mask=mask, turns=turns, group=group, reward=float(rewards.sum()), advantage=0.0)


def played(count: int = 6, *, compared: bool = True) -> list[list[Trajectory]]:
    found = [[turned(s, p) for s in group] for p, group in enumerate(groups(count))]
    if compared:
        return found
    return [[replace(s, turns=replace(s.turns, advantages=None)) for s in group] for group in found]


def spans(sample: Trajectory) -> list[list[int]]:
    """Places in the answer of the tokens that the policy drew, by turn."""
    starts = [0, *sample.turns.ends[:-1].tolist()]
    return [
        [t for t in range(start, end) if sample.mask[t]] for start, end in zip(starts, sample.turns.ends, strict=True)
    ]


def learner(spec, settings: ObjectiveSettings, **more) -> PolicyLearner:
    return make_learner(load_model(spec), LearnerConfig(lr=1e-3), settings, temperature=1.0, total_updates=10, **more)


def passes_of(trained: PolicyLearner, share):
    return [trained._make_pass(samples) for samples in trained._shares(share)]


# --- gradients ----------------------------------------------------------------------------------------------------

LOW, HIGH, DUAL = 0.05, 0.08, 1.1
FORMS = {"ppo": (ppo, None), "gspo": (gspo, None), "tbpo": (gspo, DUAL), "cispo": (cispo, None)}


def moved_by(sample: Trajectory) -> torch.Tensor:
    """log(theta/p) of each token of the answer."""
    generator = torch.Generator().manual_seed(int(sample.token_ids.sum()))
    return 0.15 * torch.randn(len(sample.token_ids), generator=generator) + 0.02


def objective_by_hand(form: str, logprob, ratio: float, advantage: float):
    """What is maximised at a token whose ratio of probabilities, or of its answer's, is `ratio`; its gradient flows
    through `logprob`."""
    value = (logprob - logprob.detach()).exp() * ratio
    clipped = min(max(ratio, 1 - LOW), 1 + HIGH)
    if form == "cispo":
        return clipped * advantage * logprob
    if form == "tbpo" and advantage < 0 and ratio > DUAL:
        return torch.zeros(()) * logprob
    cut = ratio > 1 + HIGH if advantage > 0 else ratio < 1 - LOW
    return torch.zeros(()) * logprob if cut else value * advantage


@pytest.mark.sampled(3)
@pytest.mark.parametrize("loss_mean", ["token", "sequence"])
@pytest.mark.parametrize("form", FORMS)
def test_a_batch_with_advantages_of_turns_has_the_gradient_of_the_loss_by_hand(tiny_spec, form, loss_mean):
    function, dual = FORMS[form]
    settings = ObjectiveSettings(form=function, clip_low=LOW, clip_high=HIGH, dual_clip=dual, loss_mean=loss_mean)

    def gradient(chosen) -> dict[str, torch.Tensor]:
        trained = learner(tiny_spec, settings)
        (share,) = plan(chosen, updates=1, ranks=1, token_budget=60, seed=1)[0]
        passes = passes_of(trained, share)
        assert len(passes) > 2
        for one in passes:
            with torch.no_grad():
                one.prox_BT = Scores(*trained._policy(one.batch)).logprobs_BT.clone()
            for row, sample in enumerate(one.samples):
                one.prox_BT[row, len(sample.prompt_ids) : sample.length] -= moved_by(sample)
        trained._accumulate(passes, share.denominators, 1.0, None)
        return {name.removeprefix(MODEL_PREFIX): p.grad for name, p in trained._policy.named_parameters()}

    model, samples = load_model(tiny_spec).double(), [s for group in played() for s in group]
    loss, tokens = 0.0, sum(int(s.mask.sum()) for s in samples)
    for s in samples:
        ids = torch.tensor([*s.prompt_ids, *s.token_ids], dtype=torch.int64)
        logprobs = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[len(s.prompt_ids) - 1 :, 0]
        log_ratio, drawn = moved_by(s).tolist(), [t for span in spans(s) for t in span]
        mean = statistics.fmean(log_ratio[t] for t in drawn)
        for span, advantage in zip(spans(s), s.turns.advantages.tolist(), strict=True):
            for t in span:
                ratio = math.exp(mean if form in ("gspo", "tbpo") else log_ratio[t])
                value = objective_by_hand(form, logprobs[t], ratio, advantage)
                loss = loss - value / (tokens if loss_mean == "token" else len(drawn) * len(samples))
    loss.backward()
    found = gradient(played())
    flat = torch.cat([found[name].double().reshape(-1) for name, _ in model.named_parameters()])
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    assert (flat - expected).norm() <= 1e-3 * expected.norm()
    wrong = gradient([[replace(s, advantage=1.0, turns=None) for s in group] for group in played()])
    assert (torch.cat([g.double().reshape(-1) for g in wrong.values()]) - flat).norm() > 0.1 * flat.norm()


# --- KL in the reward ---------------------------------------------------------------------------------------------

PLAIN = ObjectiveSettings(clip_low=0.2, clip_high=0.2)
PENALTY = Penalty(coef=KL, estimator="k2", compare=dr_grpo, mode="turn")


def turn_advantages(trained: PolicyLearner, mini_batches) -> dict[str, list[float]]:
    """By uid and turn, the advantages with which a step would begin; each is that of all tokens of its turn."""
    passes = [passes_of(trained, mini_batch) for mini_batch in mini_batches]
    trained._before_the_first_update(passes)
    found = {}
    for one in (one for chosen in passes for one in chosen):
        for row, s in enumerate(one.samples):
            of_tokens = one.advantages[row, len(s.prompt_ids) : s.length].tolist()
            by_turn = [{of_tokens[t] for t in span} for span in spans(s)]
            assert all(len(values) == 1 for values in by_turn)
            assert not any(value for t, value in enumerate(of_tokens) if not s.mask[t])
            found[s.uid] = [values.pop() for values in by_turn]
    return found


def with_kl(spec, **more) -> PolicyLearner:
    return learner(spec, PLAIN, reference=perturbed(spec), penalty=PENALTY, **more)


def by_hand_with_kl(spec) -> dict[str, list[float]]:
    """The KL of a whole answer counts at its last turn."""
    policy, reference = load_model(spec), perturbed(spec)
    found, returns = {}, {}
    for group in played(compared=False):
        for s in group:
            ids = torch.tensor([*s.prompt_ids, *s.token_ids], dtype=torch.int64)
            with torch.no_grad():
                p, r = (
                    m(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[len(s.prompt_ids) - 1 :, 0]
                    for m in (policy, reference)
                )
            cost = KL * float(((p - r).double() ** 2 / 2)[torch.from_numpy(s.mask)].sum())
            rewards = s.turns.rewards.tolist()
            rewards[-1] -= cost
            returns[s.uid] = [sum(rewards[k:]) for k in range(len(rewards))]
        for s in group:
            others = [[returns[o.uid][k] for o in group if len(returns[o.uid]) > k] for k in range(len(returns[s.uid]))]
            found[s.uid] = [
                value - statistics.fmean(row) if len(row) > 1 else 0.0
                for value, row in zip(returns[s.uid], others, strict=True)
            ]
    return found


def test_a_kl_in_the_reward_counts_at_the_last_turn(tiny_spec):
    chosen = played(compared=False)
    found = turn_advantages(with_kl(tiny_spec), plan(chosen, updates=2, ranks=1, token_budget=60, seed=3)[0])
    expected = by_hand_with_kl(tiny_spec)
    assert found.keys() == expected.keys()
    for uid, values in expected.items():
        assert found[uid] == pytest.approx(values, abs=1e-4)
    assert sum(len(values) > 1 for values in expected.values()) > 10


# --- a value model of turns ---------------------------------------------------------------------------------------

BY_TURN = Credit(lr=1e-2, gamma=0.9, lam=0.5, value_clip=None, coef=1.0, by_turn=True)


def with_values(spec, credit: Credit = BY_TURN, *, separate: bool = False, **more) -> PolicyLearner:
    return learner(spec, PLAIN, credit=credit, value_body=load_model(spec) if separate else None, **more)


def estimated(trained: PolicyLearner, budget: int = 60):
    (share,) = plan(played(compared=False), updates=1, ranks=1, token_budget=budget, seed=3)[0]
    passes = passes_of(trained, share)
    trained._before_the_first_update([passes])
    return passes, share


@pytest.mark.parametrize("separate", [False, True])
def test_turns_have_one_advantage_each_and_returns_at_their_starts(tiny_spec, separate):
    """The values begin at zero, so that the sums are of rewards alone."""
    passes, _ = estimated(with_values(tiny_spec, separate=separate))
    expected, tokens = {}, []
    for group in played(compared=False):
        for s in group:
            rewards, found, ahead = s.turns.rewards.tolist(), [], 0.0
            for reward in reversed(rewards):
                ahead = reward + 0.9 * 0.5 * ahead
                found.insert(0, ahead)
            expected[s.uid] = found
            tokens += [value for value, span in zip(found, spans(s), strict=True) for _ in span]
    mean, deviation = statistics.fmean(tokens), statistics.stdev(tokens)
    for one in passes:
        for row, s in enumerate(one.samples):
            advantages, returns = (
                x[row, len(s.prompt_ids) : s.length].tolist() for x in (one.advantages, one.returns_BT)
            )
            for value, span in zip(expected[s.uid], spans(s), strict=True):
                assert [advantages[t] for t in span] == pytest.approx(
                    [(value - mean) / deviation] * len(span), abs=1e-4
                )
                assert [returns[t] for t in span] == pytest.approx([value] + [0.0] * (len(span) - 1), abs=1e-6)


def test_steps_of_tokens_have_the_rewards_of_turns_at_their_last_tokens(tiny_spec):
    passes, _ = estimated(with_values(tiny_spec, replace(BY_TURN, gamma=1.0, lam=1.0, by_turn=False)))
    for one in passes:
        for row, s in enumerate(one.samples):
            returns = one.returns_BT[row, len(s.prompt_ids) : s.length].tolist()
            for k, span in enumerate(spans(s)):
                assert [returns[t] for t in span] == pytest.approx([s.turns.rewards[k:].sum()] * len(span), abs=1e-5)


def test_a_kl_of_tokens_is_part_of_the_reward_of_their_turn(tiny_spec):
    credit = replace(BY_TURN, gamma=1.0, lam=1.0)
    penalty = Penalty(coef=KL, estimator="k2")
    passes, _ = estimated(with_values(tiny_spec, credit, reference=perturbed(tiny_spec), penalty=penalty))
    for one in passes:
        cost_BT = penalty.of(one)
        assert cost_BT.sum() > 0.01
        for row, s in enumerate(one.samples):
            start = len(s.prompt_ids)
            for k, span in enumerate(spans(s)):
                later = sum(cost_BT[row, start + t].item() for turn in spans(s)[k:] for t in turn)
                expected = s.turns.rewards[k:].sum() - later
                assert one.returns_BT[row, start + span[0]].item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("budget", [60, 10_000])
def test_the_value_loss_is_the_mean_over_turns_of_the_error_at_their_starts(tiny_spec, budget):
    """½ Σ (V - G)² / turns at V = 0: its gradient is -Σ G · state / turns, of the states before the turns."""
    trained = with_values(tiny_spec)
    passes, share = estimated(trained, budget)
    sums = trained._accumulate(passes, share.denominators, 1.0, None)
    head = dict(trained._policy.named_parameters())["value_head.weight"].grad[0]
    policy, total, turns = load_model(tiny_spec), 0.0, 0
    returns = {s.uid: one.returns_BT[row] for one in passes for row, s in enumerate(one.samples)}
    for s in (s for group in played(compared=False) for s in group):
        with torch.no_grad():
            states = policy.model(to_tensors([s]).token_ids_BT).last_hidden_state[0]
        for span in spans(s):
            at = len(s.prompt_ids) + span[0]
            total, turns = total - returns[s.uid][at] * states[at - 1], turns + 1
    assert sums["values"] == turns == share.denominators.turns < share.denominators.tokens
    torch.testing.assert_close(head, total / turns, rtol=1e-3, atol=1e-6)


def flat(trained: PolicyLearner) -> torch.Tensor:
    both = [*trained.named_parameters(), *trained._critic.backend.named_parameters()]
    return torch.cat([parameter.detach().reshape(-1).clone() for _, parameter in both])


def _rank(rank: int, ranks: int, spec, out: str) -> None:
    share = plan(played(compared=False), updates=2, ranks=ranks, token_budget=60, seed=3)[rank]
    found = turn_advantages(with_kl(spec), share)
    valued, compared = with_values(spec, separate=True), learner(spec, PLAIN)
    valued.learn(share)
    compared.learn(plan(played(), updates=2, ranks=ranks, token_budget=60, seed=3)[rank])
    policy = torch.cat([p.detach().reshape(-1) for _, p in compared.named_parameters()])
    torch.save((found, flat(valued), policy), f"{out}/{rank}.pt")


@pytest.mark.slow
def test_two_ranks_agree_with_one(tiny_spec, tmp_path):
    run_ranks(2, _rank, tiny_spec, str(tmp_path))
    (mine, *first), (other, *second) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    alone = turn_advantages(
        with_kl(tiny_spec), plan(played(compared=False), updates=2, ranks=1, token_budget=60, seed=3)[0]
    )
    assert mine.keys() & other.keys() == set()
    assert (mine | other).keys() == alone.keys()
    for uid, values in (mine | other).items():
        assert values == pytest.approx(alone[uid], abs=1e-4)
    valued, compared = with_values(tiny_spec, separate=True), learner(tiny_spec, PLAIN)
    starts = [flat(valued), torch.cat([p.detach().reshape(-1).clone() for _, p in compared.named_parameters()])]
    valued.learn(plan(played(compared=False), updates=2, ranks=1, token_budget=60, seed=3)[0])
    compared.learn(plan(played(), updates=2, ranks=1, token_budget=60, seed=3)[0])
    ends = [flat(valued), torch.cat([p.detach().reshape(-1) for _, p in compared.named_parameters()])]
    for one, same, start, end in zip(first, second, starts, ends, strict=True):
        assert torch.equal(one, same)
        assert (one - end).norm() <= 1e-3 * (end - start).norm()
