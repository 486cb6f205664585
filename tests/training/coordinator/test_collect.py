"""What is drawn for a step, how its samples are judged and compared, and what is left to be looked at."""

import asyncio
import json
import math
import statistics

import numpy as np
import pytest

from qurl_ray.actors.trajectories import EnvironmentTurn, Played, PolicyTurn
from qurl_ray.config import load_config
from qurl_ray.data.tasks import Task
from qurl_ray.environments.process import CallFailed
from qurl_ray.spans import Spans
from qurl_ray.training.coordinator.collect import Collected, Collector
from qurl_ray.types import Completion, Verdict
from tests.conftest import SUMS

G = 3
LENGTHS = ((1, 2, 3), (4, 1, 2), (3, 4, 1), (2, 3, 4))
"""Of a round's answers as the fleet draws them, by prompt."""


class Fleet:
    """Draws as many tokens as the request's place says, the first by weights 4 and the others by 5; or `answers`, in
    turn. Keeps the requests."""

    def __init__(self, *answers: list[int]) -> None:
        self.spans = Spans()
        self.requests = []
        self._answers = answers or [[*range(3, 4 + i)] for i in range(4)]

    async def generate(self, requests):
        self.requests += requests
        drawn = [self._answers[i % len(self._answers)] for i in range(len(requests))]
        return [
            Completion(
                uid=request.uid,
                token_ids=np.array(ids, np.int32),
                logprobs=np.full(len(ids), -0.5, np.float32),
                versions=np.array([4] + [5] * (len(ids) - 1), np.int32),
                finish="length" if len(ids) == 4 else "stop",
            )
            for request, ids in zip(requests, drawn, strict=True)
        ]


class Verifiers:
    """The first prompt's answers are all wrong; of each other prompt the last one is right."""

    async def judge(self, items, deadline_s):
        return [Verdict(reward=float(i >= G and i % G == G - 1)) for i in range(len(items))]


class Script:
    """Has the verdicts of each call by prompt; None is a reward that failed. Keeps what it was asked."""

    def __init__(self, *calls: list[tuple]) -> None:
        self._calls = iter(calls)
        self.items = []

    async def judge(self, items, deadline_s):
        self.items += items
        rewards = [reward for of_prompt in next(self._calls) for reward in of_prompt]
        assert len(rewards) == len(items)
        return [Verdict(reward=0.0, status="timeout") if r is None else Verdict(reward=r) for r in rewards]


class Plays:
    """Has trajectories whose turns have these rewards, by prompt and sample: two tokens a turn, after the first one of
    the environment's. None is an environment that failed; () are two turns that it gives no reward."""

    def __init__(self, *rewards: list[tuple[float, ...] | None]) -> None:
        self._rewards = [of_sample for of_prompt in rewards for of_sample in of_prompt]

    async def play(self, requests, problems):
        return [self._played(request, of_sample) for request, of_sample in zip(requests, self._rewards, strict=True)]

    def _played(self, request, rewards) -> Played:
        count = 2 if not rewards else len(rewards)
        mask = np.array(([True] * 2 + [False]) * count)[:-1]
        times = {"asked": 0.0, "waited": 0.0}
        said = [
            EnvironmentTurn(at=at, messages=(), reward=reward, calls=0, failed_calls=0, seconds=0.0, **times)
            for at, reward in [(0, None), *((3 * k + 2, r) for k, r in enumerate(rewards or [None] * count))]
        ]
        drew = [PolicyTurn(at=3 * k, tokens=2, text="", **times) for k in range(count)]
        completion = Completion(
            uid=request.uid,
            token_ids=np.arange(3, 3 + len(mask)).astype(np.int32),
            logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
            versions=np.where(mask, 4, -1).astype(np.int32),
            mask=mask,
            finish="stop",
        )
        return Played(
            completion=completion,
            prompt_ids=request.prompt_ids,
            last_turn=completion.token_ids[-2:],
            reward=sum(rewards) if rewards else None,
            failure=CallFailed(kind="died", detail="") if rewards is None else None,
            drew=drew,
            said=said,
        )


