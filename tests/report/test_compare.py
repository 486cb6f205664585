import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from qurl_ray.errors import ConfigError
from qurl_ray.report.compare import MOST, Difference, compare, newest, read_runs
from qurl_ray.report.compare_page import console_table, render_comparison

CONFIG = {
    "name": "x",
    "steps": 3,
    "output_dir": "/somewhere",
    "task": {"type": "arithmetic", "max_operand": 99, "verifiers": 1},
    "rollout": {"quantization": "int8"},
    "evaluation": {"problems": 4},
}


def evaluation(n: int, label: str, outcomes: str, low: float = 0.1, high: float = 0.9, **more) -> dict:
    accuracy = outcomes.count("1") / len(outcomes)
    values = {"eval/accuracy": accuracy, "eval/low": low, "eval/high": high, "eval/problems": 4, "outcomes": outcomes}
    values |= more
    return {"kind": "evaluation", "step": n, "time": 1e9, "message": label, "values": values}


def step(n: int, **values) -> dict:
    found = {"reward/mean": n / 10, "time/step": 2.0, "time/rollout": 0.5, "time/update": 1.5, "rollout/samples": 100}
    found |= {"rollout/tokens": 400, "mismatch/kl": 0.01 * n, "mismatch/ess": 0.9, "mismatch/max_rho": 1.0 + n}
    found |= {"clip/upper": 0.1, "clip/lower": 0.02, "clip/dual": 0.0, "mismatch/truncated": 0.5}
    return {"kind": "step", "step": n, "time": 1e9, "message": "", "values": found | values}


def whole(after: str = "1110", rolled: str = "1100") -> list[dict]:
    return [
        evaluation(0, "before", "1000"),
        *(step(n) for n in (1, 2, 3)),
        evaluation(3, "after, quantized", rolled),
        evaluation(3, "after", after),
    ]


FINISHED = {"steps": 3, "interrupted": False}


def a_run(folder: Path, events: list[dict], *, summary: dict | None = None, **config) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"name": folder.name} | config))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def pairing(first, second) -> Difference:
    """Told apart from any other by its numbers."""
    value = (sum(second) - sum(first)) / len(first)
    return Difference(value=value, low=value - 0.125, high=value + 0.125, p_value=0.0625)


def compared(folder: Path, *names: str):
    return compare(read_runs(names, folder), pairing)


def cells(comparison, title: str) -> dict[str, list[str]]:
    return {measure.label: measure.cells for measure in comparison.tables[title]}


def test_the_last_bound_on_the_cost_of_quantization_is_a_line(tmp_path):
    bounds = {"certificate/cost_most": 0.04, "certificate/pairs": 128}, {"certificate/cost_most": 0.02}
    a_run(tmp_path / "a", [step(1, **bounds[0]), step(2), step(3, **bounds[1]), step(4)], summary=FINISHED)
    a_run(tmp_path / "b", whole(), summary=FINISHED)
    found = cells(compared(tmp_path, "a", "b"), "Mismatch and clipping")
    assert found["cost of quantization, at most"] == ["0.02", "–"]


def test_the_table_says_what_the_runs_reached_how_fast_and_how_far_apart(tmp_path):
    a_run(tmp_path / "a", whole(), summary=FINISHED)
    a_run(tmp_path / "b", whole(after="1111"), summary=FINISHED, rollout={"quantization": "none"})
    found = compared(tmp_path, "a", "b")
    assert cells(found, "Run") == {"state": ["finished"] * 2, "steps": ["3 of 3"] * 2}
    accuracy = found.tables["Held-out problems solved, %"]
    assert [(measure.label, measure.cells) for measure in accuracy] == [
        ("before", ["25.0 [10.0, 90.0]"] * 2),
        ("after, full precision", ["75.0 [10.0, 90.0]", "100.0 [10.0, 90.0]"]),
        ("  difference from the first run", ["–", "+25.0 [+12.5, +37.5]"]),
        ("  p-value of the difference", ["–", "0.062"]),
        ("after, as rolled out", ["50.0 [10.0, 90.0]", "100.0 [10.0, 90.0]"]),
        (
            "  difference from the first run",
            ["–", "+50.0 [+37.5, +62.5]"],
        ),  # in full precision, the policy itself is rolled out
        ("  p-value of the difference", ["–", "0.062"]),
    ]
    speed = cells(found, "Speed")
    assert (speed["training time"], speed["samples per second"]) == (["0:06"] * 2, ["50"] * 2)
    assert (speed["rollout tokens per second"], speed["seconds per step"]) == (["800"] * 2, ["2"] * 2)
    assert (speed["  rollout"], speed["  update"]) == (["0.5"] * 2, ["1.5"] * 2)
    assert "  reward" not in speed  # no run recorded it
    mismatch = cells(found, "Mismatch and clipping")
    assert mismatch["KL(b‖p)"] == ["0.02"] * 2
    assert (mismatch["smallest effective sample size"], mismatch["largest rho"]) == (["0.9"] * 2, ["4"] * 2)
    assert (mismatch["clipped tokens"], mismatch["tokens with rho above the cap"]) == (["12 %"] * 2, ["50 %"] * 2)
    assert [(row.label, row.cells) for row in found.settings] == [("rollout.quantization", ["int8", "none"])]
    assert found.warnings == []


