"""TextArena's own games behind the adapter: a seed and moves make a game, whatever else its process plays."""

import random
import subprocess
import sys
import time

import pytest

pytest.importorskip("textarena")

from qurl_ray.config import load_config
from qurl_ray.data.tasks import load_task
from qurl_ray.environments.process import CallFailed, EnvironmentProcess
from qurl_ray.errors import DataError
from qurl_ray.tables import PROBLEMS
from qurl_ray.types import Problem

PROMPT = "Play."
MOVES = {
    "GuessTheNumber-v0": lambda draw: f"[{draw.randint(1, 20)}]",
    "FrozenLake-v0-random": lambda draw: draw.choice(["[up]", "[down]", "left", "[right]", "[sideways]"]),
    "TowerOfHanoi-v0": lambda draw: "[{} {}]".format(*draw.sample("ABC", 2)),
    "Mastermind-v0": lambda draw: f"[{' '.join(map(str, draw.sample(range(1, 7), 4)))}]",
    "Sudoku-v0-easy": lambda draw: "[{} {} {}]".format(*(draw.randint(1, 9) for _ in range(3))),
    "2048-v0-mega-easy": lambda draw: draw.choice(["[up]", "[down]", "[left]", "[right]"]),
    "Minesweeper-v0-small": lambda draw: f"[{draw.randint(0, 4)} {draw.randint(0, 4)}]",
    "Bandit-v0": lambda draw: draw.choice(["[red]", "[blue]", "[green]"]),
    "Blackjack-v0": lambda draw: draw.choice(["[Hit]", "[Stand]"]),
    "Countdown-v0": lambda draw: "[{} {} {}]".format(*draw.sample(range(6), 2), draw.choice("+-*")),
    "Crosswords-v0": lambda draw: f"[{draw.randint(0, 9)} {draw.randint(0, 9)} {draw.choice('AEIOST')}]",
    "Cryptarithm-v0": lambda draw: f"[{draw.choice('SENDMORY')} {draw.randint(0, 9)}]",
    "FifteenPuzzle-v0": lambda draw: draw.choice(["[up]", "[down]", "[left]", "[right]"]),
    "Klondike-v0": lambda draw: draw.choice(["draw", "move W T1", "move T1 T2", "move T3 F1"]),
    "LightsOut-v0": lambda draw: f"[{draw.randint(1, 5)},{draw.randint(1, 5)}]",
    "LogicPuzzle-v0": lambda draw: draw.choice(["[wrench James X]", "[x y O]"]),
    "PegJump-v0": lambda draw: f"[{draw.randint(1, 15)} {draw.randint(1, 15)}]",
    "RushHour-v0": lambda draw: f"[{draw.choice('XABC')}{draw.choice('+-')}]",
    "Secretary-v0": lambda draw: draw.choice(["[continue]", "[continue]", "[accept]"]),
    "Set-v0": lambda draw: "[{}, {}, {}]".format(*draw.sample(range(12), 3)),
    "Slitherlink-v0": lambda draw: f"[{draw.choice('hv')} {draw.randint(0, 3)} {draw.randint(0, 3)}]",
    "Sokoban-v0": lambda draw: draw.choice(["[up]", "[down]", "[left]", "[right]"]),
    "ThreeCardMonte-v0": lambda draw: draw.choice(["[9]", "[0]", "[1]"]),
}
"""The games for one player that need no network, with a player each who knows the form of a move."""
if sys.version_info < (3, 12):
    del MOVES["Klondike-v0"]  # its source needs the f-strings of 3.12
TURNS = 14


def process(timeout_s: float = 60.0, **params) -> EnvironmentProcess:
    return EnvironmentProcess("textarena", params, timeout_s=timeout_s, memory_gb=2.0)


def problem(game: str, seed: int | None = None, uid: str = "train-0", **params) -> Problem:
    seeded = {} if seed is None else {"seed": seed}
    return Problem(uid=uid, prompt=PROMPT, answer="", meta={"game": game, "params": params} | seeded)


class Trajectory:
    """A game of a player who draws his moves from a seed; he plays on after invalid ones."""

    def __init__(self, arena: EnvironmentProcess, game: str, seed: int) -> None:
        self.arena, self.name, self.player = arena, f"{game}/{seed}", random.Random(f"player {seed}")
        self.move, self.over = MOVES[game], False
        self.seen: list = [arena.reset(self.name, problem(game, seed))]

    def turn(self) -> None:
        if self.over:
            return
        step = self.arena.step(self.name, self.move(self.player))
        self.seen.append(step)
        self.over = isinstance(step, CallFailed) or step.done


@pytest.fixture(scope="module")
def arena():
    with process(error_allowance=1000) as found:
        yield found


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A process whose games allow the invalid moves that they allow, on a machine without nltk's data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NLTK_DATA", str(tmp_path_factory.mktemp("nothing")))
        with process() as found:
            found.check()
            yield found