@pytest.fixture
def collector(tokenizer):
    def made(*overrides: str, fleet=None, verifiers=None, train=SUMS, stop_ids=(2,), runner=None) -> Collector:
        if runner:
            overrides = ("environment.type=calculator", "model.calculator=true", *overrides)
        sizes = ["rollout.prompts_per_step=4", f"rollout.samples_per_prompt={G}", "algorithm.max_refill_rounds=1"]
        config = load_config(None, [*sizes, *overrides])
        task = Task(train=train, held_out=SUMS[:2], reward="exact")
        return Collector(config, task, tokenizer, stop_ids, fleet or Fleet(), verifiers or Verifiers(), runner)

    return made


@pytest.fixture
def collect(collector):
    def collected(*overrides: str, step: int = 1, **parts) -> Collected:
        return asyncio.run(collector(*overrides, **parts).collect(step))

    return collected


def prompts_of(collected: Collected) -> list[str]:
    """Uids of the prompts that are learned from."""
    return [group[0].uid.rpartition("/")[0] for group in collected.groups]


# --- what is drawn ------------------------------------------------------------------------------------------------


def test_held_out_problems_are_answered_once_each_and_greedily(collector):
    fleet = Fleet()
    verdicts = asyncio.run(collector("rollout.temperature=0.7", fleet=fleet).judge_held_out())
    assert len(verdicts) == 2
    assert [request.uid for request in fleet.requests] == [f"{problem.uid}/0" for problem in SUMS[:2]]
    assert {request.sampling.temperature for request in fleet.requests} == {0.0}


def test_rollouts_are_drawn_as_the_settings_say(collect):
    fleet = Fleet()
    asked = ("temperature=0.7", "top_p=0.9", "top_k=5", "max_new_tokens=6")
    collect(*(f"rollout.{setting}" for setting in asked), fleet=fleet)
    (sampling,) = {request.sampling for request in fleet.requests}
    found = sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens, sampling.stop_ids
    assert found == (0.7, 0.9, 5, 6, (2,))


def test_no_random_stream_is_used_twice_over_samples_rounds_and_steps(collector):
    """Every round draws the same four prompts: there are no others, and all groups are uniform."""
    fleet, steps, rounds = Fleet(), 3, 4
    never = Script(*[[(0, 0, 0)] * 4] * steps * rounds)
    drawing = collector(f"algorithm.max_refill_rounds={rounds}", fleet=fleet, verifiers=never, train=SUMS[:4])
    for step in range(1, steps + 1):
        asyncio.run(drawing.collect(step))
    assert len(fleet.requests) == steps * rounds * 4 * G
    assert len({request.uid for request in fleet.requests}) == 4 * G
    assert len({request.seed for request in fleet.requests}) == len(fleet.requests)


def test_both_samples_of_a_certificate_are_of_the_same_problems_and_noise(collector):
    fleet = Fleet()
    drawing = collector("evaluation.certificate.prompts=3", "rollout.temperature=0.7", fleet=fleet)
    before = drawing.state()
    first, again, later = (asyncio.run(drawing.certificate_answers(step)) for step in (4, 4, 8))
    assert drawing.state() == before  # the prompts of training are those of a run without certificates
    count = (3 + 2) * G  # there are two held-out problems
    seeds = [[(r.uid, r.seed) for r in fleet.requests[i * count :][:count]] for i in range(3)]
    assert len(fleet.requests) == 3 * count
    assert seeds[0] == seeds[1]
    assert not set(seeds[0]) & set(seeds[2])
    assert {uid for uid, _ in seeds[0][3 * G :: G]} == {f"{problem.uid}/0" for problem in SUMS[:2]}
    assert {r.sampling.temperature for r in fleet.requests} == {0.7}
    assert first.rewards_PG.tolist() == again.rewards_PG.tolist() == [[0] * G, *[[0] * (G - 1) + [1]] * 4]
    assert [len(ids) for ids in later.token_ids[:4]] == [1, 2, 3, 4]
    assert [[s.advantage > 0 for s in group] for group in first.groups] == [[False, False, True]] * 2


