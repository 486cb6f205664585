import base64
import hashlib
import json
import math
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from qurl_ray.cli.report import main as report_command
from qurl_ray.report.charts import COLUMNS
from qurl_ray.report.report import write_report
from qurl_ray.runs.files import read_run

VOID = {"meta", "br", "input"}
HARMLESS = "harmless"
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg onload=alert(1)>",
    "</title><h1>x",
    "</style><b>x",
    "]]><!-- x --><?x?>",
    "{{ 7 * 7 }}{% raw %}&lt;b&gt;&#60;i&#62;",
    "javascript:alert(1)",
]


class Page(HTMLParser):
    """A page as a browser sees it: elements with their attributes, and text by the path of classes above it."""

    def __init__(self, path: Path):
        super().__init__()
        self.source = path.read_bytes().decode("utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.oddities: list[str] = []
        self._open: list[str] = []
        self.feed(self.source)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(f"{tag}.{dict(attrs).get('class', '')}")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop().split(".")[0] == tag

    def handle_data(self, data):
        self.texts.append(("/".join(self._open), data))

    def handle_decl(self, decl):
        self.oddities += [] if decl == "doctype html" else [decl]

    def handle_comment(self, data):
        self.oddities.append(data)

    handle_pi = unknown_decl = handle_comment

    def text(self, path: str = "") -> str:
        return "".join(data for above, data in self.texts if path in above and "style" not in above)

    def charts(self) -> dict[str, str]:
        """Source of each card by its title."""
        return {c.split("</h3>")[0]: c for c in re.split(r"<figcaption><h3>", self.source)[1:]}


def step(n: int, **values) -> dict:
    return {"kind": "step", "step": n, "time": 1e9 + n, "message": "", "values": values}


def evaluation(n: int, label: str, accuracy: float) -> dict:
    values = {"eval/accuracy": accuracy, "eval/low": accuracy - 0.05, "eval/high": accuracy + 0.05}
    return {"kind": "evaluation", "step": n, "time": 1e9, "message": label, "values": values | {"eval/problems": 1000}}


def a_run(folder: Path, events=(), *, samples=(), config=None, summary=None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    (folder / "config.yaml").write_text(yaml.safe_dump(config or {}, sort_keys=False))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def report(folder: Path, *args, **kwargs) -> Page:
    return Page(write_report(a_run(folder, *args, **kwargs)))


def a_sample(n: int = 1, **values) -> dict:
    return {"step": n, "uid": "u", "prompt": "1+1=", "answer": "2", "expected": "2", "reward": 1.0} | values


def with_sets(n: int, label: str, **shares: float) -> dict:
    found = evaluation(n, label, 0.5)
    for name, share in shares.items():
        found["values"] |= {
            f"eval/{name}/{key}": share + by for key, by in (("accuracy", 0), ("low", -0.1), ("high", 0.1))
        }
    return found


def test_each_set_of_held_out_problems_has_a_line(tmp_path):
    """During training if there are such evaluations, else before and after."""
    during = [with_sets(n, "during", aime=0.1 * n, easy=0.5) for n in (1, 2)]
    around = [with_sets(0, "before", aime=0.0, easy=0.4), with_sets(3, "after", aime=0.3, easy=0.6)]
    chart = report(tmp_path / "a", [step(1), *around, *during]).charts()["Held-out sets"]
    assert [name for name in ("aime", "easy") if name in chart] == ["aime", "easy"]
    assert "The policy as rolled out." in chart
    assert (
        "In full precision, before and after." in report(tmp_path / "b", [step(1), *around]).charts()["Held-out sets"]
    )
    assert "Held-out sets" not in report(tmp_path / "c", [step(1), evaluation(0, "before", 0.5)]).charts()


def full_of(text: str, folder: Path) -> Page:
    """A report of a run that has `text` wherever a run can have text."""
    config = {
        "name": text,
        "steps": 2,
        "model": {"path": text},
        "task": {"type": text, "dataset": text},
        "rollout": {"quantization": text},
        "algorithm": {"type": text, "correction": {"type": text}},
        "section": {f"key {text}": [text]},
        text: {"a": 1},
        "tracking": {"mlflow": True, "mlflow_uri": text},
    }
    warning = {"kind": "warning", "step": 1, "time": 1.0, "message": text, "values": {}}
    events = [step(1, **{"reward/mean": 0.5, text: 1.0}), warning, evaluation(1, text, 0.5)]
    return report(folder, events, config=config, summary={text: text})


@pytest.mark.parametrize("text", HOSTILE)
def test_no_element_and_no_attribute_comes_from_data(tmp_path, text):
    harmless, hostile = full_of(HARMLESS, tmp_path / "a"), full_of(text, tmp_path / "b")
    assert hostile.oddities == []

    assert hostile.elements == harmless.elements  # with the same attributes and values
    assert hostile.text().count(text) >= harmless.text().count(HARMLESS) > 15  # and all of it can be read


@pytest.mark.parametrize("char", ["\0", "\x1b", "\ud800", "\u202e", "\u2028"])
def test_what_cannot_be_seen_is_shown_as_a_point(tmp_path, char):
    warning = {"kind": "warning", "step": 1, "time": 1.0, "message": f"a{char}b", "values": {}}
    page = report(tmp_path / "run", [warning])
    assert all(other.isprintable() or other == "\n" for other in page.source)
    assert "a·b" in page.text("warnings")


def test_charts_that_are_calm_at_zero_are_folded(tmp_path):
    calm = {"rollout/garbage_share": 0.0, "guard/level": 0.0, "guard/beyond": 0.0, "reward/mean": 0.0}
    for last, folded in ((0.0, "0 throughout: Guard<"), (1.0, None)):
        events = [step(1, **calm), step(2, **calm | {"guard/level": last})]
        page = write_report(a_run(tmp_path / "run", events)).read_text()
        found = re.findall("<summary>(0 throughout: .*?<)", page)
        assert found == ["0 throughout: Repeated garbage<", *([folded] if folded else [])]  # no reward is no calm


def test_the_page_needs_nothing_but_itself(tmp_path):
    page = full_of("http://host/x", tmp_path / "run")
    names = {name for _, attributes in page.elements for name in attributes}
    assert not names & {"src", "srcset", "style", "data", "action"}
    assert not [name for name in names if name.startswith("on")]
    assert not {tag for tag, _ in page.elements} & {"script", "link", "iframe", "img", "object", "base", "form"}
    links = [attributes["href"] for _, attributes in page.elements if "href" in attributes]
    assert links
    anchors = {link for link in links if link.startswith("#")}
    assert anchors == {f"#{a['id']}" for tag, a in page.elements if tag == "section" and "id" in a}
    assert set(links) - anchors <= {
        "policy/",
        "checkpoints/",
        "metrics.jsonl",
        "samples.jsonl",
        "config.yaml",
        "summary.json",
    }
    (style,) = [data for above, data in page.texts if above.endswith("style.")]
    assert not re.search(r"url\(|@import|http", style)
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def test_the_command_for_mlflow_pastes_though_a_folder_has_a_blank(tmp_path):
    folder = tmp_path / "my runs"
    folder.mkdir()
    page = report(folder / "it", config={"tracking": {"mlflow": True}})
    (command,) = (text for _, text in page.texts if text.startswith("mlflow ui"))
    assert shlex.split(command) == ["mlflow", "ui", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]


def test_passwords_in_addresses_are_not_shown(tmp_path):
    uri = "http://user:secret@host/x"
    warning = {"kind": "warning", "step": 0, "time": 1.0, "message": f"{uri} is away", "values": {}}
    config = {"tracking": {"mlflow": True, "mlflow_uri": uri, "list": [uri]}}
    page = report(tmp_path / "run", [warning], config=config)
    assert "secret" not in page.source
    assert page.text().count("http://…@host/x") == 4


@pytest.mark.parametrize("content", [b"[]", b"3", b"{", b"", b"\xff", b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}"])
def test_damaged_files_of_a_run_count_as_absent(tmp_path, content):
    folder = a_run(tmp_path / "run", [step(1, **{"reward/mean": 0.5})])
    for name in ("config.yaml", "summary.json"):
        (folder / name).write_bytes(content)
    found = read_run(folder)
    assert found.summary is None
    assert found.config == {} or content.startswith(b"{")
    assert found.state == "unfinished"
    assert "1" in Page(write_report(folder)).text()


def test_byte_order_marks_are_taken(tmp_path):
    folder = a_run(tmp_path / "run", [step(1), step(2)], config={"name": "x"}, summary={"steps": 2})
    for name in ("config.yaml", "summary.json", "metrics.jsonl"):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    found = read_run(folder)
    assert (found.config, found.summary, len(found.rows), found.unreadable) == ({"name": "x"}, {"steps": 2}, 2, 0)


def test_every_chart_names_its_numbers(tmp_path):
    values = {"reward/mean": 0.25, "mismatch/kl": 2.5e-4, "mismatch/ess": 0.9985, "sync/codes_changed": 0.125}
    values |= {"clip/upper": 0.01, "clip/lower": 0.02, "time/rollout": 1.5, "time/update": 2.5, "lr": 3e-5}
    values |= {"rollout/mean_length": 17.5, "rollout/truncated_share": 0.5, "rollout/tokens_per_second": 12345.0}
    events = [step(1, **{key: value / 2 for key, value in values.items()}), step(2, **values)]
    events += [evaluation(0, "before", 0.4), evaluation(2, "after", 0.8), evaluation(2, "after, quantized", 0.7)]
    charts = report(tmp_path / "run", events).charts()

    def last(title: str) -> str:
        (text,) = re.findall(r'<text class="last"[^>]*>(.*?)</text>', charts[title])
        return re.sub(r"\s+", " ", re.sub("<[^>]*>", "", text))

    assert last("Reward") == "step 2 ● 0.250"
    assert last("Held-out problems solved") == "step 2 ● 80 % (75–85) ● 70 % (65–75)"
    assert last("KL(b‖p)") == "step 2 ● 2.50·10⁻⁴"
    assert last("Effective sample size") == "step 2 ● 0.999"
    assert last("Clipped tokens") == "step 2 ● 1 % ● 2 %"
    assert last("Codes changed by a sync") == "step 2 ● 12.5 %"
    assert last("Time per phase") == "step 2 ● 1.50 ● 2.50"
    assert last("Answer length") == "step 2 ● 17.5 ● 50 %"
    assert last("Rollout speed") == "step 2 ● 12,345"
    assert "This run has not recorded it." in charts["Largest rho"]


def test_the_head_says_what_the_run_is_and_what_it_reached(tmp_path):
    config = {"name": "n", "steps": 3, "model": {"type": "tiny"}, "task": {"type": "arithmetic"}}
    config |= {"rollout": {"quantization": "int8"}, "quantization": {"uaq_scale": 1.5}}
    events = [evaluation(0, "before", 0.4), *(step(n, **{"time/step": 40.0}) for n in (1, 2, 3))]
    events += [evaluation(3, "after, quantized", 0.712), evaluation(3, "after", 0.734)]
    page = report(tmp_path / "run", events, config=config, summary={"interrupted": False})
    facts = re.sub(r"\s+", " ", page.text("facts"))
    for fact in ("modeltiny", "taskarithmetic", "rolloutsint8", "UAQ s1.5"):
        assert fact in facts
    assert [data for above, data in page.texts if above.endswith("p.big")] == ["40.0", "73.4", "71.2"]
    assert "95 %: 68.4 – 78.4 % · 1,000 problems" in page.text("tile")
    assert "3 of 3 steps." in page.text("header")
    assert "training time2:00" in page.text("figures")


def test_graded_rewards_are_told_as_their_mean_with_the_share_solved_beside_it(tmp_path):
    before, after = evaluation(0, "before", 0.4), evaluation(3, "after", 0.734)
    for event, mean in ((before, 0.4), (after, 0.8125)):  # the first ones are all 0 or 1
        event["values"] |= {"eval/reward": mean, "eval/reward_low": mean - 0.5, "eval/reward_high": mean + 0.125}
    page = report(tmp_path / "run", [before, step(1), after])
    assert [data for above, data in page.texts if above.endswith("p.big")] == ["0.400", "0.812"]
    tiles = re.sub(r"\s+", " ", page.text("tile"))
    assert "held-out reward after 0.812 95 %: 0.312 – 0.938 · 1,000 problems solved (reward > 0.5): 73.4 %" in tiles
    assert "95 %: −0.100 – 0.525" in tiles
    assert {"Held-out reward", "Held-out problems solved"} <= set(page.charts())
    assert "0.81 (0.31–0.94)" in page.charts()["Held-out reward"]


def test_rewards_of_0_and_1_are_told_once(tmp_path):
    events = [evaluation(0, "before", 0.4), evaluation(3, "after", 0.734)]
    recorded = report(tmp_path / "earlier", events)
    for event in events:
        event["values"] |= {"eval/reward": event["values"]["eval/accuracy"], "eval/reward_low": 0.1}
    page = report(tmp_path / "run", events)
    for found in (recorded, page):
        assert "Held-out reward" not in found.charts()
        assert "held-out reward" not in found.text("tile")
        assert "solved after" in found.text("tile")


@pytest.mark.parametrize(
    ("summary", "outcome", "state"),
    [
        (None, None, "unfinished"),
        ({"interrupted": True}, None, "interrupted"),
        ({"steps": 2, "interrupted": False}, None, "finished"),  # though metrics.jsonl lacks a step
        ({"steps": 2}, None, "unfinished"),  # no word on it
        ({"steps": None, "interrupted": False}, None, "unfinished"),
        (None, "failed", "failed"),
    ],
)
def test_how_the_run_ended(tmp_path, summary, outcome, state):
    folder = a_run(tmp_path / "run", [step(1)], config={"steps": 2}, summary=summary)
    assert Page(write_report(folder, outcome=outcome)).text("span.state") == state


def test_the_number_of_steps_is_the_summarys_where_metrics_has_lost_some(tmp_path):
    folder = a_run(
        tmp_path / "run", [step(1), step(3)], config={"steps": 3}, summary={"steps": 3, "interrupted": False}
    )
    assert read_run(folder).done == 3
    (folder / "summary.json").write_text('{"steps": null}')
    assert read_run(folder).done == 2


def test_torn_and_foreign_lines_are_left_out_and_counted(tmp_path):
    folder = a_run(tmp_path / "run", [step(1, **{"reward/mean": 0.5}), step(2, **{"reward/mean": 0.6})])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'[1]\n{"step": "x"}\n\xff\xfe\n{"step": 1e999, "kind": "step"}\n' + b"[" * 100_000 + b"\n")
        file.write(json.dumps(step(3, **{"reward/mean": 10**400, "a": None, "lr": True})).encode() + b"\n")
        file.write(b'{"kind": "step", "step": 4, "values": {"rew')
    (folder / "config.yaml").write_text("name: [")
    (folder / "summary.json").write_text('{"interr')
    record = read_run(folder)
    assert record.rows == [
        (1, {"reward/mean": 0.5}),
        (2, {"reward/mean": 0.6}),
        (3, {"reward/mean": None, "a": None, "lr": None}),
    ]
    assert (record.unreadable, record.config, record.summary) == (6, {}, None)
    assert "6 line(s) of metrics.jsonl could not be read" in Page(write_report(folder)).text("warnings")


def test_a_step_recorded_twice_has_its_later_values(tmp_path):
    folder = a_run(tmp_path / "run", [step(2, a=1.0), step(1, a=2.0), step(2, a=3.0)])
    assert read_run(folder).rows == [(1, {"a": 2.0}), (2, {"a": 3.0})]


def test_an_empty_folder_has_a_report_and_a_missing_one_an_error(tmp_path):
    page = Page(write_report(tmp_path))
    assert "0 steps." in page.text("header")
    assert page.source.count("This run has not recorded it.") == 17
    assert not page.source.count("viewBox")
    with pytest.raises(OSError, match="nowhere"):
        write_report(tmp_path / "nowhere")


def test_full_precision_rollouts_have_no_codes_instead_of_codes_that_stand_still(tmp_path):
    values = {"sync/codes_changed": 0.0, "reward/mean": 0.5}
    quantized, full = (
        report(tmp_path / kind, [step(1, **values)], config={"rollout": {"quantization": kind}}).charts()
        for kind in ("int8", "none")
    )
    assert "<svg" in quantized["Codes changed by a sync"]
    assert "<svg" not in full["Codes changed by a sync"]
    assert "No codes: rollouts are in full precision" in full["Codes changed by a sync"]


def test_5000_steps_stay_small_and_keep_their_extremes(tmp_path):
    values = [{"reward/mean": math.sin(n / 9), "mismatch/max_rho": 1 + n % 7 / 100} for n in range(1, 5001)]
    values[3456]["mismatch/max_rho"] = 777.25
    page = report(tmp_path / "run", [step(n, **v) for n, v in enumerate(values, start=1)])
    assert len(page.source) < 400_000
    chart = page.charts()["Largest rho"]
    assert chart.count('class="hit"') == COLUMNS
    assert re.search(r"steps 3,441–3,460</tspan>  <tspan[^>]*>●</tspan> \S+–777<", chart)
    assert "log scale" in chart


def test_a_write_that_fails_leaves_the_old_page(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("the old page")

    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_report(tmp_path)
    assert path.read_text() == "the old page"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_the_job_prints_the_path_or_what_is_missing(tmp_path):
    app = typer.Typer()
    app.command()(report_command)
    bad = CliRunner().invoke(app, [str(tmp_path)])
    assert bad.exit_code == 2
    assert "no run " in bad.stderr
    good = CliRunner().invoke(app, [str(a_run(tmp_path / "run", [step(1)]))])
    assert good.exit_code == 0
    assert good.stdout.strip() == str(tmp_path / "run" / "report.html")
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_report_needs_neither_torch_nor_ray_nor_mlflow():
    code = "import sys, qurl_ray.report.report; print({'torch', 'ray', 'mlflow'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"
