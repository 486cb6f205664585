"""Trajectories of several rows: each token is trained once, in the row in which it was drawn, after what the chat
template makes of the conversation."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.actors.local import fleet_here
from qurl_ray.actors.trajectories import Played
from qurl_ray.config import RunConfig
from qurl_ray.engines.torch.kept import KeysPool
from qurl_ray.environments.protocol import Step
from qurl_ray.learner.batching import rows_of, to_tensors
from qurl_ray.policy.logprobs import token_logprobs
from qurl_ray.types import Completion, Problem, Request, Trajectory, Verdict
from tests.actors.test_fleet import Rig, run, token
from tests.actors.test_fleet import Worker as Counter
from tests.actors.test_trajectories import Scripted, Seats, player, requests
from tests.conftest import SUMS
from tests.data.test_turns import THINKS, tokenizer_with
from tests.engines.test_torch_engine import engine_with, with_quantized_linears

SPECIAL = ("<|im_start|>", "<|im_end|>")


class Thinker(Scripted):
    """Draws thoughts, answers, special tokens and texts that look like them; the log-prob of each token is its number
    among the drawn ones, negative, and its version the number of the turn."""

    def __init__(self, tokenizer) -> None:
        super().__init__(len(tokenizer), tokenizer.eos_token_id)
        self._tokenizer = tokenizer

    async def generate(self, request: Request) -> Completion:
        rng, ids = random.Random(request.seed * 1_000_003 + request.drawn), []
        for _ in range(rng.randint(1, 3)):
            text = rng.choice(["<think>é</think>", "ab", "\n", "<|im_end|>", "</think>", "qurl hidden 3e8d 0."])
            ids += self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            ids += [self._tokenizer.convert_tokens_to_ids("<|im_start|>")] * (rng.random() < 0.1)
        most = request.sampling.max_new_tokens
        ids = [*ids, self._stop][:most]
        completion = Completion(
            uid=request.uid,
            token_ids=np.array(ids, np.int32),
            logprobs=-np.arange(request.drawn, request.drawn + len(ids), dtype=np.float32),
            versions=np.full(len(ids), len(self.asked.get(request.uid, [])), np.int32),
            finish="stop" if ids[-1] == self._stop else "length",
        )
        self.asked.setdefault(request.uid, []).append((request, completion))
        return completion


def chatty(problem: Problem):
    """Users and tools that say something, now and then what looks like a special token."""
    rng = random.Random(problem.uid)
    turns = rng.randint(1, 6)

    def message(*roles: str) -> dict:
        return {"role": rng.choice(roles), "content": rng.choice(["", "low", "\n", "é", "<|im_end|>x", "</think>"])}

    def step(answer: str) -> Step:
        nonlocal turns
        turns -= 1
        said = [message("user", "tool") for _ in range(rng.randint(1, 2))]
        return Step(messages=said, reward=rng.choice([0.0, 1.0]), done=turns == 0)

    return step, [message("user")] if rng.random() < 0.3 else []


def sample_of(one: Played) -> Trajectory:
    names = ("uid", "token_ids", "logprobs", "versions", "mask", "rows")
    return Trajectory(
        **{name: getattr(one.completion, name) for name in names},
        prompt_ids=one.prompt_ids,
        reward=one.reward or 0.0,
        advantage=0.0,
        turns=one.credit(Verdict(reward=0.0)),
    )


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    cut=st.sampled_from(["end", "close"]),
    context=st.sampled_from([160, 400]),
    turn_tokens=st.sampled_from([9, 40]),
)
def test_every_token_is_trained_once_in_the_row_in_which_it_was_drawn(seed, cut, context, turn_tokens):
    tokenizer = tokenizer_with(THINKS)
    problems = [Problem(uid=f"p{seed}.{i}", prompt="guess", answer="") for i in range(6)]
    fleet = Thinker(tokenizer)
    made = player(
        fleet, Seats(chatty), tokenizer, chat=True, context=context, cut_turns=cut, turn_tokens=turn_tokens,
        max_turns=5, rewritten_history="new_row",
    )  # fmt: skip
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "guess"}], add_generation_prompt=True, return_dict=False
    )
    asked = [
        replace(request, prompt_ids=np.array(prompt, np.int32), seed=seed % 1000 + i)
        for i, request in enumerate(requests(tokenizer, problems, tokens=90))
    ]
    for request, one in zip(asked, asyncio.run(made.play(asked, problems)), strict=True):
        calls, rows = fleet.asked[request.uid], rows_of(sample_of(one))
        drawn = np.concatenate([part.token_ids for _, part in calls])
        assert [call.drawn for call, _ in calls] == [0, *np.cumsum([len(part.token_ids) for _, part in calls])[:-1]]
        for name, expected in (
            ("token_ids", drawn),
            ("logprobs", -np.arange(len(drawn), dtype=np.float32)),
            ("versions", np.concatenate([part.versions for _, part in calls])),
        ):
            found = np.concatenate([getattr(row, name)[row.mask] for row in rows])
            np.testing.assert_array_equal(found, expected)
        assert sum(len(row.turns.ends) for row in rows) == len(calls)
        turns, messages = iter(calls), [{"role": "user", "content": "guess"}, *one.said[0].messages]
        number, begins = 0, 0
        for row in rows:
            whole = np.concatenate([row.prompt_ids, row.token_ids])
            assert len(whole) <= context
            assert row.mask[0]  # the prompt ends where the policy began
            assert not row.logprobs[~row.mask].any()
            assert (row.versions[~row.mask] == -1).all()
            expects_prompt(tokenizer, row.prompt_ids, messages)
            for at in row.drawn_ends - row.turn_lengths:  # the engine was asked after exactly what is trained before it
                call, part = next(turns)
                start = row.places[at]
                np.testing.assert_array_equal(call.prompt_ids, whole[:start])
                np.testing.assert_array_equal(part.token_ids, whole[start : start + len(part.token_ids)])
                text = tokenizer.decode(whole[: start + len(part.token_ids) - (part.finish == "stop")])
                answer = tokenizer.decode(part.token_ids[: len(part.token_ids) - (part.finish == "stop")])
                messages.append({"role": "assistant", "content": answer})
                number += 1
                if number == len(calls):
                    break
                messages += one.said[number].messages
                rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
                begins += not rendered.startswith(text)  # the template no longer writes what the row holds
                assert begins == sum(turn.at >= begin for begin in one.completion.rows for turn in [one.drew[number]])
    assert next(turns, None) is None


def expects_prompt(tokenizer, ids: np.ndarray, messages: list[dict]) -> None:
    """The ids are what transformers makes of the messages, but for contents that look like special tokens."""
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids) == text
    if not any(special in message["content"] for special in SPECIAL for message in messages):
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids.tolist() == expected
    assert (ids == tokenizer.eos_token_id).sum() == len(messages)  # nobody but the template ends a message


def test_rows_begin_and_go_on_and_the_figures_are_those_of_the_trajectories():
    """What the property says of few would be void if none had several rows."""
    tokenizer = tokenizer_with(THINKS)
    problems = [Problem(uid=f"p{i}", prompt="guess", answer="") for i in range(400)]
    counts = {}
    for history in ("new_row", "keep"):
        made = player(
            Thinker(tokenizer), Seats(chatty), tokenizer, chat=True, context=400, cut_turns="close", turn_tokens=20,
            max_turns=5, rewritten_history=history,
        )  # fmt: skip
        played = asyncio.run(made.play(requests(tokenizer, problems, tokens=90), problems))
        counts[history] = np.bincount([len(one.completion.rows) for one in played])
        assert all(one.turns > len(one.completion.rows) for one in played)
        assert any(0 < len(one.completion.rows) < one.turns - 1 for one in played) == (history == "new_row")
    assert (counts["new_row"][:4] > 20).all()
    assert counts["keep"].tolist() == [400]


def test_a_new_row_has_room_where_the_old_one_has_none():
    """The thought alone fills the row. Without it, the trajectory goes on."""
    tokenizer = tokenizer_with(THINKS)
    text = "<think>" + "x" * 60 + "</think>ab"

    def one(history: str, context: int) -> Played:
        made = player(
            Fixed(tokenizer, text), Seats(lambda _: (lambda answer: Step(messages=[LOW]), [])), tokenizer, chat=True,
            context=context, max_turns=4, rewritten_history=history,
        )  # fmt: skip
        (asked,) = requests(tokenizer, [Problem(uid="p", prompt="", answer="")], tokens=1000)
        ids = tokenizer.apply_chat_template([EMPTY], add_generation_prompt=True, return_dict=False)
        asked = replace(asked, prompt_ids=np.array(ids, np.int32))
        return asyncio.run(made.play([asked], [Problem(uid="p", prompt="", answer="")]))[0]

    LOW, EMPTY = {"role": "user", "content": "low"}, {"role": "user", "content": ""}
    context = 210
    kept, anew = one("keep", context), one("new_row", context)
    assert (kept.turns, kept.completion.finish, kept.completion.rows) == (2, "length", ())
    assert (anew.turns, anew.completion.finish, len(anew.completion.rows)) == (4, "stop", 3)


class Fixed(Scripted):
    """Draws the same text in each turn."""

    def __init__(self, tokenizer, text: str) -> None:
        super().__init__(len(tokenizer), tokenizer.eos_token_id)
        self._ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    async def generate(self, request: Request) -> Completion:
        ids = self._ids[: request.sampling.max_new_tokens]
        assert len(request.prompt_ids) - (request.drawn - request.elsewhere) > 0
        return Completion(
            uid=request.uid,
            token_ids=np.array(ids, np.int32),
            logprobs=np.zeros(len(ids), np.float32),
            versions=np.zeros(len(ids), np.int32),
            finish="stop" if ids == self._ids else "length",
        )


# --- with the fleet, and its workers that die ----------------------------------------------------------------------

FORGETS = (
    "{% for m in messages %}"
    "{{ m.content if loop.last or m.role != 'assistant' or m.content == m.content.lower() else '?' }}"
    "{% endfor %}"
)
"""Earlier turns with a capital letter are forgotten."""


def test_rows_of_workers_that_die_and_are_interrupted_are_those_of_an_undisturbed_fleet():
    tokenizer = tokenizer_with(FORGETS)
    problems = [Problem(uid=f"p{i}", prompt=f"{i}", answer="") for i in range(30)]

    def make(_):
        turns = iter(range(3))
        return (lambda answer: Step(messages=[{"role": "user", "content": "xy"}], done=next(turns) == 2)), []

    async def scenario(kills: int):
        rig = Rig(Counter(), Counter())
        tending = asyncio.ensure_future(rig.keep_fit())
        made = player(
            rig.fleet, Seats(make, delay_s=0.05), tokenizer, chat=True, cut_turns="close", turn_tokens=4, context=100,
            rewritten_history="new_row",
        )  # fmt: skip
        playing = asyncio.ensure_future(made.play(requests(tokenizer, problems, tokens=12), problems))
        for kill in range(kills):
            await asyncio.sleep(0.03)
            await rig.kill(kill % 2)
            await rig.fleet.pause()
            rig.fleet.resume()
        found = await playing
        tending.cancel()
        return found, rig.fleet.counts

    undisturbed, _ = run(scenario(0))
    played, counts = run(scenario(4))
    assert counts.deaths >= 2
    for index, (one, other) in enumerate(zip(played, undisturbed, strict=True)):
        np.testing.assert_array_equal(one.completion.drawn_ids, [token(index + 1, t) for t in range(12)])
        np.testing.assert_array_equal(one.completion.token_ids, other.completion.token_ids)
        assert one.turns == 3
        assert one.completion.rows == other.completion.rows
    assert sum(len(one.completion.rows) for one in played) > 20


# --- with the torch engine -----------------------------------------------------------------------------------------

FORGETS_SIGNS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ m.content if loop.last else m.content.split('=')[-1].split('-')[-1].split('+')[-1] }}{{ '<eos>' }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
"""In the tiny policy's alphabet: of an earlier turn only what follows a sign is left."""