def test_failed_rewards_of_a_certificate_are_no_rewards(collector):
    drawing = collector("evaluation.certificate.prompts=1", verifiers=Script([(0, None, 1), (1, 1, 1)]))
    found = asyncio.run(drawing.certificate_answers(1))
    assert np.isnan(found.rewards_PG).tolist() == [[False, True, False], [False] * 3]


def test_prompts_that_replace_uniform_groups_come_last_and_one_too_many_is_left_out(collect):
    mixed, uniform = (0, 0, 1), (0, 0, 0)
    script = Script([uniform, mixed, mixed, mixed], [mixed, mixed])  # 3 of 4 groups survive: 2 prompts for 1 group
    collected = collect("algorithm.max_refill_rounds=2", verifiers=script)
    assert len(collected.prompts) == 6
    assert prompts_of(collected) == collected.prompts[1:5]


def test_a_restored_collector_draws_what_the_undisturbed_one_draws(collector):
    first, undisturbed, resumed = Fleet(), Fleet(), Fleet()
    before = collector(fleet=first)
    asyncio.run(before.collect(1))
    state = json.loads(json.dumps(before.state()))
    after = collector(fleet=resumed)
    after.restore(state)
    whole = collector(fleet=undisturbed)
    for step in (1, 2):
        asyncio.run(whole.collect(step))
    asyncio.run(after.collect(2))
    drawn = [(request.uid, request.seed) for request in first.requests + resumed.requests]
    assert drawn == [(request.uid, request.seed) for request in undisturbed.requests]


# --- how it is judged and compared --------------------------------------------------------------------------------


def test_a_reward_sees_special_tokens_and_whether_an_answer_was_truncated(collector):
    """Of a sum whose answer is 13: "1<pad>3<eos>", "13<eos>" and "13"."""
    answers, seen = ([4, 0, 6, 1], [4, 6, 1], [4, 6]), Script([(0, 0, 1)] * 4, [(0,), (0,)])
    asked = collector(fleet=Fleet(*answers), verifiers=seen, stop_ids=(1,))
    collected = asyncio.run(asked.collect(1))
    asyncio.run(asked.judge_held_out())
    told = [(text, problem.meta.get("truncated", False)) for text, problem in seen.items]
    expected = [("1<pad>3", False), ("13", False), ("13", True)]
    assert told == 4 * expected + expected[:2]
    assert {sample["answer"] for sample in collected.shown} <= {"1<pad>3", "13"}


def test_a_sample_whose_reward_failed_is_left_out_and_not_compared_with(collect):
    script = Script([(1.0, None, 0.5), (1.0, None, 1.0), (None, None, None), (0.0, 0.75, 0.0)])
    collected = collect("algorithm.advantage=dr_grpo", verifiers=script)
    found = [[(s.uid.rpartition("/")[2], s.reward, s.advantage) for s in group] for group in collected.groups]
    assert found == [
        [("0", 1.0, 0.25), ("2", 0.5, -0.25)],
        [("0", 0.0, -0.25), ("1", 0.75, 0.5), ("2", 0.0, -0.25)],
    ]
    assert prompts_of(collected) == [collected.prompts[0], collected.prompts[3]]
    assert collected.failed == {"timeout": 5}
    assert collected.rewards == [1.0, 0.5, 1.0, 1.0, 0.0, 0.75, 0.0]


OVERLONG = ("rollout.max_new_tokens=4", "algorithm.overlong_buffer=2")
"""An answer of 3 tokens loses half a point, one of 4 a whole one."""


