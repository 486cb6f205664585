"""Run folders: finished runs are kept, running ones left alone, unfinished ones gone on with."""

import errno
import json
import os
import stat
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import yaml

from qurl_ray.config import load_config, resolve
from qurl_ray.errors import CheckpointError, ConfigError
from qurl_ray.runs.checkpoint import complete, partial_folder
from qurl_ray.tracking.tracker import Tracker
from qurl_ray.training.driver.run import rewound
from qurl_ray.training.driver.run_dir import look_at_run_dir, open_run_dir
from qurl_ray.training.rank.saver import check_shared
from qurl_ray.training.totals import RunTotals
from qurl_ray.types import Event
from tests.runs.test_checkpoint import write


def config(folder, *overrides):
    return load_config(None, [f"output_dir={folder}", "name=mine", *overrides])


def write_state(run_dir, step, state):
    """Write a checkpoint with a state of the coordinator."""
    partial = partial_folder(run_dir, step)
    (partial / "learner").mkdir(parents=True)
    (partial / "loop.json").write_text(json.dumps(state))
    complete(partial, step=step, reward=None)


FINISHED = {"steps": 100, "interrupted": False}


def unfinished(folder, *overrides):
    """A run with a checkpoint at step 3 and no summary."""
    with open_run_dir(config(folder, *overrides)) as place:
        write(place.path, 3)
    return place.path


