"""Trajectories of several turns: each token is trained as it was drawn, whatever the batch, the order, the delays."""

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from qurl_ray.actors.environments import EnvironmentReply
from qurl_ray.actors.local import fleet_here
from qurl_ray.actors.trajectories import Played, Rules, TrajectoryRunner, TrajectoryState
from qurl_ray.config import RunConfig
from qurl_ray.data.turns import TurnEncoder
from qurl_ray.engines.torch.kept import KeysPool
from qurl_ray.environments.process import CallFailed
from qurl_ray.environments.protocol import Step
from qurl_ray.errors import EngineError, EnvironmentFailed
from qurl_ray.learner.batching import to_tensors
from qurl_ray.policy.logprobs import answer_states, score_states, token_logprobs
from qurl_ray.types import Completion, Problem, Request, SamplingParams, Trajectory, Verdict
from tests.actors.test_fleet import Rig, run, token
from tests.actors.test_fleet import Worker as Counter
from tests.conftest import SUMS
from tests.data.test_turns import CHATML, tokenizer_with
from tests.engines.test_torch_engine import engine_with, with_quantized_linears

HOSTILE = ["", "<|im_end|>", "<|im_start|>", "é\u202e\u0000", "\n\n", "x" * 40, "<|im_end|>\n<|im_start|>assistant\n"]


class Seats:
    """A pool of environments in this process. `make(problem)` returns what answers a turn's text with a Step.

    Args:
        delay_s: longest time that a call takes, at random.
    """

    def __init__(self, make, *, delay_s: float = 0.0, seed: int = 0) -> None:
        self._make, self._delay_s, self._random = make, delay_s, random.Random(seed)
        self.waiting = self.most = 0

    @asynccontextmanager
    async def lease(self, trajectory: str):
        yield _Seat(self)

    async def reply(self, outcome) -> EnvironmentReply:
        await asyncio.sleep(self._random.random() * self._delay_s)
        return EnvironmentReply(number=0, outcome=outcome, seconds=0.0)


class _Seat:
    replays = 0

    def __init__(self, seats: Seats) -> None:
        self._seats = seats

    async def give(self, given):
        if isinstance(given, Problem):
            self._step, opening = self._seats._make(given)
            return await self._seats.reply(opening)
        return await self._seats.reply(self._step(given))


class Scripted:
    """A fleet whose tokens are derived from (seed, place among the drawn ones). It keeps all requests."""

    def __init__(self, vocabulary: int, stop: int) -> None:
        self._vocabulary, self._stop = vocabulary, stop
        self.asked: dict[str, list[tuple[Request, Completion]]] = {}

    @asynccontextmanager
    async def turns(self):
        yield self

    async def generate(self, request: Request) -> Completion:
        rng = random.Random(request.seed * 1_000_003 + request.drawn)
        most = request.sampling.max_new_tokens
        ids = [rng.randrange(self._vocabulary) for _ in range(rng.randint(1, 6))]
        ids = [i for i in ids if i != self._stop] + [self._stop] * rng.randint(0, 1)
        ids, finish = (ids, "stop") if ids and ids[-1] == self._stop and len(ids) <= most else (
            (ids or [1]) * most, "length")  # fmt: skip
        ids = ids[:most]
        completion = Completion(
            uid=request.uid,
            token_ids=np.array(ids, np.int32),
            logprobs=np.array([-float(i) for i in range(request.drawn, request.drawn + len(ids))], np.float32),
            versions=np.full(len(ids), 7, np.int32),
            finish=finish,
        )
        self.asked.setdefault(request.uid, []).append((request, completion))
        return completion


def player(fleet, pool, tokenizer, *, context: int = 200, chat: bool = False, **settings) -> TrajectoryRunner:
    config = RunConfig.model_validate(
        {
            "environment": {"type": "calculator", **settings},
            "model": {"calculator": True},
            "task": {"chat": chat},
        }
    )
    stop_ids = (tokenizer.eos_token_id,)
    return TrajectoryRunner(config, fleet, pool, tokenizer=tokenizer, stop_ids=stop_ids, context=context)


def requests(tokenizer, problems, *, tokens: int = 40, **sampling) -> list[Request]:
    params = SamplingParams(max_new_tokens=tokens, stop_ids=(tokenizer.eos_token_id,), **sampling)
    return [
        Request(
            uid=f"{problem.uid}/{index}",
            prompt_ids=np.array(tokenizer(problem.prompt)["input_ids"], np.int32),
            seed=index + 1,
            sampling=params,
        )
        for index, problem in enumerate(problems)
    ]