@pytest.fixture(scope="module")
def elsewhere():
    """A process whose sets and dictionaries of texts have another order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "12345")
        with process(error_allowance=1000) as found:
            found.reset("first", problem("GuessTheNumber-v0", 1))
            yield found


def alone(arena: EnvironmentProcess, game: str, seed: int) -> list:
    trajectory = Trajectory(arena, game, seed)
    for _ in range(TURNS):
        trajectory.turn()
    arena.forget(trajectory.name)
    return trajectory.seen


@pytest.mark.sampled(4)
@pytest.mark.parametrize("game", MOVES)
def test_games_in_one_process_are_what_each_is_alone_in_another(game, arena, elsewhere):
    """The others: the same game with another seed, and one that draws in every move."""
    expected = [alone(elsewhere, *which) for which in ((game, 3), (game, 4), ("2048-v0-mega-easy", 5))]
    together = [Trajectory(arena, *which) for which in ((game, 3), (game, 4), ("2048-v0-mega-easy", 5))]
    order = random.Random(game)
    for _ in range(TURNS):
        for trajectory in order.sample(together, len(together)):
            trajectory.turn()
    for trajectory in together:
        arena.forget(trajectory.name)
    assert [trajectory.seen for trajectory in together] == expected
    seen = expected[0]
    assert not [step for step in seen if isinstance(step, CallFailed)]
    assert len(seen) > 1
    assert all(message["content"].strip() for step in seen[1:] for message in step.messages)


def test_the_seed_decides_and_a_right_guess_is_worth_one(arena):
    """The secret is the first number that Python's generator draws with the seed."""
    for seed in (3, 4):
        secret = random.Random(seed).randint(1, 20)
        (rules,) = arena.reset("a", problem("GuessTheNumber-v0", seed))
        assert "between 1 and 20 within 10 turns" in rules["content"]
        wrong = secret + 1 if secret < 20 else secret - 1
        step = arena.step("a", f"I say [{wrong}].")
        assert step.messages == [
            {"role": "user", "content": f"The target number is {'lower' if wrong > secret else 'higher'}."}
        ]
        assert (step.reward, step.done, step.info) == (0.0, False, {"calls": 1, "failed_calls": 0})
        step = arena.step("a", str(secret))  # the game's wrapper writes the brackets
        assert (step.reward, step.done) == (1.0, True)
        assert "Congratulations" in step.messages[0]["content"]


def test_without_a_seed_the_uid_decides(arena):
    def secret(uid: str) -> int:
        arena.reset("a", problem("GuessTheNumber-v0", uid=uid, max_number=1000, max_turns=2000))
        low, high = 1, 1000
        while True:
            middle = (low + high) // 2
            step = arena.step("a", f"[{middle}]")
            if step.done:
                return middle
            low, high = (low, middle - 1) if "lower" in step.messages[0]["content"] else (middle + 1, high)

    assert secret("train-1") == secret("train-1")
    assert len({secret(f"train-{number}") for number in range(5)}) == 5


def test_the_game_ends_at_its_own_limits_with_a_part_of_the_reward(arena):
    arena.reset("a", problem("TowerOfHanoi-v0", 1, max_turns=1))
    assert not arena.step("a", "[A C]").done
    step = arena.step("a", "[A B]")
    assert (step.done, step.reward) == (True, 0.0)  # the smallest disk is not the first of tower C
    secret = random.Random(3).randint(1, 20)
    arena.reset("a", problem("GuessTheNumber-v0", 3, max_turns=1))
    arena.step("a", f"[{20 if secret < 20 else 1}]")
    step = arena.step("a", f"[{secret - 1 if secret > 1 else 2}]")
    assert step.done
    assert step.reward == pytest.approx(1 - 1 / 19)


def test_an_invalid_move_is_answered_and_the_second_ends_the_game(plain, arena):
    plain.reset("a", problem("GuessTheNumber-v0", 3))
    step = plain.step("a", "no number")
    assert "You attempted an invalid move" in step.messages[0]["content"]
    assert (step.done, step.reward, step.info) == (False, 0.0, {"calls": 1, "failed_calls": 1})
    step = plain.step("a", "no number")
    assert (step.done, step.reward, step.info) == (True, 0.0, {"calls": 1, "failed_calls": 1})
    assert plain.traits.deterministic
    arena.reset("a", problem("GuessTheNumber-v0", 3))
    assert [arena.step("a", "no number").done for _ in range(5)] == [False] * 5  # it allows more


