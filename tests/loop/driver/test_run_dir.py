"""Run folders: finished runs are kept, running ones left alone, unfinished ones gone on with."""

import json
import os
import stat
from contextlib import suppress

import pytest
import yaml

from qurl_ray.config import load_config, resolve
from qurl_ray.errors import CheckpointError, ConfigError
from qurl_ray.loop.driver.run_dir import open_run_dir
from qurl_ray.loop.rank.saver import check_shared
from tests.loop.test_checkpoint import write


def config(folder, *overrides):
    return load_config(None, [f"output_dir={folder}", "name=mine", *overrides])


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


def test_a_removed_setting_is_ignored_with_the_value_that_every_run_has_now(tmp_path):
    run_dir = unfinished(tmp_path)
    settings = yaml.safe_load((run_dir / "config.yaml").read_text())
    settings["quantization"]["rounding"] = "nearest"
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
    with open_run_dir(config(tmp_path)) as place:
        assert place.resume.step == 3
    settings["quantization"]["rounding"] = "stochastic"
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigError, match=r"rounding was removed.*--fresh"), open_run_dir(config(tmp_path)):
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


def test_a_run_that_died_before_its_first_checkpoint_starts_anew(tmp_path):
    with open_run_dir(config(tmp_path)) as place:
        (place.path / "prompts.jsonl").write_text('{"step": 1}')
    with open_run_dir(config(tmp_path, "learner.lr=1e-3")) as place:
        assert place.resume is None
    assert (tmp_path / "mine.1").is_dir()


def test_failed_starts_leave_no_folders_behind(tmp_path):
    for lr in ("1e-3", "1e-4", "1e-5"):
        with suppress(ZeroDivisionError), open_run_dir(config(tmp_path, f"learner.lr={lr}")) as place:
            (place.path / "metrics.jsonl").write_text("a failed start")
            (place.path / "mlflow_run_id").write_text("of other settings")
            raise ZeroDivisionError
    with open_run_dir(config(tmp_path)) as place:
        assert place.notes == []
        assert not (place.path / "mlflow_run_id").exists()
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == ["mine"]


def mutilated(summary: dict) -> list[bytes]:
    """summary.json of an interrupted run, or what is left of it."""
    return [
        json.dumps(summary | {"interrupted": False}).encode(),  # contradicts its number of steps
        json.dumps(summary | {"steps": 100}).encode(),  # contradicts that it was interrupted
        json.dumps({key: value for key, value in summary.items() if key != "interrupted"}).encode(),
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