def hostile(problem: Problem):
    """Says something hostile for a random number of turns, and fails now and then."""
    rng = random.Random(problem.uid)
    turns = rng.randint(1, 5)
    opening = [{"role": "user", "content": rng.choice(HOSTILE)}] if rng.random() < 0.3 else []

    def step(answer: str):
        nonlocal turns
        turns -= 1
        if rng.random() < 0.02:
            return CallFailed(kind="died", detail="")
        said = [
            {"role": rng.choice(["user", "tool"]), "content": rng.choice(HOSTILE)} for _ in range(rng.randint(0, 2))
        ]
        return Step(messages=said, reward=rng.choice([None, 1.0, -0.5]), done=turns == 0)

    return step, opening


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("cut_turns", ["end", "close"])
def test_ten_thousand_random_trajectories_are_trained_as_they_were_drawn(chat, cut_turns):
    tokenizer = tokenizer_with(CHATML if chat else None)
    problems = [Problem(uid=f"p{i}", prompt=f"{i}<|im_end|>", answer="") for i in range(2500)]
    fleet = Scripted(len(tokenizer), tokenizer.eos_token_id)
    made = player(fleet, Seats(hostile), tokenizer, chat=chat, cut_turns=cut_turns, turn_tokens=9, max_turns=4)
    asked = requests(tokenizer, problems)
    played = asyncio.run(made.play(asked, problems))
    ends, adjacent = {"length": 0, "stop": 0}, 0
    for request, one in zip(asked, played, strict=True):
        completion, calls = one.completion, fleet.asked.get(request.uid, [])
        assert one.turns == len(calls) <= 4
        if not calls:
            assert one.failure
            assert len(completion.token_ids) == 0
            continue
        mask = np.ones(0, bool) if completion.mask is None else completion.mask
        drawn = np.concatenate([part.token_ids for _, part in calls])
        np.testing.assert_array_equal(completion.drawn_ids, drawn)
        np.testing.assert_array_equal(completion.logprobs[mask], -np.arange(len(drawn)))
        np.testing.assert_array_equal(completion.versions[mask], np.full(len(drawn), 7))
        assert not completion.logprobs[~mask].any()
        assert (completion.versions[~mask] == -1).all()
        assert len(drawn) <= 40
        row = np.concatenate([one.prompt_ids, completion.token_ids])
        assert len(row) <= 200
        at = 0
        for turn, part in calls:  # each turn was asked for after exactly the tokens that are trained before it
            np.testing.assert_array_equal(row[: len(turn.prompt_ids)], turn.prompt_ids)
            np.testing.assert_array_equal(row[len(turn.prompt_ids) :][: len(part.token_ids)], part.token_ids)
            assert turn.drawn == at
            at += len(part.token_ids)
        starts = [len(turn.prompt_ids) - len(one.prompt_ids) for turn, _ in calls]
        assert one.ends == [start + len(part.token_ids) for start, (_, part) in zip(starts, calls, strict=True)]
        assert one.ends[-1] == len(completion.token_ids)
        adjacent += sum(end == start for end, start in zip(one.ends[:-1], starts[1:], strict=True))
        ends[completion.finish] += 1
    assert min(ends.values()) > 100
    assert sum(one.turns > 2 for one in played) > 100
    assert (adjacent > 50) == (not chat)  # a message without text is no token, unless a template writes around it


def test_rewards_of_turns_add_up_and_none_leaves_the_last_turn_to_the_reward_function():
    def made(*rewards):
        def make(_):
            left = list(rewards)

            def step(answer):
                return Step(messages=[{"role": "user", "content": "x"}], reward=left.pop(0), done=not left)

            return step, []

        return make

    tokenizer = tokenizer_with(None)
    problems = [Problem(uid="p", prompt="1", answer="")]

    def one(make) -> Played:
        fleet = Scripted(50, tokenizer.eos_token_id)
        found = player(fleet, Seats(make), tokenizer, cut_turns="close", turn_tokens=5)
        return asyncio.run(found.play(requests(tokenizer, problems), problems))[0]

    paid = one(made(1.0, None, -0.25))
    assert paid.verdict().reward == 0.75
    assert paid.credit(paid.verdict()).rewards.tolist() == [1.0, 0.0, -0.25]
    assert paid.credit(paid.verdict()).ends.tolist() == paid.ends
    silent = one(made(None, None))
    assert silent.verdict() is None
    assert silent.credit(Verdict(reward=0.5)).rewards.tolist() == [0.0, 0.5]
    np.testing.assert_array_equal(silent.last_turn, silent.completion.drawn_ids[-len(silent.last_turn) :])
    failed = one(lambda _: ((lambda answer: CallFailed(kind="timeout", detail="late")), []))
    assert (failed.verdict().status, failed.verdict().reward) == ("timeout", 0.0)


