"""Trajectories of several rows in the learner: each is one sample of every mean, whatever rows, micro-batches and ranks
its tokens are in. References in plain Python and float64."""

import math
import pickle
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch

from qurl_ray.learner.batching import plan, rows_of
from qurl_ray.learner.critic import Credit
from qurl_ray.learner.learner import PolicyLearner
from qurl_ray.learner.passes import Penalty
from qurl_ray.learner.scorer import MODEL_PREFIX, Scores
from qurl_ray.policy.load import load_model
from qurl_ray.rl.advantages import dr_grpo, grpo
from qurl_ray.rl.credit import compare_turns, credited, returns_of
from qurl_ray.rl.objective import ObjectiveSettings
from qurl_ray.rl.surrogate import gspo, ppo
from qurl_ray.types import Trajectory, TurnCredit
from tests.learner.test_penalties import perturbed
from tests.learner.test_turn_credit import learner, passes_of
from tests.ranks import run_ranks

KL, LOW, HIGH = 0.5, 0.05, 0.08
Part = tuple[list[int], list[list[int]]]
"""A row written out: its prompt, and its turns of drawn tokens. Between two turns an environment says token 4."""


def parts_of(rng: np.random.Generator) -> list[Part]:
    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(3, 18, size=rng.integers(low, high)).tolist()

    return [
        (tokens(2, 7), [tokens(1, 5) for _ in range(rng.integers(1, 4))]) for _ in range(rng.choice([1, 1, 2, 3, 4]))
    ]


def trajectory(parts: list[Part], *, uid: str, group: int, rng: np.random.Generator) -> Trajectory:
    """The record of a trajectory with these rows."""
    ids, mask, ends, rows = [], [], [], []
    for number, (prompt, turns) in enumerate(parts):
        if number:
            rows.append(len(ids))
            ids, mask = ids + prompt, mask + [False] * len(prompt)
        for place, turn in enumerate(turns):
            said = [4] * (place > 0)
            ids, mask = ids + said + turn, mask + [False] * len(said) + [True] * len(turn)
            ends.append(len(ids))
    drawn, rewards = np.array(mask), rng.choice([0.0, 0.5, 1.0], size=len(ends))
    return Trajectory(
        uid=uid,
        prompt_ids=np.array(parts[0][0], np.int32),
        token_ids=np.array(ids, np.int32),
        logprobs=np.where(drawn, rng.uniform(-3.2, -2.2, size=len(ids)), 0).astype(np.float32),
        versions=np.where(drawn, 1, -1).astype(np.int32),
        mask=drawn,
        rows=tuple(rows),
        turns=TurnCredit(ends=np.array(ends, np.int32), rewards=rewards),
        reward=float(rewards.sum()),
        advantage=0.0,
        group=group,
    )


def step(count: int = 6, size: int = 3) -> list[list[tuple[list[Part], Trajectory]]]:
    """Groups of trajectories, each with what it was made of."""
    rng, found = np.random.default_rng(8), []
    for p in range(count):
        written = [parts_of(rng) for _ in range(size)]
        found.append([(w, trajectory(w, uid=f"{p}/{g}", group=p, rng=rng)) for g, w in enumerate(written)])
    return found


def records() -> list[list[Trajectory]]:
    return [[sample for _, sample in group] for group in step()]


def compared(groups: list[list[Trajectory]], mode: str) -> list[list[Trajectory]]:
    """As the coordinator compares them."""
    found = compare_turns([[returns_of(s, mode) for s in group] for group in groups], grpo, mode)
    return [
        [credited(s, advantages_K, mode) for s, advantages_K in zip(group, of_group, strict=True)]
        for group, of_group in zip(groups, found, strict=True)
    ]


def by_hand(mode: str) -> list[list[list[float]]]:
    """Advantages by group, trajectory and turn: GRPO's, of whole rewards or of returns from the same turn number."""
    found = []
    for group in records():
        rewards = [s.turns.rewards.tolist() for s in group]
        returns = [[sum(r[k:]) if mode == "turn" else sum(r) for k in range(len(r))] for r in rewards]
        of_group = []
        for mine in returns:
            advantages = []
            for k, value in enumerate(mine):
                others = [r[k if mode == "turn" else 0] for r in returns if mode == "trajectory" or len(r) > k]
                equal = len(others) < 2 or max(others) == min(others)
                advantages.append(
                    0.0 if equal else (value - statistics.fmean(others)) / (statistics.stdev(others) + 1e-6)
                )
            of_group.append(advantages)
        found.append(of_group)
    return found


