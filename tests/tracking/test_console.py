import io
import math
import shlex

import pytest
from rich.console import Console

from qurl_ray.report.text import duration, one_line
from qurl_ray.tracking.console import COLUMNS, Pace, open_console, step_table
from qurl_ray.tracking.summary import commands
from qurl_ray.types import Event

VALUES = {
    "reward/mean": 0.4123,
    "mismatch/kl": 0.00312,
    "mismatch/ess": 0.987,
    "clip/upper": 0.003,
    "clip/lower": 0.001,
    "rollout/tokens_per_second": 1234.4,
    "time/step": 2.5,
}


def console(*, terminal: bool = False) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=terminal, width=120, height=40, highlight=False, color_system=None
    )


def shown(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def step(n: int, **more: float) -> Event:
    return Event(kind="step", step=n, values={**VALUES, **more})


def opened(mode, screen, steps=10):
    sink = open_console(mode, steps=steps, title="demo", console=screen)
    assert sink is not None
    return sink


def test_a_plain_line_holds_step_numbers_and_time_left():
    screen = console()
    sink = opened("auto", screen)
    sink.handle(step(1), 100.0)
    sink.handle(step(2), 107.0)
    sink.close("finished")
    assert shown(screen).splitlines() == [
        # the first has only its own 2.5 s to go by, 9 * 2.5 = 22.5; then the clock says 7 s a step
        "step 1/10  reward 0.412  KL(b‖p) 3.12e-03  clipped 0.40%  ESS 0.987  tokens/s 1,234  s/step 2.50  left 0:22",
        "step 2/10  reward 0.412  KL(b‖p) 3.12e-03  clipped 0.40%  ESS 0.987  tokens/s 1,234  s/step 2.50  left 0:56",
    ]


def test_missing_and_broken_numbers_are_shown_as_such():
    screen = console()
    sink = opened("plain", screen)
    sink.handle(Event(kind="step", step=1, values={"reward/mean": math.nan, "mismatch/kl": "n/a"}), 1.0)
    assert "reward nan  KL(b‖p) –  clipped –" in shown(screen)
    assert "left –" in shown(screen)


def test_none_shows_nothing():
    assert open_console("none", steps=1, title="demo") is None


def test_auto_draws_a_table_on_a_terminal_with_the_last_eight_steps():
    screen = console(terminal=True)
    sink = opened("auto", screen, steps=20)
    for n in range(1, 12):
        sink.handle(step(n), 10.0 * n)
    sink.handle(Event(kind="evaluation", step=11, values={"eval/accuracy": 0.625}), 111.0)
    sink.close("finished")
    last = shown(screen).split("demo")[-1]
    assert "11/20" in last
    assert "left 1:30" in last  # 9 steps of 10 s
    assert "62.5%" in last
    rows = [line.split()[1] for line in last.splitlines() if line.startswith("│")]
    assert rows == [str(n) for n in range(4, 12)]


def test_warnings_and_samples_are_shown_as_they_are_without_markup_or_escape_codes():
    screen = console(terminal=True)
    sink = opened("table", screen)
    samples = [{"prompt": "[red]1+1[/red]=", "answer": "[/bold]\n\x1b[2J2", "reward": 1.0}]
    sink.handle(Event(kind="warning", step=4, message="odd [/nonsense] text"), 1.0)
    sink.handle(Event(kind="samples", step=4, values={"samples": samples}), 1.0)
    sink.close("finished")
    assert "warning (step 4): odd [/nonsense] text" in shown(screen)
    assert "[red]1+1[/red]= → [/bold]⏎·[2J2  reward 1" in shown(screen)
    assert "\x1b[2J2" not in shown(screen)


def test_long_plain_lines_are_not_wrapped():
    screen = console()
    opened("plain", screen).handle(Event(kind="warning", step=1, message="x" * 400), 1.0)
    assert len(shown(screen).splitlines()) == 1


def test_an_evaluation_is_a_line_of_its_numbers():
    screen = console()
    sink = opened("plain", screen)
    sink.handle(Event(kind="evaluation", step=0, values={"eval/accuracy": 0.38, "eval/problems": 500}), 1.0)
    assert shown(screen) == "evaluation at step 0  solved 0.38  problems 500\n"


def test_the_bar_says_what_goes_on_until_a_step_and_begins_where_a_run_resumes():
    screen = console(terminal=True)
    sink = opened("table", screen, steps=20)
    sink.stage("starting [Ray]", 7)
    sink._view._live.refresh()
    assert "demo: starting [Ray]" in shown(screen).splitlines()[-1]
    assert " 7/20" in shown(screen).splitlines()[-1]
    sink.handle(step(8), 2.0)
    sink.close("finished")
    assert shown(screen).split("demo")[-1].lstrip()[0] != ":"
    assert " 8/20" in shown(screen).split("demo")[-1]


def test_figures_of_one_set_of_held_out_problems_are_one_number_each():
    screen = console()
    values = {"eval/accuracy": 0.5, "eval/aime24/accuracy": 0.25, "eval/aime24/low": 0.1, "eval/aime24/reward": 0.25}
    opened("plain", screen).handle(Event(kind="evaluation", step=0, values=values), 1.0)
    assert shown(screen) == "evaluation at step 0  solved 0.5  aime24 0.25\n"


def test_commands_are_below_the_summary_in_one_piece():
    screen = Console(file=io.StringIO(), force_terminal=True, width=80, highlight=False, color_system=None)
    values = {
        "mlflow_uri": "sqlite:////" + "a-long-folder/" * 6 + "mlflow.db",
        "mlflow_page": "http://127.0.0.1:5000/#/experiments/1/runs?viewStateShareKey=qurl-ray&compareRunsMode=CHART",
        "run_dir": "/runs/demo",
        "policy": "/runs/demo/policy",
    }
    opened("plain", screen).handle(Event(kind="summary", step=1, values=values | {"interrupted": True}), 1.0)
    below = shown(screen).split("╯")[1].split("\n", 1)[1]
    assert below.splitlines()[0] == "the run has not made all its steps: the same command resumes it"
    assert "".join(below.splitlines()[1:-1]) == (
        f"mlflow ui --backend-store-uri {values['mlflow_uri']}{values['mlflow_page']}"
    )
    assert below.splitlines()[-1] == "qurl evaluate /runs/demo --samples 8"
    assert "interrupted" not in shown(screen)


def test_the_summary_shows_what_was_measured_and_only_that():
    screen = console()
    values = {
        "accuracy_before": 0.382,
        "accuracy_after": 0.874,
        "eval_problems": 500,
        "train_seconds": 187.2,
        "phase_seconds": {"rollout": 30.0, "update": 90.0},
        "policy": "/runs/[demo]/policy",
        "mlflow_uri": "sqlite:////runs/mlflow.db",
        "uaq_scale": 1.5,
        "accuracy_after_quantized": None,
        "something_else": object(),
    }
    opened("plain", screen).handle(Event(kind="summary", step=10, values=values), 1.0)
    text = shown(screen)
    for piece in ("38.2%", "87.4%", "3:07", "rollout 30.0 s (25%)", values["policy"], "demo", "1.5"):
        assert piece in text
    assert "mlflow ui --backend-store-uri sqlite:////runs/mlflow.db" in text
    for absent in ("quantized", "speed-up", "something_else"):
        assert absent not in text


def test_a_log_keeps_long_paths_in_one_piece(capsys):
    sink = open_console("auto", steps=1, title="demo")
    path = "/runs/" + "a-long-folder/" * 7
    assert sink is not None
    sink.handle(Event(kind="summary", step=1, values={"policy": path}), 1.0)
    assert path in capsys.readouterr().out


@pytest.mark.parametrize("outcome", ["failed", "interrupted"])
def test_a_run_that_did_not_finish_says_so(outcome):
    screen = console()
    opened("plain", screen).close(outcome)
    assert shown(screen) == f"run demo {outcome}\n"


def test_time_left_follows_the_last_steps_and_ends_at_zero():
    pace = Pace(steps=20)
    assert pace.left() == "–"
    pace.saw(step(1), 0.0)
    for n in range(2, 21):
        pace.saw(step(n), 100.0 + n)
    assert pace.left_s() == 0
    pace = Pace(steps=100)
    for n in range(1, 50):
        pace.saw(step(n), 100.0 + 2 * n)
    assert pace.left_s() == pytest.approx(2 * 51)


def test_columns_of_evaluations_appear_only_where_a_step_has_one():
    def titles(*rows: dict) -> list[str]:
        return [column.header for column in step_table(list(enumerate(rows))).columns]

    evaluated = {"held-out reward", "solved"}
    assert len(titles({})) == len(COLUMNS) + 1 - len(evaluated)  # the step besides
    assert not evaluated & set(titles({}))
    assert evaluated & set(titles({}, {"eval/accuracy": 0.5})) == {"solved"}
    assert evaluated <= set(titles({}, {"eval/accuracy": 0.5, "eval/reward": 0.7}))


@pytest.mark.parametrize(
    ("reward", "line", "row"),
    [
        (0.625, "solved 0.625  low 0.5  high 0.7", ["62.5%"]),
        (0.7, "reward 0.7  reward_low 0.6  reward_high 0.8  solved 0.625  low 0.5  high 0.7", ["0.700", "62.5%"]),
    ],
)
def test_a_mean_reward_is_told_beside_the_share_solved_unless_it_is_that_share(reward, line, row):
    rewards = {"eval/reward": reward, "eval/reward_low": 0.6, "eval/reward_high": 0.8}
    shares = {"eval/accuracy": 0.625, "eval/low": 0.5, "eval/high": 0.7}
    screen = console(terminal=True)
    sink = opened("table", screen)
    sink.handle(step(4), 10.0)
    sink.handle(Event(kind="evaluation", step=4, message="during", values=rewards | shares), 11.0)
    sink.close("finished")
    text = shown(screen)
    assert f"evaluation at step 4  during  {line}\n" in text.replace("\r", "")
    (cells,) = [cells.split() for cells in text.split("demo")[-1].splitlines() if cells.startswith("│")]
    assert [cell for cell in cells if cell in ("62.5%", "0.700")] == row


@pytest.mark.parametrize("graded", [False, True])
def test_the_summary_tells_the_mean_reward_where_it_is_not_the_share_solved(graded):
    shares = {"accuracy_before": 0.25, "accuracy_after": 0.5, "accuracy_after_quantized": 0.5, "accuracy_p_value": 0.25}
    rewards = {key.replace("accuracy", "reward"): value + 0.125 * graded for key, value in shares.items()}
    screen = console()
    opened("plain", screen).handle(Event(kind="summary", step=1, values=shares | rewards), 1.0)
    text = shown(screen)
    assert "solved (reward > 0.5) before" in text
    assert ("held-out reward before" in text) == ("0.375" in text) == graded
    assert ("paired test of the reward, p" in text) == graded


@pytest.mark.parametrize(("reached", "bar", "left"), [(False, "10/20", "left ≤ 1:40"), (True, "10/10", "left 0:00")])
def test_a_run_with_a_target_has_at_most_so_much_time_left_and_a_full_bar_when_it_is_there(reached, bar, left):
    screen = console(terminal=True)
    sink = open_console("table", steps=20, title="demo", may_end_early=True, console=screen)
    assert sink is not None
    sink.handle(step(9), 10.0)
    sink.handle(step(10), 20.0)
    values = {"eval/accuracy": 0.9} | ({"target_reached": True} if reached else {})
    sink.handle(Event(kind="evaluation", step=10, message="during", values=values), 20.0)
    sink.close("finished")
    last = shown(screen).split("demo")[-1]
    assert bar in last
    assert left in last


def test_durations_and_single_lines():
    assert [duration(s) for s in (0.2, 59.6, 3600, 7325.4)] == ["0:00", "1:00", "1:00:00", "2:02:05"]
    assert one_line("a\tb\r\nc", limit=4) == "a·b…"


def test_commands_of_the_summary_paste_though_a_folder_has_a_blank():
    folder = "/my runs/it's $HOME/a;b"
    made = {"run_dir": folder, "policy": f"{folder}/policy", "mlflow_uri": f"sqlite:///{folder}/mlflow.db"}
    lines = commands(made)
    assert [shlex.split(line) for line in lines] == [
        ["mlflow", "ui", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"],
        ["qurl", "evaluate", folder, "--samples", "8"],
    ]
    assert commands(made | {"policy": None}) == lines[:1]  # it was stopped before its first step