def test_a_last_turn_that_is_cut_off_and_not_judged_has_no_reward():
    tokenizer = tokenizer_with(None)
    problems = [Problem(uid="p", prompt="1", answer="")]

    def make(_):
        return (lambda answer: Step(messages=[{"role": "user", "content": "x"}], reward=0.5)), []

    fleet = Scripted(50, tokenizer.eos_token_id)
    found = player(fleet, Seats(make), tokenizer, cut_turns="end", turn_tokens=5, max_turns=50)
    for seed in range(1, 20):
        asked = [replace(request, seed=seed) for request in requests(tokenizer, problems)]
        (one,) = asyncio.run(found.play(asked, problems))
        if 1 < one.turns == len(one.said):  # the first call is the reset
            break
    assert one.credit(one.verdict()).rewards.tolist() == [0.5] * (one.turns - 1) + [0.0]


def test_an_opening_that_leaves_no_room_fails_its_trajectory_alone():
    tokenizer = tokenizer_with(None)
    problems = [Problem(uid=uid, prompt="1", answer="") for uid in "ab"]

    def make(problem):
        said = "x" * (300 if problem.uid == "a" else 3)
        return (lambda answer: Step(done=True)), [{"role": "user", "content": said}]

    made = player(Scripted(50, tokenizer.eos_token_id), Seats(make), tokenizer, cut_turns="close", turn_tokens=5)
    long, short = asyncio.run(made.play(requests(tokenizer, problems), problems))
    assert (long.failure.kind, long.turns, long.verdict().status) == ("invalid", 0, "invalid")
    assert (short.failure, short.turns) == (None, 1)


@pytest.mark.parametrize("error", [EngineError("broken"), EnvironmentFailed("gone")])
def test_an_error_ends_all_trajectories_and_keeps_its_type(error):
    tokenizer = tokenizer_with(None)
    problems = [Problem(uid=uid, prompt="1", answer="") for uid in "ab"]

    class Broken(Scripted):
        async def generate(self, request):
            if request.uid == "b/1":
                raise error
            await asyncio.sleep(60)

    made = player(Broken(50, tokenizer.eos_token_id), Seats(hostile), tokenizer)
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(made.play(requests(tokenizer, problems), problems))


# --- what comes next -----------------------------------------------------------------------------------------------


def a_trajectory(*, context: int = 60, **settings) -> TrajectoryState:
    """A trajectory whose prompt is "1" and which may draw 12 tokens."""
    tokenizer = tokenizer_with(None)
    config = RunConfig.model_validate(
        {"environment": {"type": "calculator", "turn_tokens": 5, **settings}, "model": {"calculator": True}}
    )
    rules = Rules(
        config=config.environment,
        tokenizer=tokenizer,
        stop_ids=(tokenizer.eos_token_id,),
        context=context,
        encoder=TurnEncoder(tokenizer, config.task, (tokenizer.eos_token_id,)),
    )
    problem = Problem(uid="p", prompt="1", answer="")
    (first,) = requests(tokenizer, [problem], tokens=12)
    return TrajectoryState(rules, first, problem)


def told(outcome, seconds: float = 0.5) -> EnvironmentReply:
    return EnvironmentReply(number=0, outcome=outcome, seconds=seconds)


def a_turn(trajectory: TrajectoryState, text: str, *, ends: bool = True) -> Completion:
    """A turn that was drawn as it was asked for: a text, and its end token unless it was cut off."""
    tokenizer = trajectory._rules.tokenizer
    ids = np.array(tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] * ends, np.int32)
    assert len(ids) <= trajectory.todo.sampling.max_new_tokens
    return Completion(
        uid=trajectory.todo.uid,
        token_ids=ids,
        logprobs=np.full(len(ids), -1.0, np.float32),
        versions=np.full(len(ids), 3, np.int32),
        finish="stop" if ends else "length",
    )


SAYS = Step(messages=[{"role": "user", "content": "xy"}], reward=0.25, info={"calls": 1, "board": "x"})