def test_finished_runs_are_moved_aside_and_never_overwritten(tmp_path):
    for number in range(3):
        with open_run_dir(config(tmp_path / "runs")) as place:
            write(place.path, 3)
            (place.path / "summary.json").write_text(json.dumps(FINISHED | {"number": number}))
    kept = {path.parent.name: json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/summary.json")}
    assert {name: found["number"] for name, found in kept.items()} == {"mine": 2, "mine.1": 0, "mine.2": 1}
    assert place.resume is None
    assert place.notes == [f"the run that was in {place.path} is now in {place.path}.2"]


def test_an_unfinished_run_is_gone_on_with(tmp_path):
    run_dir = unfinished(tmp_path)
    with open_run_dir(config(tmp_path, "tracking.console=none", "rollout.timeout_s=7", "learner.threads=1")) as place:
        assert (place.path, place.resume.step) == (run_dir, 3)
        assert place.notes == ["resuming after step 3 of 100"]


def test_a_run_resumes_with_other_ranks_and_says_what_that_changes(tmp_path):
    unfinished(tmp_path)
    with open_run_dir(config(tmp_path, "learner.workers=2", "learner.backend=fsdp")) as place:
        assert place.resume.step == 3
        assert place.notes[1:] == [
            "gradients are added in another order from here on: learner.backend: torch → fsdp; learner.workers: 1 → 2"
        ]


def test_a_colocated_run_from_before_the_choice_by_memory_resumes(tmp_path):
    run_dir = unfinished(tmp_path, "placement=colocated", "learner.offload_while_waiting=true")
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["learner"]["offload_while_waiting"] is True
    with open_run_dir(config(tmp_path, "placement=colocated")) as place:
        assert place.resume.step == 3


def test_one_that_was_stopped_by_ctrl_c_is_gone_on_with(tmp_path):
    run_dir = unfinished(tmp_path)
    (run_dir / "summary.json").write_text(json.dumps({"interrupted": True}))
    with open_run_dir(config(tmp_path)) as place:
        assert place.resume.step == 3


def test_other_settings_are_refused_with_the_keys_that_differ(tmp_path):
    unfinished(tmp_path)
    with (
        pytest.raises(ConfigError) as error,
        open_run_dir(config(tmp_path, "learner.lr=1e-3", "algorithm.correction.type=tis", "task.max_operand=9")),
    ):
        pass
    for part in ("learner.lr: 1e-06 → 0.001", "algorithm.correction.type: acr → tis", "task.max_operand: 99 → 9"):
        assert part in str(error.value)
    assert "seed" not in str(error.value)
    assert "--fresh" in str(error.value)


def test_a_run_of_another_version_is_refused_with_the_way_out(tmp_path):
    run_dir = unfinished(tmp_path)
    settings = yaml.safe_load((run_dir / "config.yaml").read_text())
    settings["algorithm"]["normalize_by_std"] = True
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
    with (
        pytest.raises(ConfigError, match=r"of another version.*normalize_by_std.*--fresh"),
        open_run_dir(config(tmp_path)),
    ):
        pass


@pytest.mark.parametrize("content", [b"name: \xff", b"[]", b"", b"steps: 1\nsteps: 2\n", b"[" * 5000])
def test_damaged_settings_of_an_unfinished_run_are_an_error(tmp_path, content):
    run_dir = unfinished(tmp_path)
    (run_dir / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.yaml"), open_run_dir(config(tmp_path)):
        pass


def test_a_password_is_not_written_and_a_run_resumes_without_it(tmp_path):
    given = "tracking.mlflow_uri=http://me:sesame@host:5000"
    run_dir = unfinished(tmp_path, given)
    text = (run_dir / "config.yaml").read_text(encoding="utf-8")
    assert "mlflow_uri: http://…@host:5000\n" in text
    assert "sesame" not in text
    for settings in (given, "tracking.mlflow_uri=null"):
        with open_run_dir(config(tmp_path, settings)) as place:
            assert place.resume.step == 3
    again = load_config(run_dir / "config.yaml")
    with open_run_dir(again) as place:
        assert place.resume.step == 3


@pytest.mark.parametrize(("path", "mode"), [("https://me:sesame@host/set.jsonl", 0o600), ("set.jsonl", 0o644)])
def test_settings_that_hold_a_password_are_for_this_user_alone(tmp_path, path, mode):
    before = os.umask(0o022)
    try:
        with open_run_dir(config(tmp_path, "task.type=dataset", f"task.path={path}")) as place:
            assert stat.S_IMODE((place.path / "config.yaml").stat().st_mode) == mode
    finally:
        os.umask(before)


@pytest.mark.parametrize(("key", "mode"), [("api_key", 0o600), ("max_tokens", 0o644)])
def test_a_setting_with_the_name_of_a_secret_is_kept_for_the_resume_and_not_shown(tmp_path, key, mode):
    custom = ["task.type=custom", "task.problems=some.module:problems"]
    before = os.umask(0o022)
    try:
        run_dir = unfinished(tmp_path, *custom, f"task.params={{{key}: sk-1}}")
    finally:
        os.umask(before)
    assert stat.S_IMODE((run_dir / "config.yaml").stat().st_mode) == mode
    with open_run_dir(load_config(run_dir / "config.yaml")) as place:
        assert place.resume.step == 3
    with pytest.raises(ConfigError, match=key) as caught, open_run_dir(config(tmp_path, *custom)):
        pass
    assert ("sk-1" in str(caught.value)) == (key == "max_tokens")


def test_a_relative_path_is_the_same_setting_as_the_absolute_one_and_not_as_that_of_another_folder(
    tmp_path, monkeypatch
):
    given = ["model.type=pretrained", "model.path=pol"]
    for folder in ("one", "two"):
        (tmp_path / folder / "pol").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "one")
    with open_run_dir(resolve(config(tmp_path, *given), submitted=False)) as place:
        write(place.path, 3)
    absolute = ["model.type=pretrained", f"model.path={tmp_path / 'one' / 'pol'}"]
    for same in (given, absolute):
        with open_run_dir(config(tmp_path, *same)) as place:
            assert place.resume.step == 3
    (place.path / "config.yaml").write_text(yaml.safe_dump(config(tmp_path, *given).model_dump(mode="json")))
    with open_run_dir(resolve(config(tmp_path, *absolute), submitted=False)) as place:  # written by an earlier version
        assert place.resume.step == 3
    monkeypatch.chdir(tmp_path / "two")
    other = resolve(config(tmp_path, *given), submitted=False)
    with pytest.raises(ConfigError, match=r"other settings: model\.path: .*/one/pol → .*/two/pol"), open_run_dir(other):
        pass


def test_a_setting_that_is_new_since_then_has_its_default(tmp_path):
    run_dir = unfinished(tmp_path)
    settings = yaml.safe_load((run_dir / "config.yaml").read_text())
    del settings["algorithm"]["kl_coef"]
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
    with open_run_dir(config(tmp_path)) as place:
        assert place.resume.step == 3


def test_fresh_starts_anew_and_keeps_the_old_run(tmp_path):
    unfinished(tmp_path)
    with open_run_dir(config(tmp_path, "learner.lr=1e-3"), fresh=True) as place:
        assert place.resume is None
    assert (tmp_path / "mine.1" / "checkpoints" / "step-000003").is_dir()


def test_more_steps_are_no_other_run_where_the_rates_so_far_do_not_depend_on_them(tmp_path):
    unfinished(tmp_path, "steps=9")
    for steps in (4, 9, 50):
        with open_run_dir(config(tmp_path, f"steps={steps}")) as place:
            assert place.resume.step == 3
    with pytest.raises(ConfigError, match="steps: 50 → 3"), open_run_dir(config(tmp_path, "steps=3")):
        pass


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_more_steps_are_another_run_where_the_rate_falls(tmp_path, schedule):
    unfinished(tmp_path, f"learner.schedule={schedule}")
    longer = config(tmp_path, f"learner.schedule={schedule}", "steps=200")
    with (
        pytest.raises(ConfigError, match=rf"steps: 100 → 200.*With learner\.schedule={schedule}"),
        open_run_dir(longer),
    ):
        pass


def test_a_target_may_change_when_a_run_resumes(tmp_path):
    unfinished(tmp_path, "evaluation.every=3")
    with open_run_dir(config(tmp_path, "evaluation.every=3", "evaluation.target_reward=0.9")) as place:
        assert place.resume.step == 3


def test_a_finished_run_is_extended_only_if_that_is_asked_for(tmp_path):
    run_dir = unfinished(tmp_path)
    (run_dir / "summary.json").write_text(json.dumps(FINISHED))
    longer = config(tmp_path, "steps=200")
    assert "resumes after step 3" in look_at_run_dir(longer, extend=True)[0]
    with (
        pytest.raises(ConfigError, match=r"learner\.lr"),
        open_run_dir(config(tmp_path, "steps=200", "learner.lr=1e-3"), extend=True),
    ):
        pass
    with open_run_dir(longer, extend=True) as place:
        assert (place.path, place.resume.step) == (run_dir, 3)
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["steps"] == 200


def test_a_finished_run_that_could_not_be_extended_is_finished_still(tmp_path):
    run_dir = unfinished(tmp_path)
    (run_dir / "summary.json").write_text(json.dumps(FINISHED))
    before = (run_dir / "config.yaml").read_text()

    def fail(before_it_fails):
        with open_run_dir(config(tmp_path, "steps=200"), extend=True):
            before_it_fails()
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        fail((run_dir / "summary.json").unlink)
    assert (run_dir / "config.yaml").read_text() == before
    assert json.loads((run_dir / "summary.json").read_text()) == FINISHED
    line = {"kind": "step", "step": 4, "time": time.time() + 1, "message": "", "values": {}}
    with pytest.raises(ZeroDivisionError):
        fail(lambda: (run_dir / "metrics.jsonl").open("a").write(json.dumps(line) + "\n"))
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["steps"] == 200


@pytest.mark.parametrize("name", ["mine", "other"])
def test_where_nothing_can_be_extended_that_is_an_error(tmp_path, name):
    with open_run_dir(config(tmp_path)) as place:  # without a checkpoint
        (place.path / "prompts.jsonl").write_text('{"step": 1}')
    asked = load_config(None, [f"output_dir={tmp_path}", f"name={name}", "steps=200"])
    with pytest.raises(ConfigError, match="holds no checkpoint from which a run could be extended"):
        look_at_run_dir(asked, extend=True)
    with pytest.raises(ConfigError, match="holds no checkpoint"), open_run_dir(asked, extend=True):
        pass
    assert not (tmp_path / "mine.1").exists()


def write_lines(run_dir, log, **line):
    (run_dir / f"{log}.jsonl").write_text(json.dumps(line | {"time": 1.0, "message": "", "values": {}}) + "\n")


def test_a_run_that_died_before_its_first_checkpoint_starts_anew(tmp_path):
    with open_run_dir(config(tmp_path)) as place:
        (place.path / "prompts.jsonl").write_text('{"step": 1}')
    with open_run_dir(config(tmp_path, "learner.lr=1e-3")) as place:
        assert place.resume is None
    assert (tmp_path / "mine.1").is_dir()


@pytest.mark.parametrize("log", ["metrics", "samples", "prompts"])
def test_a_run_with_a_step_in_any_log_is_kept_whatever_the_others_lost(tmp_path, log):
    with open_run_dir(config(tmp_path)) as place:
        write_lines(place.path, log, step=1, **({"kind": "step"} if log == "metrics" else {}))
    with open_run_dir(config(tmp_path)) as place:
        assert place.notes == [f"the run that was in {place.path} is now in {place.path}.1"]
    assert '"step": 1' in (tmp_path / "mine.1" / f"{log}.jsonl").read_text()


@pytest.mark.parametrize("content", ["a torn lin", '{"steps": 3}'])
def test_lines_and_summaries_that_may_be_of_a_step_are_kept(tmp_path, content):
    with open_run_dir(config(tmp_path)) as place:
        (place.path / ("summary.json" if "steps" in content else "metrics.jsonl")).write_text(content)
    with open_run_dir(config(tmp_path)):
        assert (tmp_path / "mine.1").is_dir()


def finished(folder):
    with open_run_dir(config(folder)) as place:
        write(place.path, 3)
        (place.path / "summary.json").write_text(json.dumps(FINISHED))
    return place.path


def tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


def test_a_start_that_fails_puts_the_older_run_back(tmp_path):
    finished(tmp_path)
    before = tree(tmp_path)

    def fail():
        with open_run_dir(config(tmp_path, "steps=7"), fresh=True) as place:
            assert place.older == tmp_path / "mine.1"
            write_lines(place.path, "metrics", kind="info", step=0)
            (place.path / "report.html").write_text("failed")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        fail()
    run_dir, left = tmp_path / "mine", tmp_path / "mine.2"
    assert caught.value.__notes__ == [f"the run that was in {run_dir} is there again; what this one left is in {left}"]
    assert (left / "report.html").read_text() == "failed"
    assert {path: text for path, text in tree(tmp_path).items() if left not in path.parents} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.lock", "mine", "mine.2"]


def test_a_finished_run_with_more_steps_is_extended_or_begun_again_as_is_said(tmp_path):
    finished(tmp_path)
    more = config(tmp_path, "steps=250")
    for begin in (look_at_run_dir, lambda config: open_run_dir(config).__enter__()):
        with pytest.raises(ConfigError, match=r"finished run of \d+ steps .*: --extend goes on to 250, --fresh starts"):
            begin(more)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.lock", "mine"]
    with open_run_dir(config(tmp_path, "steps=250", "seed=5")) as place:  # another run of that name
        assert place.older == tmp_path / "mine.1"


def test_a_run_that_fails_after_a_step_stays(tmp_path):
    finished(tmp_path)
    with suppress(ZeroDivisionError), open_run_dir(config(tmp_path)) as place:
        write_lines(place.path, "prompts", step=1)
        raise ZeroDivisionError
    assert (tmp_path / "mine" / "prompts.jsonl").is_file()
    assert (tmp_path / "mine.1" / "checkpoints").is_dir()


def fill_disk(monkeypatch, name):
    """Let writes to files of that name fail, after the file was made."""
    written = Path.write_text

    def write_text(path, *args, **kwargs):
        if name in path.name:
            path.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", write_text)


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_leaves_nothing_and_moves_nothing(tmp_path, monkeypatch, there):
    if there:
        finished(tmp_path)
    before = tree(tmp_path)
    fill_disk(monkeypatch, "config.yaml")
    with pytest.raises(ConfigError, match=r"mine cannot be used: .*No space left"), open_run_dir(config(tmp_path)):
        pass
    assert tree(tmp_path) == before
    assert (tmp_path / "mine").exists() == there
    monkeypatch.undo()
    with open_run_dir(config(tmp_path)) as place:
        assert place.path.is_dir()


def test_settings_that_a_killed_start_wrote_in_part_do_not_matter(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".config.yaml.123.part").write_text("name: mi")
    with open_run_dir(config(tmp_path)) as place:
        assert sorted(path.name for path in place.path.iterdir()) == [".gitignore", "config.yaml"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("what", ["mine", "mine/config.yaml", "mine/summary.json", "mine/prompts.jsonl"])
@pytest.mark.parametrize("look", [open_run_dir, lambda config: nullcontext(look_at_run_dir(config))])
def test_what_cannot_be_read_is_an_error_that_names_it(tmp_path, monkeypatch, number, what, look):
    with open_run_dir(config(tmp_path)) as place:
        (place.path / "summary.json").write_text("{}")
        write_lines(place.path, "prompts", step=0)
    before = tree(tmp_path)
    stat, opened = os.stat, Path.open

    def failing(call):
        def attempt(path, *args, **kwargs):
            if f"{path}/".startswith(f"{tmp_path}/{what}/"):
                raise OSError(number, os.strerror(number), str(path))
            return call(path, *args, **kwargs)

        return attempt

    monkeypatch.setattr(os, "stat", failing(stat))
    monkeypatch.setattr(Path, "open", failing(opened))
    with pytest.raises(ConfigError, match=what), look(config(tmp_path)):
        pass
    monkeypatch.undo()
    assert tree(tmp_path) == before


def test_a_folder_in_the_place_of_a_summary_is_an_error_that_names_it(tmp_path):
    (unfinished(tmp_path) / "summary.json").mkdir()
    with pytest.raises(ConfigError, match=r"mine/summary\.json: Is a directory"), open_run_dir(config(tmp_path)):
        pass


def test_failed_starts_leave_no_folders_behind(tmp_path):
    for lr in ("1e-3", "1e-4", "1e-5"):
        with suppress(ZeroDivisionError), open_run_dir(config(tmp_path, f"learner.lr={lr}")) as place:
            write_lines(place.path, "metrics", kind="info", step=0)
            write_lines(place.path, "timeline", step=1)
            (place.path / "summary.json").write_text('{"steps": 0, "interrupted": true}')
            (place.path / "mlflow_run_id").write_text("of other settings")
            raise ZeroDivisionError
    with open_run_dir(config(tmp_path)) as place:
        assert place.notes == []
        assert sorted(path.name for path in place.path.iterdir()) == [".gitignore", "config.yaml"]
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == ["mine"]


@pytest.mark.parametrize(("reached", "resumes"), [(3, False), (None, True), (2, True), ("damaged", True)], ids=str)
def test_whether_a_run_reached_its_target_is_a_question_to_its_checkpoint(tmp_path, reached, resumes):
    run_dir = unfinished(tmp_path)
    write_state(run_dir, 3, {"totals": {"reached_at": reached}} if reached != "damaged" else {})
    summary = {"steps": 3, "interrupted": False, "target_reached_at_step": 3}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    with open_run_dir(config(tmp_path)) as place:
        assert bool(place.resume) == resumes


def mutilated(summary: dict) -> list[bytes]:
    """summary.json of an interrupted run, or what is left of it."""
    return [
        json.dumps(summary | {"interrupted": False}).encode(),  # contradicts its number of steps
        json.dumps(summary | {"steps": 100}).encode(),  # contradicts that it was interrupted
        json.dumps({key: value for key, value in summary.items() if key != "interrupted"}).encode(),
        b'{"steps": null, "interrupted": false}', b'{"interrupted": false}', b'{"steps": 3.0, "interrupted": false}',
        b"[]", b"null", b"7", b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"steps": 1e999, "interrupted": 0}',
    ]  # fmt: skip


@pytest.mark.parametrize("content", mutilated({"steps": 3, "interrupted": True, "target_reached_at_step": None}))
def test_a_damaged_summary_does_not_end_an_unfinished_run(tmp_path, content):
    run_dir = unfinished(tmp_path)
    (run_dir / "summary.json").write_bytes(content)
    with open_run_dir(config(tmp_path)) as place:
        assert place.resume.step == 3


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]", b"", b"steps: 3", b"[" * 100_000, b"steps: [1"])
def test_damaged_settings_of_an_unfinished_run_are_an_error_that_names_them(tmp_path, content):
    run_dir = unfinished(tmp_path)
    (run_dir / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.yaml|other settings"), open_run_dir(config(tmp_path)):
        pass


def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path):
    run_dir = unfinished(tmp_path)
    write(run_dir, 5)
    (run_dir / "checkpoints" / "step-000005" / "loop.json").write_text("{,}")
    with open_run_dir(config(tmp_path)) as place:
        assert place.resume.step == 3
        assert "loop.json is damaged" in place.notes[0]


def test_a_resumed_run_says_which_evaluation_its_log_has_lost(tmp_path):
    totals = RunTotals(steps=3)
    totals.add(Event(kind="evaluation", step=0, message="before", values={}))
    write_state(unfinished(tmp_path), 3, {"totals": totals.state()})
    with open_run_dir(config(tmp_path)) as place:
        quiet = config(tmp_path, "tracking.console=none", "tracking.mlflow=false")
        with Tracker(place.path, quiet, resolved={}) as tracker:
            assert rewound(place, tracker) == totals
    assert "lacks the evaluation before: reports leave it out" in (place.path / "metrics.jsonl").read_text()


def test_a_run_that_is_going_on_is_not_moved(tmp_path):
    with open_run_dir(config(tmp_path)) as place:
        with pytest.raises(ConfigError, match="a run named mine is still going on"), open_run_dir(config(tmp_path)):
            pass
        assert place.path.is_dir()
        with open_run_dir(load_config(None, [f"output_dir={tmp_path}", "name=other"])) as other:
            assert other.path.is_dir()


def test_a_folder_that_cannot_be_written_is_an_error_that_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set output_dir"), open_run_dir(config(tmp_path / "file")):
        pass


def test_a_rank_that_does_not_see_the_folder_says_what_it_needs(tmp_path):
    with open_run_dir(config(tmp_path)) as place:
        check_shared(place.path)
        with pytest.raises(ConfigError, match=r"elsewhere is not there on .*QURL_RUNS.* share"):
            check_shared(tmp_path / "elsewhere")


@pytest.mark.parametrize("fresh", [False, True])
def test_what_is_no_run_is_never_moved(tmp_path, fresh):
    (tmp_path / "mlartifacts").mkdir()
    (tmp_path / "mlartifacts" / "1").write_text("a model")
    (tmp_path / "mlflow.db").write_text("all runs")
    before = sorted(tmp_path.rglob("*"))
    for name in ("mlartifacts", "mlflow.db"):
        asked = open_run_dir(load_config(None, [f"output_dir={tmp_path}", f"name={name}"]), fresh=fresh)
        with pytest.raises(ConfigError, match=f"{name} is there and is no run"), asked:
            pass
    assert [path for path in sorted(tmp_path.rglob("*")) if path.suffix != ".lock"] == before


FOREIGN = ["title: my site\n", "name: mine\nsteps: 3\n", "model: {}\ntask: x\n", "", "[]", "a: [", "\x00"]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("content", FOREIGN)
@pytest.mark.parametrize("beside", [None, "checkpoints/last.ckpt"])
def test_the_settings_of_something_else_do_not_make_a_folder_a_run(tmp_path, fresh, content, beside):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text(content)
    if beside:
        (tmp_path / "mine" / beside).parent.mkdir()
        (tmp_path / "mine" / beside).write_text("weights")
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match=r"mine is there.*config\.yaml"), open_run_dir(config(tmp_path), fresh=fresh):
        pass
    with pytest.raises(ConfigError, match=r"mine is there.*config\.yaml"):
        look_at_run_dir(config(tmp_path), fresh=fresh)
    assert tree(tmp_path) == before


def test_an_empty_folder_becomes_the_run(tmp_path):
    (tmp_path / "mine").mkdir()
    with open_run_dir(config(tmp_path)) as place:
        assert (place.path, place.notes) == (tmp_path / "mine", [])


def test_a_run_whose_checkpoints_are_all_damaged_needs_fresh(tmp_path):
    run_dir = unfinished(tmp_path)
    (run_dir / "checkpoints" / "step-000003" / "loop.json").unlink()
    with pytest.raises(CheckpointError, match="Start again with --fresh"), open_run_dir(config(tmp_path)):
        pass
    with open_run_dir(config(tmp_path), fresh=True) as place:
        assert place.resume is None


def test_a_folder_that_was_renamed_is_resumed_under_its_new_name(tmp_path):
    unfinished(tmp_path).rename(tmp_path / "better")
    with open_run_dir(config(tmp_path, "name=better")) as place:
        assert (place.path.name, place.resume.step) == ("better", 3)
    assert yaml.safe_load((tmp_path / "better" / "config.yaml").read_text())["name"] == "better"