def test_rows_are_those_that_the_trajectory_was_made_of_and_survive_the_way_to_a_rank():
    groups = [[replace(s, watched=s.uid == "1/1") for s in group] for group in compared(records(), "turn")]
    shares = pickle.loads(pickle.dumps(plan(groups, updates=2, ranks=2, token_budget=60, seed=3)))
    arrived = [row for share in shares for update in share for batch in update.micro_batches for row in batch]
    by_uid = {}
    for row in sorted(arrived, key=lambda row: row.row.number if row.row else 0):
        by_uid.setdefault(row.uid, []).append(row)
    assert max(map(len, by_uid.values())) == 4
    for written, sample in (pair for group in step() for pair in group):
        rows = by_uid.pop(sample.uid)
        rewards, advantages = sample.turns.rewards.tolist(), by_hand("turn")[sample.group][int(sample.uid[-1])]
        for number, ((prompt, turns), row) in enumerate(zip(written, rows, strict=True)):
            assert row.prompt_ids.tolist() == prompt
            assert row.drawn_ids.tolist() == [token for turn in turns for token in turn]
            assert row.turn_lengths.tolist() == [len(turn) for turn in turns]
            assert row.turns.rewards.tolist() == rewards[: len(turns)]
            assert row.turns.advantages == pytest.approx(advantages[: len(turns)])
            rewards, advantages = rewards[len(turns) :], advantages[len(turns) :]
            if len(rows) > 1:
                assert (row.row.number, row.row.later) == (number, sum(rewards))
                assert row.row.drawn == sum(len(turn) for _, turns in written for turn in turns)
            else:
                assert row.row is None
            assert (row.rows, row.reward, row.group, row.watched) == ((), sample.reward, sample.group, row.uid == "1/1")
    assert not by_uid


def test_rows_of_a_trajectory_are_in_one_update_and_count_once():
    shares = plan(records(), updates=3, ranks=2, token_budget=40, seed=3)
    places = {}
    for rank, share in enumerate(shares):
        for update, mini_batch in enumerate(share):
            for number, batch in enumerate(mini_batch.micro_batches):
                for row in batch:
                    places.setdefault(row.uid, set()).add((update, rank, number))
    assert all(len({update for update, *_ in place}) == 1 for place in places.values())
    assert any(len({rank for _, rank, _ in place}) == 2 for place in places.values())
    assert [m.denominators.sequences for m in shares[0]] == [6, 6, 6]
    total = [
        sum(len(turn) for group in step() for written, _ in group for _, turns in written for turn in turns),
        sum(len(turns) for group in step() for written, _ in group for _, turns in written),
    ]
    assert [sum(getattr(m.denominators, name) for m in shares[0]) for name in ("tokens", "turns")] == total


def moved_by(prompt: list[int], turns: list[list[int]]) -> list[float]:
    """log(theta/p) of each drawn token of a row."""
    generator = torch.Generator().manual_seed(sum(prompt) + 100 * sum(map(sum, turns)))
    return (0.15 * torch.randn(sum(map(len, turns)), generator=generator) + 0.02).tolist()


def gradient(spec, settings: ObjectiveSettings, share) -> dict[str, torch.Tensor]:
    """Gradient of a mini-batch; every sample of it is one row."""
    trained = learner(spec, settings)
    passes = passes_of(trained, share)
    for one in passes:
        with torch.no_grad():
            one.prox_BT = Scores(*trained._policy(one.batch)).logprobs_BT.clone()
        for row, s in enumerate(one.samples):
            turns = np.split(s.drawn_ids, np.cumsum(s.turn_lengths)[:-1])
            moved = moved_by(s.prompt_ids.tolist(), [turn.tolist() for turn in turns])
            one.prox_BT[row, s.places] -= torch.tensor(moved)
    trained._accumulate(passes, share.denominators, 1.0, None)
    return {name.removeprefix(MODEL_PREFIX): p.grad for name, p in trained._policy.named_parameters()}


def row_logprobs(model, prompt: list[int], turns: list[list[int]]) -> list[torch.Tensor]:
    """Log-probs of the drawn tokens of a row, from a pass over this row alone."""
    ids, drawn = list(prompt), []
    for place, turn in enumerate(turns):
        ids += [4] * (place > 0)
        drawn += range(len(ids), len(ids) + len(turn))
        ids += turn
    found = model(torch.tensor(ids)[None]).logits[0].log_softmax(-1)
    return [found[at - 1, ids[at]] for at in drawn]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mode", ["trajectory", "turn"])