def graded(*rewards: float) -> dict:
    """What an evaluation of these rewards has besides the outcomes."""
    mean = sum(rewards) / len(rewards)
    found = {"eval/reward": mean, "eval/reward_low": mean - 0.25, "eval/reward_high": mean + 0.25}
    return found if set(rewards) <= {0, 1} else found | {"rewards": list(rewards)}


def test_graded_rewards_are_compared_by_their_means_beside_the_problems_solved(tmp_path):
    """Both runs solve two of four problems; the second is the better one on each."""
    first, second = graded(0.25, 0.25, 0.625, 0.625), graded(0.5, 0.5, 1.0, 1.0)
    for name, after in (("a", first), ("b", second)):
        before = evaluation(0, "before", "0000", **graded(0, 0, 0, 0))
        a_run(tmp_path / name, [before, step(1), evaluation(3, "after", "0011", **after)], summary=FINISHED)
    found = compared(tmp_path, "a", "b")
    assert [(measure.label, measure.cells) for measure in found.tables["Held-out reward"]] == [
        ("before", ["0.000 [−0.250, 0.250]"] * 2),
        ("after, full precision", ["0.438 [0.188, 0.688]", "0.750 [0.500, 1.000]"]),
        ("  difference from the first run", ["–", "+0.312 [+0.188, +0.438]"]),
        ("  p-value of the difference", ["–", "0.062"]),
    ]
    solved = cells(found, "Held-out problems solved, %")
    assert solved["after, full precision"] == ["50.0 [10.0, 90.0]"] * 2
    source = render_comparison(found, "x")
    assert "<h3>Held-out reward, full precision</h3>" in source


def test_runs_of_earlier_versions_are_compared_by_problems_solved_alone(tmp_path):
    a_run(tmp_path / "old", whole(), summary=FINISHED)
    a_run(tmp_path / "older", whole(after="1111"), summary=FINISHED)
    a_run(tmp_path / "new", [step(1), evaluation(3, "after", "0011", **graded(0.25, 0.25, 1, 1))], summary=FINISHED)
    assert "Held-out reward" not in compared(tmp_path, "old", "older").tables
    assert "Held-out reward" not in render_comparison(compared(tmp_path, "old", "older"), "x")
    found = compared(tmp_path, "old", "new")
    assert cells(found, "Held-out reward") == {"after, full precision": ["–", "0.625 [0.375, 0.875]"]}
    solved = {measure.label: measure.cells[1] for measure in found.tables["Held-out problems solved, %"][:3]}
    assert solved["  difference from the first run"] == "−25.0 [−37.5, −12.5]"


def test_the_numbers_are_the_runs_and_not_each_others(tmp_path):
    a_run(tmp_path / "slow", [step(n) for n in (1, 2)], summary={"interrupted": True})
    a_run(tmp_path / "fast", [step(n, **{"time/step": 0.5}) for n in (1, 2, 3)], summary=FINISHED)
    speed = cells(compared(tmp_path, "fast", "slow"), "Speed")
    assert (speed["seconds per step"], speed["samples per second"]) == (["0.5", "2"], ["200", "50"])


