"""TextArena's games for one player (https://github.com/LeonGuertler/TextArena): an environment, and its problems.

The games draw from Python's global `random` when they are made, at their start, and in some moves. Here each game has a
state of that generator of its own, which is in place only while the game works. So a seed and moves always lead to the
same game, whatever other games share the process.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from typing import Any

import nltk
import textarena as ta

from qurl_ray.environments.protocol import EnvironmentMessage, Step, seed_of
from qurl_ray.errors import EnvironmentFailed
from qurl_ray.extensions import did_you_mean
from qurl_ray.types import Problem

_ASK_A_MODEL = ("GuessWho", "TwentyQuestions")
"""Games whose answers come from a language model behind a network."""
_PLAYER = 0


def games(*, game: str, count: int = 1000, seed: int = 0, **params: Any) -> Iterator[dict[str, Any]]:
    """Yield games as problems, for `task.problems=textarena`. A prompt is the number of the game and what the game says
    first; `meta` has what the environment needs to continue it.

    Args:
        game: name of the game, such as "GuessTheNumber-v0".
        count: number of games.
        seed: seed of the first game; each further one has the next seed.
        params: keyword arguments of the game.

    Raises:
        EnvironmentFailed: there is no such game, or it cannot be played here.
    """
    for number in range(seed, seed + count):
        with redirect_stdout(StringIO()):  # some games print while they are made
            said, _ = _Game(game, params, number).news()
        meta = {"game": game, "params": params, "seed": number}
        yield {"prompt": f"Game {number}.\n\n{said}", "meta": meta}


class TextArena:
    """A game, which the problem's `meta` names as `games` does: `game`, `params`, `seed`. Without a seed there, it
    comes from the problem's uid.

    Every move counts as a call, an invalid one as a failed call. The reward comes with the last move, and is the
    game's own: 1 for a win, often a part of it for what was reached. A trajectory that is cut off before has 0.

    Args:
        game: name of the game of problems that name none.
        error_allowance: number of invalid moves in a row after which the next one ends the game; None is the game's
            own, mostly 1.
        params: keyword arguments of the game of problems that name none.
    """

    deterministic = True

    def __init__(self, *, game: str | None = None, error_allowance: int | None = None, **params: Any) -> None:
        self._name, self._error_allowance, self._params = game, error_allowance, params

    def reset(self, problem: Problem) -> list[EnvironmentMessage]:
        name, params = problem.meta.get("game", self._name), problem.meta.get("params", self._params)
        if not isinstance(name, str):
            raise EnvironmentFailed("textarena: name a game with environment.params={game: GuessTheNumber-v0}")
        self._game = _Game(name, params, seed_of(problem), self._error_allowance)
        said, _ = self._game.news()
        return [] if said in problem.prompt else _messages(said)

    def step(self, answer: str) -> Step:
        done = self._game.move(answer)
        said, invalid = self._game.news()
        if not done:
            return Step(messages=_messages(said), reward=0.0, info={"calls": 1, "failed_calls": int(invalid)})
        reward, reason, invalid = self._game.outcome()
        info = {"calls": 1, "failed_calls": int(invalid)}
        return Step(messages=_messages(reason), reward=reward, done=True, info=info)


class _Game:
    """A game that has begun, with its own state of the global generator."""

    def __init__(self, name: str, params: dict[str, Any], seed: int, error_allowance: int | None = None) -> None:
        known = ta.envs.registration.ENV_REGISTRY
        if name not in known:
            raise EnvironmentFailed(f"textarena has no game {name!r}{did_you_mean(name, known)}")
        if name.startswith(_ASK_A_MODEL):
            raise EnvironmentFailed(f"{name} asks a language model behind a network, which this environment does not")
        nltk.download = _find_words
        self._random = random.Random(seed).getstate()
        with self._own_random():
            try:
                self._env = ta.make(name, **params)
                self._env.reset(num_players=1, seed=seed)
            except SyntaxError as error:
                message = f"{name} needs a newer Python than {sys.version.split()[0]}: {error}"
                raise EnvironmentFailed(message) from error
            except AssertionError as error:
                raise EnvironmentFailed(f"{name} cannot be played by one player: {error}") from error
        self._inner = self._env
        while isinstance(self._inner, ta.Wrapper):
            self._inner = self._inner.env
        if not isinstance(self._inner.state, ta.SinglePlayerState):
            raise EnvironmentFailed(f"{name} is not a game for one player")
        if error_allowance is not None:
            self._inner.state.error_allowance = error_allowance

    def move(self, answer: str) -> bool:
        """Make a move. Return True if the game is over."""
        with self._own_random():
            done, _ = self._env.step(answer)
        return bool(done)

    def news(self) -> tuple[str, bool]:
        """Return what the game has said since the last call, without the player's own words, and whether it refused
        the last move."""
        # The wrappers that make an observation text repeat all that was said before.
        _, said = self._inner.get_observation()
        kinds = ta.ObservationType
        # Countdown gives the move as the kind of its observation.
        texts = [text for _, text, kind in said if isinstance(kind, kinds) and kind != kinds.PLAYER_ACTION]
        return "\n".join(texts), any(kind == kinds.GAME_ADMIN for _, _, kind in said)

    def outcome(self) -> tuple[float, str, bool]:
        """Return the reward of a game that is over, the reason, and whether that is an invalid move."""
        rewards, about = self._env.close()
        return float(rewards[_PLAYER]), str(about[_PLAYER].get("reason") or ""), bool(about[_PLAYER]["invalid_move"])

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        outside = random.getstate()
        random.setstate(self._random)
        try:
            yield
        finally:
            self._random = random.getstate()
            random.setstate(outside)


def _messages(said: str) -> list[EnvironmentMessage]:
    return [{"role": "user", "content": said}]


def _find_words(name: str, *_: Any, **__: Any) -> bool:
    """Stand-in for nltk.download, with which word games begin, and which waits for a network or fails without a word.

    Raises:
        EnvironmentFailed: this machine does not have the data.
    """
    for folder in ("corpora", "taggers"):
        with suppress(LookupError):
            nltk.data.find(f"{folder}/{name}")
            return True
    raise EnvironmentFailed(
        f"this game needs nltk's {name!r}, which this machine does not have: `python -m nltk.downloader {name}` where "
        "there is a network, and NLTK_DATA as the folder's path"
    )