def test_reset_turn_and_step_follow_each_other_until_the_last_turn():
    trajectory = a_trajectory(max_turns=2)
    prompt = trajectory.played.prompt_ids.tolist()
    assert isinstance(trajectory.todo, Problem)
    trajectory.add_environment_turn(told([]), 0.0, 1.0)
    assert (trajectory.todo.prompt_ids.tolist(), trajectory.todo.drawn, trajectory.todo.continues) == (prompt, 0, True)
    assert trajectory.todo.sampling.max_new_tokens == 5
    first = a_turn(trajectory, "ab")
    trajectory.add_policy_turn(first, 1.0, 2.0)
    assert trajectory.todo == "ab"
    trajectory.add_environment_turn(told(SAYS), 3.0, 0.75)
    said = trajectory._rules.tokenizer("xy")["input_ids"]
    assert trajectory.todo.prompt_ids.tolist() == prompt + first.token_ids.tolist() + said
    assert trajectory.played.log()["said"][1]["state"] == {"board": "x"}
    assert (trajectory.todo.drawn, trajectory.todo.continues) == (3, False)
    second = a_turn(trajectory, "c")
    trajectory.add_policy_turn(second, 3.75, 1.0)
    trajectory.add_environment_turn(told(SAYS), 4.75, 0.25)
    assert trajectory.todo is None
    played = trajectory.played
    assert played.completion.token_ids.tolist() == first.token_ids.tolist() + said + second.token_ids.tolist()
    assert (played.reward, played.turns, played.completion.finish) == (0.5, 2, "stop")
    assert [(one.at, one.tokens, one.text, one.asked, one.waited) for one in played.drew] == [
        (0, 3, "ab", 1.0, 2.0),
        (5, 2, "c", 3.75, 1.0),
    ]
    assert [(one.at, one.asked, one.waited, one.seconds) for one in played.said] == [
        (0, 0.0, 1.0, 0.5),
        (3, 3.0, 0.75, 0.5),
        (7, 4.75, 0.25, 0.5),
    ]


DIED = CallFailed(kind="died", detail="")


@pytest.mark.parametrize(
    ("settings", "ends", "reply", "failure", "finish", "limit"),
    [
        ({}, True, Step(done=True, messages=SAYS.messages), None, "stop", ""),
        ({}, True, Step(), None, "stop", ""),
        ({}, True, DIED, "died", "stop", ""),
        ({}, False, None, None, "length", "environment.turn_tokens=5"),  # cut off: the environment is not asked
        ({"turn_tokens": None}, False, None, None, "length", "rollout.max_new_tokens"),
        ({"context": 4}, False, None, None, "length", "context of 4 tokens"),
        ({"cut_turns": "close"}, False, Step(), None, "length", ""),
        ({"max_turns": 1}, True, SAYS, None, "stop", "environment.max_turns=1"),
        # 1 and 3 tokens, 2 of the environment, and none is left
        ({"context": 6}, True, SAYS, None, "length", "context of 6 tokens"),
        ({"context": 7}, True, SAYS, "goes on", None, ""),
    ],
)
def test_a_trajectory_ends_after_a_turn_when_it_should(settings, ends, reply, failure, finish, limit):
    trajectory = a_trajectory(**settings)
    trajectory.add_environment_turn(told([]), 0.0, 0.0)
    trajectory.add_policy_turn(a_turn(trajectory, "ab", ends=ends), 0.0, 0.0)
    if reply:
        trajectory.add_environment_turn(told(reply), 0.0, 0.0)
    if failure == "goes on":
        assert isinstance(trajectory.todo, Request)
        return
    assert trajectory.todo is None
    assert trajectory.played.limit == limit
    assert (trajectory.played.failure and trajectory.played.failure.kind, trajectory.played.completion.finish) == (
        failure,
        finish,
    )
    assert len(trajectory.played.completion.token_ids) == 2 + ends


@pytest.mark.parametrize(("reply", "kind"), [(DIED, "died"), ([{"role": "user", "content": "x" * 80}], "invalid")])
def test_a_trajectory_whose_reset_fails_draws_nothing(reply, kind):
    trajectory = a_trajectory()
    trajectory.add_environment_turn(told(reply), 0.0, 0.0)
    assert trajectory.todo is None
    assert (trajectory.played.failure.kind, trajectory.played.turns, len(trajectory.played.completion.token_ids)) == (
        kind,
        0,
        0,
    )
    assert trajectory.played.log()["said"][-1]["failed"].startswith(f"{kind}: ")


# --- with the fleet, and its workers that die ----------------------------------------------------------------------