def test_the_penalty_of_overlong_answers_is_part_of_the_reward(collect):
    right_and_wrong = (1.0, 0.0, 1.0)
    groups = collect(*OVERLONG, verifiers=Script([right_and_wrong] * 4)).groups
    penalties = {1: 0.0, 2: 0.0, 3: -0.5, 4: -1.0}
    for group, lengths in zip(groups, LENGTHS, strict=True):
        expected = [reward + penalties[n] for reward, n in zip(right_and_wrong, lengths, strict=True)]
        assert [s.reward for s in group] == expected


def test_a_group_of_equal_verdicts_is_uniform_whatever_the_penalty_for_its_lengths(collect):
    script = Script([(1.0, 1.0, 1.0), (1.0, 0.0, 1.0), (0.0, 0.0, 0.0), (0.0, 0.0, 1.0)])
    collected = collect(*OVERLONG, verifiers=script)
    assert prompts_of(collected) == [collected.prompts[1], collected.prompts[3]]
    assert collected.uniform_groups == 2


def test_a_baseline_over_tokens_counts_those_of_the_answers_alone(collect):
    rewards = [(1.0, 0.0, 0.0), (0.0, 1.0, 1.0), (0.0, 1.0, 0.0), (1.0, 1.0, 0.0)]
    groups = collect("algorithm.advantage=reinforce_baseline", verifiers=Script(rewards)).groups
    centred = [[r - statistics.fmean(of_prompt) for r in of_prompt] for of_prompt in rewards]
    pairs = [pair for x_G, n_G in zip(centred, LENGTHS, strict=True) for pair in zip(x_G, n_G, strict=True)]
    tokens = [x for x, n in pairs for _ in range(n)]
    mean, deviation = statistics.fmean(tokens), math.sqrt(statistics.variance(tokens) + 1e-8)
    found = [s.advantage for group in groups for s in group]
    assert found == pytest.approx([(x - mean) / deviation for x, _ in pairs])


# --- turns --------------------------------------------------------------------------------------------------------

SAME, TOTALS, SHORTER, FEW = (
    [(0.5, 0.5), (0.5, 0.5), (0.5, 0.5)],
    [(1.0, 0.0), (0.0, 1.0), (0.5, 0.5)],  # equal together, and not from the second turn on
    [(0.0, 1.0), (1.0,), (1.0,)],  # the second turn is one sample's alone
    [None, (0.0, 1.0), (1.0, 1.0)],
)


@pytest.mark.parametrize(
    ("credit", "kept"), [("trajectory", [FEW]), ("spread", [FEW]), ("turn", [TOTALS, FEW])], ids=lambda x: str(x)[:10]
)
def test_a_group_has_no_signal_if_what_is_compared_is_equal(collect, credit, kept):
    step = [SAME, TOTALS, SHORTER, FEW]
    collected = collect(f"algorithm.turn_credit={credit}", runner=Plays(*step))
    assert prompts_of(collected) == [collected.prompts[step.index(group)] for group in kept]
    assert collected.uniform_groups == 4 - len(kept)
    assert collected.failed == {"error": 1}


def test_turns_have_their_rewards_and_advantages(collect):
    settings = ("algorithm.turn_credit=turn", "algorithm.advantage=dr_grpo", "tracking.samples_per_step=99")
    collected = collect(*settings, runner=Plays(SAME, TOTALS, SHORTER, FEW))
    totals, few = collected.groups
    assert [s.turns.rewards.tolist() for s in totals] == [list(rewards) for rewards in TOTALS]
    assert [s.turns.advantages.tolist() for s in totals] == [[0.0, -0.5], [0.0, 0.5], [0.0, 0.0]]
    assert [s.turns.advantages.tolist() for s in few] == [[-0.5, 0.0], [0.5, 0.0]]
    assert [s.turns.ends.tolist() for s in few] == [[2, 5]] * 2
    shown = {sample["uid"]: sample for sample in collected.shown}
    assert {sample["advantage"] for sample in collected.shown} == {None}
    assert shown[totals[0].uid]["credit"] == [
        {"end": 2, "reward": 1.0, "advantage": 0.0},
        {"end": 5, "reward": 0.0, "advantage": -0.5},
    ]
    left_out = [sample["credit"] for uid, sample in shown.items() if uid.startswith(collected.prompts[0])]
    assert left_out == [[{"end": 2 + 3 * k, "reward": 0.5, "advantage": None} for k in range(2)]] * G
    assert sum("credit" not in sample for sample in collected.shown) == 1  # its environment failed
    json.dumps(collected.shown)