@pytest.mark.parametrize("loss_mean", ["token", "sequence", "fixed"])
@pytest.mark.parametrize("form", ["ppo", "gspo"])
def test_a_trajectory_has_the_weight_of_one_sequence_and_one_advantage(tiny_spec, form, loss_mean, mode):
    settings = ObjectiveSettings(
        form={"ppo": ppo, "gspo": gspo}[form], clip_low=LOW, clip_high=HIGH, loss_mean=loss_mean, fixed_length=12
    )
    model, loss = load_model(tiny_spec).double(), torch.zeros((), dtype=torch.float64)
    everything = [one for group in step() for one in group]
    tokens = sum(len(turn) for written, _ in everything for _, turns in written for turn in turns)
    for group, of_group in zip(step(), by_hand(mode), strict=True):
        for (written, _), advantages in zip(group, of_group, strict=True):
            own, left = sum(len(turn) for _, turns in written for turn in turns), iter(advantages)
            divisor = {"token": tokens, "sequence": own * len(everything), "fixed": 12 * len(everything)}[loss_mean]
            for prompt, turns in written:
                logprobs, moved = iter(row_logprobs(model, prompt, turns)), moved_by(prompt, turns)
                ratios = iter(
                    [math.exp(statistics.fmean(moved))] * len(moved) if form == "gspo" else map(math.exp, moved)
                )
                for turn in turns:
                    advantage = next(left)
                    for _ in turn:
                        logprob, ratio = next(logprobs), next(ratios)
                        cut = ratio > 1 + HIGH if advantage > 0 else ratio < 1 - LOW
                        if not cut:
                            loss = loss - (logprob - logprob.detach()).exp() * ratio * advantage / divisor
    loss.backward()
    expected = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    groups = compared(records(), mode)
    alone = plan(groups, updates=1, ranks=1, token_budget=60, seed=1)[0]
    shared = [rank[0] for rank in plan(groups, updates=1, ranks=2, token_budget=40, seed=1)]
    for shares in (alone, shared):
        parts = [gradient(tiny_spec, settings, share) for share in shares]
        found = torch.cat(
            [sum(part[name] for part in parts).double().reshape(-1) for name, _ in model.named_parameters()]
        )
        assert (found - expected).norm() <= 1e-3 * expected.norm()
    apart = [[replace(row, row=None, uid=row.row_uid) for s in group for row in rows_of(s)] for group in groups]
    (share,) = plan(apart, updates=1, ranks=1, token_budget=60, seed=1)[0]
    wrong = torch.cat([g.double().reshape(-1) for g in gradient(tiny_spec, settings, share).values()])
    assert ((wrong - expected).norm() > 0.02 * expected.norm()) == (loss_mean != "token")


# --- KL in the reward ---------------------------------------------------------------------------------------------


def advantages_with_kl(trained: PolicyLearner, mini_batches) -> dict[str, list[float]]:
    """By row_uid and turn, the advantages with which a step would begin."""
    passes, found = [passes_of(trained, mini_batch) for mini_batch in mini_batches], {}
    trained._before_the_first_update(passes)
    for one in (one for chosen in passes for one in chosen):
        for row, s in enumerate(one.samples):
            values = one.advantages[row, s.places] if one.advantages.ndim == 2 else one.advantages[row].repeat(s.drawn)
            by_turn = [set(part.tolist()) for part in np.split(values.numpy(), s.drawn_ends[:-1])]
            assert all(len(part) == 1 for part in by_turn)
            found[s.row_uid] = [part.pop() for part in by_turn]
    return found


def with_kl(spec, mode: str) -> PolicyLearner:
    penalty = Penalty(coef=KL, estimator="k2", compare=dr_grpo, mode=mode)
    return learner(spec, ObjectiveSettings(clip_low=0.2, clip_high=0.2), reference=perturbed(spec), penalty=penalty)