def says_digits(problem: Problem):
    rng = random.Random(problem.uid)
    return (lambda answer: Step(messages=[{"role": "user", "content": f"{rng.randint(0, 99)}="}])), []


def played_by(engines, tokenizer, problems, asked, *, slots: int, delay_s: float, seed: int) -> list[Played]:
    async def scenario():
        config = RunConfig().rollout.model_copy(update={"slots": slots, "heartbeat_s": 0.01})
        fleet = await fleet_here(engines, config)
        made = player(
            fleet, Seats(says_digits, delay_s=delay_s, seed=seed), tokenizer, chat=True, cut_turns="close",
            turn_tokens=6, max_turns=4, context=64, rewritten_history="new_row",
        )  # fmt: skip
        order = random.Random(seed).sample(range(len(asked)), len(asked))
        found = await made.play([asked[i] for i in order], [problems[i] for i in order])
        return [found[order.index(i)] for i in range(len(asked))]

    return run(scenario())


@pytest.mark.equal_bits
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("format_name", ["none", "int8"])
def test_rows_are_the_same_bits_in_any_batch_and_on_two_workers_and_the_learner_has_their_logprobs(
    tiny_spec, tokenizer, model, format_name
):
    tokenizer = type(tokenizer).from_pretrained(tiny_spec.source)
    tokenizer.chat_template = FORGETS_SIGNS
    problems = [replace(problem, uid=f"{problem.uid}.{g}") for problem in SUMS[:6] for g in range(3)]
    asked, runs = requests(tokenizer, problems, tokens=22), []
    for workers, slots, delay_s, kept in ((1, 16, 0.0, 0), (1, 1, 0.0, 1 << 20), (2, 3, 0.02, 1 << 30)):
        engines = [engine_with(tiny_spec, model, format_name, slots=slots) for _ in range(workers)]
        for engine in engines:
            engine._kept = KeysPool(kept)
        runs.append(played_by(engines, tokenizer, problems, asked, slots=slots, delay_s=delay_s, seed=len(runs)))
    first = runs[0]
    assert sum(len(one.completion.rows) for one in first) > len(first)
    for other in runs[1:]:
        for one, twin in zip(first, other, strict=True):
            assert one.completion.rows == twin.completion.rows
            for name in ("token_ids", "logprobs", "mask", "versions"):
                np.testing.assert_array_equal(getattr(one.completion, name), getattr(twin.completion, name))
    batch = to_tensors([row for one in first for row in rows_of(sample_of(one))])
    learner = with_quantized_linears(model, format_name)
    with torch.no_grad():
        padded = token_logprobs(learner, batch.token_ids_BT, batch.mask_BT, 1.0)
        packed = token_logprobs(learner, batch.token_ids_BT, batch.mask_BT, 1.0, lengths_B=batch.lengths_B)
    for found in (padded, packed):
        assert torch.equal(found[batch.mask_BT], batch.behavior_BT[batch.mask_BT])
    assert int(batch.mask_BT.sum()) == sum(one.completion.drawn for one in first)