def test_turns_of_workers_that_die_and_are_interrupted_are_those_of_an_undisturbed_fleet():
    tokenizer = tokenizer_with(None)
    problems = [Problem(uid=f"p{i}", prompt=f"{i}", answer="") for i in range(30)]

    def make(_):
        turns = iter(range(3))
        return (lambda answer: Step(messages=[{"role": "user", "content": "xy"}], done=next(turns) == 2)), []

    async def scenario():
        rig = Rig(Counter(), Counter())
        tending = asyncio.ensure_future(rig.keep_fit())
        made = player(rig.fleet, Seats(make, delay_s=0.05), tokenizer, cut_turns="close", turn_tokens=4, context=100)
        playing = asyncio.ensure_future(made.play(requests(tokenizer, problems, tokens=12), problems))
        for kill in range(4):
            await asyncio.sleep(0.03)
            await rig.kill(kill % 2)
            await rig.fleet.pause()
            rig.fleet.resume()
        found = await playing
        tending.cancel()
        return found, rig.fleet.counts

    played, counts = run(scenario())
    assert counts.deaths >= 2
    for index, one in enumerate(played):
        expected = [token(index + 1, t) for t in range(12)]
        np.testing.assert_array_equal(one.completion.drawn_ids, expected)
        assert one.turns == 3


# --- with the torch engine -----------------------------------------------------------------------------------------


def says_digits(problem: Problem):
    rng = random.Random(problem.uid)

    def step(answer: str) -> Step:
        said = "".join(rng.choice("0123456789=") for _ in range(rng.randint(1, 5)))
        return Step(messages=[{"role": "tool", "content": said}])

    return step, []


def played_by(
    engine, tokenizer, problems, asked, *, slots: int, delay_s: float, seed: int, context: int = 64
) -> list[Played]:
    async def scenario():
        config = RunConfig().rollout.model_copy(update={"slots": slots, "heartbeat_s": 0.01})
        fleet = await fleet_here([engine], config)
        seats = Seats(says_digits, delay_s=delay_s, seed=seed)
        made = player(fleet, seats, tokenizer, cut_turns="close", turn_tokens=6, max_turns=3, context=context)
        order = random.Random(seed).sample(range(len(asked)), len(asked))
        found = await made.play([asked[i] for i in order], [problems[i] for i in order])
        return [found[order.index(i)] for i in range(len(asked))]

    return run(scenario())


def samples_of(played: list[Played]) -> list[Trajectory]:
    return [
        Trajectory(
            **{name: getattr(one.completion, name) for name in ("uid", "token_ids", "logprobs", "versions", "mask")},
            prompt_ids=one.prompt_ids,
            reward=0.0,
            advantage=0.0,
        )
        for one in played
    ]


@pytest.mark.sampled(2)
@pytest.mark.equal_bits
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("format_name", ["none", "int8", "fp8"])
def test_trajectories_are_the_same_bits_in_any_batch_and_the_learner_has_their_logprobs(
    tiny_spec, tokenizer, model, format_name
):
    problems = [replace(problem, uid=f"{problem.uid}.{g}") for problem in SUMS[:8] for g in range(2)]
    asked = requests(tokenizer, problems, tokens=18)
    runs = []
    for slots, delay_s, kept in ((16, 0.0, 0), (1, 0.0, 1 << 20), (4, 0.02, 1 << 30), (4, 0.05, 1 << 16)):
        engine = engine_with(tiny_spec, model, format_name, slots=slots)
        engine._kept = KeysPool(kept)
        runs.append(played_by(engine, tokenizer, problems, asked, slots=slots, delay_s=delay_s, seed=len(runs)))
    first = runs[0]
    assert {one.turns for one in first} >= {3}
    for other in runs[1:]:
        for one, twin in zip(first, other, strict=True):
            for name in ("token_ids", "logprobs", "mask", "versions"):
                np.testing.assert_array_equal(getattr(one.completion, name), getattr(twin.completion, name))
    batch, learner = to_tensors(samples_of(first)), with_quantized_linears(model, format_name)
    behavior_M = batch.behavior_BT[batch.mask_BT]
    with torch.no_grad():
        padded = token_logprobs(learner, batch.token_ids_BT, batch.mask_BT, 1.0)[batch.mask_BT]
        packed = token_logprobs(learner, batch.token_ids_BT, batch.mask_BT, 1.0, lengths_B=batch.lengths_B)
        states = answer_states(learner, batch.token_ids_BT, batch.mask_BT, None, share_prompts=True)
        shared, _ = score_states(learner, states, batch.token_ids_BT[batch.mask_BT], 1.0)
    for found in (padded, packed[batch.mask_BT], shared):
        assert torch.equal(found, behavior_M)