HOSTILE = ["", " ", "[]", "[" * 10_000, "[1" * 5_000, "x" * 200_000, "[٣]", "[²]", "\x00[\u202e5]", "[💥 A]", "]["]
HOSTILE += [f"[{'9' * 4_000}]", "[0 0 0]", "[-1 -1]", "[1 1 1 1]\n[2 2 2 2]"]


@pytest.mark.parametrize("game", MOVES)
def test_no_answer_breaks_a_game(game, arena):
    arena.reset("a", problem(game, 1))
    for answer in HOSTILE:
        step = arena.step("a", answer)
        assert not isinstance(step, CallFailed), (answer[:20], step)
        if step.done:
            arena.reset("a", problem(game, 1))


def test_what_the_prompt_says_is_not_said_again(arena):
    (rules,) = arena.reset("a", problem("FrozenLake-v0", 1))
    asked = Problem(uid="0", prompt=f"Win!\n{rules['content']}", answer="", meta={"game": "FrozenLake-v0", "seed": 1})
    assert arena.reset("a", asked) == []


def test_its_games_are_problems_that_the_environment_continues(arena):
    params = "{game: FrozenLake-v0, count: 30, seed: 7, num_holes: 2}"
    config = load_config(None, ["task.type=custom", "task.problems=textarena", f"task.params={params}"])
    task = load_task(config.task, eval_problems=9)
    problems = [*task.train, *task.held_out]
    assert (len(task.train), len(task.held_out)) == (27, 3)
    assert [one.meta["seed"] for one in problems] == list(range(7, 37))
    assert len({one.prompt for one in problems}) == 30
    for one in problems[:3]:
        assert one.prompt.startswith(f"Game {one.meta['seed']}.\n\nWelcome to Frozen Lake!")
        assert one.prompt.count(" H ") == 2
        assert arena.reset("a", one) == []


def test_the_task_leaves_the_global_generator_as_it_was():
    random.seed(5)
    expected = random.Random(5).random()
    list(PROBLEMS.load("textarena")(game="Sudoku-v0", count=1))
    assert random.random() == expected


@pytest.mark.parametrize(
    ("game", "params", "message"),
    [
        ("GuessTheNumbers-v0", {}, "no game 'GuessTheNumbers-v0'; did you mean 'GuessTheNumber-v0'"),
        ("ConnectFour-v0", {}, "ConnectFour-v0 cannot be played by one player"),
        ("TwentyQuestions-v0", {}, "asks a language model behind a network"),
        ("GuessWho-v0", {}, "asks a language model behind a network"),
        ("GuessTheNumber-v0", {"speed": 3}, "unexpected keyword argument 'speed'"),
        *((f"{game}-v0", {}, f"nltk's {data!r}, which this machine does not have: `python -m nltk.downloader {data}`")
          for game, data in [("Hangman", "words"), ("WordLadder", "words"), ("WordSearch", "words"),
                             ("Wordle", "averaged_perceptron_tagger_eng")]),
    ],
)  # fmt: skip
def test_a_game_that_cannot_be_played_is_an_error_with_its_reason(game, params, message, plain):
    failed = plain.reset("a", problem(game, 1, **params))
    assert isinstance(failed, CallFailed)
    assert failed.kind == "error"
    assert message in failed.detail
    assert len(failed.detail) < 800


def test_no_game_is_named(arena):
    failed = arena.reset("a", Problem(uid="0", prompt=PROMPT, answer=""))
    assert "environment.params={game: GuessTheNumber-v0}" in failed.detail


def test_a_task_of_an_unknown_game_is_an_error():
    params = "task.params={game: Sudoky-v0}"
    config = load_config(None, ["task.type=custom", "task.problems=textarena", params])
    with pytest.raises(DataError, match="no game 'Sudoky-v0'; did you mean 'Sudoku-v0'"):
        load_task(config.task, eval_problems=9)


def test_word_games_are_played_with_the_words_that_are_there(tmp_path, monkeypatch):
    folder = tmp_path / "corpora" / "words"
    folder.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (folder / name).write_text("zebra\n")
    (folder / "README").write_text("")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    with process() as own:
        own.reset("a", problem("Hangman-v0", 1))
        step = own.step("a", "[zebra]")
        assert (step.done, step.reward) == (True, 1.0)


def test_the_import_is_not_part_of_a_call_and_the_settings_may_name_the_game():
    """The package takes twice as long to import as this call may take."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import textarena"], check=True)
    with process(timeout_s=(time.monotonic() - began) / 2, game="GuessTheNumber-v0", max_number=30) as own:
        (rules,) = own.reset("a", Problem(uid="0", prompt=PROMPT, answer=""))
        assert "between 1 and 30" in rules["content"]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 can read this game")
def test_a_game_for_a_newer_python_says_so(plain):
    assert "Klondike-v0 needs a newer Python" in plain.reset("a", problem("Klondike-v0", 1)).detail