def test_what_belongs_to_a_trajectory_counts_at_its_last_turn(collect):
    """The verdict of the reward function, 0, 0 and 1, and the penalty of answers of 4 tokens, -1."""
    settings = ("algorithm.turn_credit=turn", "algorithm.advantage=dr_grpo", *OVERLONG)
    script = Script([(0.0, 0.0, 1.0)])
    (group,) = collect(*settings, "rollout.prompts_per_step=1", "algorithm.updates_per_rollout=1",
                       runner=Plays([(), (), ()]), verifiers=script).groups  # fmt: skip
    assert [s.turns.rewards.tolist() for s in group] == [[0.0, -1.0], [0.0, -1.0], [0.0, 0.0]]
    assert [s.reward for s in group] == [-1.0, -1.0, 0.0]
    assert [s.turns.advantages.tolist() for s in group] == [pytest.approx([a, a]) for a in (-1 / 3, -1 / 3, 2 / 3)]


def test_credit_of_trajectories_leaves_turns_without_advantages_of_their_own(collect):
    (group,) = collect("algorithm.advantage=dr_grpo", runner=Plays(SAME, TOTALS, SHORTER, FEW)).groups
    assert [(s.advantage, s.turns.advantages) for s in group] == [(-0.5, None), (0.5, None)]
    learned = collect("algorithm.type=ppo", runner=Plays(SAME, TOTALS, SHORTER, FEW)).groups
    assert [s.turns.rewards.tolist() for s in learned[1]] == [list(rewards) for rewards in TOTALS]
    assert all(s.turns.advantages is None for group in learned for s in group)


def test_answers_without_an_environment_have_no_turns(collect):
    collected = collect("tracking.samples_per_step=99")
    assert all(s.turns is None for group in collected.groups for s in group)
    assert not any("credit" in sample for sample in collected.shown)


# --- what is shown ------------------------------------------------------------------------------------------------


def test_one_sample_of_each_prompt_comes_before_a_second_one_and_uniform_groups_last(collect):
    collected = collect("tracking.samples_per_step=9")
    drawn = [sample["uid"].split("/") for sample in collected.shown]
    assert [index for _, index in drawn] == ["0"] * 4 + ["1"] * 4 + ["2"]
    prompts = [prompt for prompt, _ in drawn]
    assert prompts[:4] == prompts[4:8]
    assert prompts[3] == collected.prompts[0]  # all of its answers are wrong
    assert len(collect("tracking.samples_per_step=99").shown) == 4 * G
    assert collect("tracking.samples_per_step=0").shown == []


def test_a_sample_has_what_the_viewer_shows(collect, tokenizer):
    collected = collect("tracking.samples_per_step=99")
    learned = {s.uid: s for group in collected.groups for s in group}
    assert len(learned) == 3 * G
    for sample in collected.shown:
        count = len(sample["tokens"])
        assert sample["tokens"] == [tokenizer.decode([3 + t]) for t in range(count)]
        assert sample["finish"] == ("length" if count == 4 else "stop")
        assert sample["limit"] == ("rollout.max_new_tokens=8" if count == 4 else "")
        assert sample["versions"] == ([[4, 1], [5, count - 1]] if count > 1 else [[4, 1]])
        found = learned.get(sample["uid"])
        assert sample["advantage"] == (found and round(found.advantage, 4))
    assert {sample["advantage"] for sample in collected.shown} > {None}


def test_where_a_value_model_gives_credit_no_advantage_is_known_yet(collect):
    shown = collect("tracking.samples_per_step=99", "algorithm.type=ppo").shown
    assert {sample["advantage"] for sample in shown} == {None}