def test_runs_of_other_problems_and_unfinished_ones_are_included_and_marked(tmp_path):
    a_run(tmp_path / "a", whole(), summary=FINISHED)
    a_run(tmp_path / "b", whole(), summary=FINISHED, task=CONFIG["task"] | {"max_operand": 9})
    torn = a_run(tmp_path / "c", [evaluation(0, "before", "1000"), step(1), evaluation(1, "during", "1100")])
    with (torn / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')
    a_run(tmp_path / "d", [step(1)], summary={"interrupted": True}, task=CONFIG["task"] | {"verifiers": 8})
    found = compared(tmp_path, "a", "b", "c", "d")
    problems, unfinished, stopped, lines = found.warnings
    assert "do not have the same problems (task.max_operand differ)" in problems
    assert unfinished.startswith("c is unfinished")
    assert stopped == "d was stopped before its last step."
    assert lines.startswith("1 line(s) of c's metrics.jsonl")
    assert cells(found, "Run")["state"] == ["finished", "finished", "unfinished", "interrupted"]
    accuracy = cells(found, "Held-out problems solved, %")
    assert accuracy["after, as rolled out"][2:] == ["50.0 [10.0, 90.0] at step 1", "–"]
    assert accuracy["  difference from the first run"][1] == "–"  # of other problems


def test_problems_that_were_not_recorded_one_by_one_are_not_paired(tmp_path):
    a_run(tmp_path / "a", whole(), summary=FINISHED)
    events = whole()
    events[-1]["values"].pop("outcomes")
    a_run(tmp_path / "b", events, summary=FINISHED)
    found = compared(tmp_path, "a", "b").tables["Held-out problems solved, %"]
    assert [measure.cells[1] for measure in found if measure.label == "  difference from the first run"] == [
        "+0.0 [−12.5, +12.5]"
    ]


def test_a_run_is_found_by_name_or_path_and_a_missing_one_names_the_nearest(tmp_path):
    a_run(tmp_path / "quickstart", whole())
    a_run(tmp_path / "elsewhere" / "quickstart", whole())
    a_run(tmp_path / "other", whole())
    runs = read_runs(["quickstart", str(tmp_path / "elsewhere" / "quickstart"), "other", "other"], tmp_path)
    paths = [str(tmp_path / "quickstart"), str(tmp_path / "elsewhere" / "quickstart"), "other"]
    assert [run.name for run in runs] == paths  # once each, and by their paths where names are the same
    with pytest.raises(ConfigError, match=r"no run 'quikstart'.*did you mean 'quickstart'\?"):
        read_runs(["quikstart"], tmp_path)
    with pytest.raises(ConfigError, match="are: other, quickstart"):
        read_runs(["zzz"], tmp_path)
    with pytest.raises(ConfigError, match="can compare 2 to 16 runs, not 1"):
        compared(tmp_path, "other")
    for i in range(MOST):
        a_run(tmp_path / f"run-{i}", whole())
    with pytest.raises(ConfigError, match="not 17"):
        compared(tmp_path, "other", *(f"run-{i}" for i in range(MOST)))


def test_the_newest_are_those_that_recorded_a_step_last(tmp_path):
    import os

    for at, name in enumerate(("c", "a", "b")):
        os.utime(a_run(tmp_path / name, whole()) / "metrics.jsonl", (at, at))
    a_run(tmp_path / "empty", [])
    assert [Path(path).name for path in newest(tmp_path, 2)] == ["a", "b"]
    assert len(newest(tmp_path, 9)) == 3


# --- the page -----------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Elements with their attributes, and all text."""

    def __init__(self, source: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(source)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "col"):
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_draws_every_run_in_a_colour_of_its_own_and_needs_nothing_else(tmp_path):
    names = [f"run-{i}" for i in range(10)]
    for name in names:
        a_run(tmp_path / name, whole(), summary=FINISHED)
    page = Page(source := render_comparison(compared(tmp_path, *names), "Ten"))
    lines = re.findall(r'class="(line(?: dashed)? c\d)"', source.split("Reward</h3>")[1].split("</svg>")[0])
    assert lines == [f"line c{i}" for i in range(1, 9)] + ["line dashed c1", "line dashed c2"]
    assert "did not record" not in page.text
    addresses = {value for _, attrs in page.elements for key, value in attrs.items() if key in ("href", "src", "style")}
    assert addresses == set()
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in page.elements}
    (policy,) = [a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    css = source.split("<style>")[1].split("</style>")[0]
    for color in range(1, 9):
        assert css.count(f"--c{color}: #") == 3  # by day, by night, on paper


def test_lines_lead_from_evaluation_to_evaluation_over_the_steps_of_others(tmp_path):
    a_run(tmp_path / "a", whole(), summary=FINISHED)
    events = [evaluation(0, "before", "1000"), step(1), evaluation(2, "during", "1100"), evaluation(5, "after", "1110")]
    a_run(tmp_path / "b", events, summary=FINISHED, rollout={"quantization": "none"})
    source = render_comparison(compared(tmp_path, "a", "b"), "x")
    drawing = source.split("full precision</h3>")[1].split("</svg>")[0]
    lines = re.findall(r'class="line c\d" d="([^"]*)"', drawing)
    assert [(line.count("M"), line.count("L")) for line in lines] == [(1, 1), (1, 2)]


def test_no_text_of_a_run_becomes_markup_or_moves_the_cursor(tmp_path):
    hostile = '"><script>alert(1)</script>{{ 7*7 }}\x1b[2J[bold]x[/bold]'
    harmless = "harmless"
    for folder, text in (("hostile", hostile), ("harmless", harmless)):
        place = tmp_path / folder
        a_run(place / "a", whole(), summary=FINISHED, **{"rollout": {"quantization": text}, "task": {"type": text}})
        a_run(place / "b", whole(), summary=FINISHED, **{text: {text: text}})
    pages = {}
    for folder, text in (("hostile", hostile), ("harmless", harmless)):
        found = compared(tmp_path / folder, "a", "b")
        pages[folder] = Page(render_comparison(found, text))
        screen = Console(width=400, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        screen.print(console_table(found))
        shown = screen.export_text()
        assert "\x1b" not in shown
        assert ("[bold]x[/bold]" in shown) == (folder == "hostile")
    assert [tag for tag, _ in pages["hostile"].elements] == [tag for tag, _ in pages["harmless"].elements]
    assert "<script>alert(1)</script>{{ 7*7 }}" in pages["hostile"].text


def test_passwords_in_settings_are_not_shown(tmp_path):
    for name, secret in (("a", "one"), ("b", "two")):
        a_run(tmp_path / name, whole(), tracking={"mlflow_uri": f"http://me:{secret}@host-{name}:5000"})
    source = render_comparison(compared(tmp_path, "a", "b"), "x")
    assert "http://…@host-a:5000" in source
    assert "me:one" not in source


# --- an experiment of MLflow --------------------------------------------------------------------------------------


def test_the_runs_of_an_experiment_that_have_ended_are_read_from_their_files(tmp_path):
    pytest.importorskip("mlflow")
    from qurl_ray.config import RunConfig
    from qurl_ray.config.tracking import TrackingConfig
    from qurl_ray.tracking import Tracker
    from qurl_ray.tracking.compare_mlflow import experiment_runs
    from qurl_ray.types import Event

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for name in ("whole", "other", "going-on"):
        config = RunConfig(name=name, output_dir=tmp_path, steps=3, tracking=TrackingConfig(console="none"))
        resolved = config.model_dump(mode="json")
        tracker = Tracker(tmp_path / name, config, resolved=resolved)
        (tmp_path / name / "config.yaml").write_text(yaml.safe_dump(resolved))
        for event in whole():
            if event["message"] == "after":
                event["values"] |= graded(0.5, 0.5, 0.75, 1.0)
            tracker.handle(Event(**{key: event[key] for key in ("kind", "step", "message", "values")}))
        if name != "going-on":
            (tmp_path / name / "summary.json").write_text(json.dumps(FINISHED))
            tracker.close("finished")
        else:
            tracker._mlflow._background.drain(30.0)  # all but the end
    first, second = experiment_runs(uri, "qurl-ray")
    assert [run.name for run in (first, second)] == ["whole", "other"]
    assert [run.record.state for run in (first, second)] == ["finished", "finished"]
    found = compare([first, second], pairing)
    accuracy = cells(found, "Held-out problems solved, %")
    assert accuracy["after, full precision"] == ["75.0 [10.0, 90.0]"] * 2
    assert accuracy["after, as rolled out"] == ["50.0 [10.0, 90.0]"] * 2
    assert cells(found, "Held-out reward")["after, full precision"] == ["0.688 [0.438, 0.938]"] * 2
    for title in ("Speed", "Mismatch and clipping"):
        assert all(len(set(measure.cells)) == 1 for measure in found.tables[title])
    assert found.settings == []
    assert found.warnings == []
    with pytest.raises(ConfigError, match=r"no experiment 'qurl-rax'.*did you mean 'qurl-ray'\?"):
        experiment_runs(uri, "qurl-rax")
    with pytest.raises(ConfigError, match="cannot read from MLflow at http://…@127"):
        experiment_runs("http://me:secret@127.0.0.1:9", "qurl-ray")