def expected_with_kl(spec, mode: str) -> dict[str, list[float]]:
    """The KL of all rows counts at the last turn of the trajectory."""
    policy, reference, found = load_model(spec), perturbed(spec), {}
    for group in step():
        returns = []
        for written, sample in group:
            cost = 0.0
            with torch.no_grad():
                for part in written:
                    pairs = zip(row_logprobs(policy, *part), row_logprobs(reference, *part), strict=True)
                    cost += KL * sum(float(p - r) ** 2 / 2 for p, r in pairs)
            rewards = sample.turns.rewards.tolist()
            rewards[-1] -= cost
            returns.append([sum(rewards[k:] if mode == "turn" else rewards) for k in range(len(rewards))])
        for (written, sample), mine in zip(group, returns, strict=True):
            advantages = []
            for k, value in enumerate(mine):
                others = [r[k] if mode == "turn" else r[0] for r in returns if mode == "trajectory" or len(r) > k]
                advantages.append(value - statistics.fmean(others) if len(others) > 1 else 0.0)
            for number, (_, turns) in enumerate(written):
                name = f"{sample.uid}+{number}" if number else sample.uid
                found[name], advantages = advantages[: len(turns)], advantages[len(turns) :]
    return found


def _rank(rank: int, ranks: int, spec, out: str) -> None:
    shares = plan(records(), updates=2, ranks=ranks, token_budget=60, seed=3)[rank]
    found = {mode: advantages_with_kl(with_kl(spec, mode), shares) for mode in ("trajectory", "turn")}
    torch.save(found, f"{out}/{rank}.pt")


@pytest.mark.slow
def test_a_kl_in_the_reward_is_that_of_all_rows_wherever_they_are(tiny_spec, tmp_path):
    run_ranks(2, _rank, tiny_spec, str(tmp_path))
    both = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for mode in ("trajectory", "turn"):
        expected = expected_with_kl(tiny_spec, mode)
        shares = plan(records(), updates=2, ranks=1, token_budget=60, seed=3)[0]
        for found in (advantages_with_kl(with_kl(tiny_spec, mode), shares), both[0][mode] | both[1][mode]):
            assert found.keys() == expected.keys()
            for name, values in expected.items():
                assert found[name] == pytest.approx(values, abs=1e-4)


# --- a value model, and what is shown ------------------------------------------------------------------------------


@pytest.mark.parametrize("by_turn", [False, True])
def test_a_value_model_has_rows_as_episodes_that_end_with_the_rewards_of_later_ones(tiny_spec, by_turn):
    """Values begin at zero, so that returns are sums of rewards; discounts are within a row alone."""
    gamma = 0.9
    credit = Credit(lr=1e-2, gamma=gamma, lam=1.0, value_clip=None, by_turn=by_turn)
    trained = learner(tiny_spec, ObjectiveSettings(clip_low=0.2, clip_high=0.2), credit=credit)
    (share,) = plan(records(), updates=1, ranks=1, token_budget=60, seed=3)[0]
    passes, found = passes_of(trained, share), {}
    trained._before_the_first_update([passes])
    for one in passes:
        for row, s in enumerate(one.samples):
            found[s.row_uid] = one.returns_BT[row, s.places].tolist()
    for written, sample in (pair for group in step() for pair in group):
        rewards, at = sample.turns.rewards.tolist(), 0
        for number, (_, turns) in enumerate(written):
            at += len(turns)
            mine = rewards[at - len(turns) : at]
            mine[-1] += sum(rewards[at:])
            steps = [(k, last) for k, turn in enumerate(turns) for last in [False] * (len(turn) - 1) + [True]]
            ahead, expected = 0.0, []
            for k, last in reversed(steps):
                if not by_turn:
                    ahead = mine[k] * last + gamma * ahead
                    expected.insert(0, ahead)
            if by_turn:
                for k, turn in reversed(list(enumerate(turns))):
                    ahead = mine[k] + gamma * ahead
                    expected = [ahead] + [0.0] * (len(turn) - 1) + expected
            name = f"{sample.uid}+{number}" if number else sample.uid
            assert found[name] == pytest.approx(expected, abs=1e-5)


def test_logprobs_of_watched_rows_come_back_by_row(tiny_spec):
    groups = [[replace(s, watched=s.group == 1) for s in group] for group in compared(records(), "trajectory")]
    trained, model = learner(tiny_spec, ObjectiveSettings(clip_low=0.2, clip_high=0.2)), load_model(tiny_spec)
    result = trained.learn(plan(groups, updates=1, ranks=1, token_budget=60, seed=3)[0])
    names = []
    for written, sample in step()[1]:
        for number, part in enumerate(written):
            names.append(f"{sample.uid}+{number}" if number else sample.uid)
            with torch.no_grad():
                expected = [float(x) for x in row_logprobs(model, *part)]
            assert result.proximal[names[-1]] == pytest.approx(expected, abs=1e-5)
    assert sorted(names) == sorted(result.proximal)
    assert len(names) > 3
