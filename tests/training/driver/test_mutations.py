"""Random damage to the files of an interrupted run: it resumes to the same results, or ends with an error."""

import json
import os
import random
import re
import shutil
from pathlib import Path

import pytest
import torch

from qurl_ray.config import load_config, resolve
from qurl_ray.errors import QurlError
from qurl_ray.report.report import write_report
from qurl_ray.report.timeline import write_timeline
from qurl_ray.report.viewer import write_rollouts
from qurl_ray.runs.checkpoint import Checkpoint
from qurl_ray.tracking.tracker import Tracker
from qurl_ray.training.driver.run import rewound, run
from qurl_ray.training.driver.run_dir import open_run_dir
from tests.training.runs import CERTIFIED, events, forget_after, parameters

pytestmark = pytest.mark.ray

SMALL_FILE = 100_000


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory, whole) -> Path:
    """The folder of a run that was stopped after three of four steps."""
    folder = tmp_path_factory.mktemp("interrupted") / whole.run_dir.name
    shutil.copytree(whole.run_dir, folder)
    forget_after(folder, 3)
    (folder / "summary.json").write_text(json.dumps(whole.summary | {"steps": 3, "interrupted": True}))
    return folder


def copied(run_dir: Path, folder: Path) -> Path:
    """A copy of the run; what is large, and never written again, is linked."""

    def place(source: str, target: str) -> None:
        if Path(source).stat().st_size < SMALL_FILE:
            shutil.copy2(source, target)
        else:
            os.link(source, target)

    return Path(shutil.copytree(run_dir, folder / run_dir.name, copy_function=place))


def damaged(content: bytes, chance: random.Random) -> bytes | None:
    """Damage a file's content in one of many ways; None removes the file."""
    place = chance.randrange(len(content) + 1)
    end = min(len(content), place + chance.choice([1, 2, 10, 100, 5000]))
    lines = content.splitlines(keepends=True) or [b""]
    line = chance.randrange(len(lines))
    words = [*re.finditer(rb"\d+|true|false|null", content[place : place + 2000])]
    way = chance.randrange(11)
    if way == 0 and content[place:end]:
        return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]
    if way == 1:
        return content[:place] + chance.randbytes(end - place) + content[end:]
    if way == 2:
        return content[:place] + bytes(end - place) + content[end:]
    if way == 3:
        return content[:place] + content[end:]
    if way == 4:
        return content[:end] + content[place:]
    if way == 5:
        return content[:place]
    if way == 6:
        return b"".join(lines[:line] + lines[line + 1 :])
    if way == 7:
        return b"".join([*lines[:line], lines[line], *lines[line:]])
    if way == 8:
        return b"".join([*lines[line:], *lines[:line]])
    if way == 9 and words:  # still JSON or YAML, and something else
        word = chance.choice(words)
        other = chance.choice([b"true", b"false", b"null", b"0", b"7", b"1e999", b'"x"', b"[]", b"{}"])
        return content[: place + word.start()] + other + content[place + word.end() :]
    return None


def hurt(run_dir: Path, chance: random.Random) -> str:
    """Damage one file of the run, or two. Return what was done, for the message of a failed test."""
    done = []
    for _ in range(chance.choice([1, 1, 1, 2])):
        small = [path for path in sorted(run_dir.rglob("*")) if path.is_file()]
        # Half of the time a file that is not covered by a checkpoint's SHA-256.
        open_ones = [path for path in small if "checkpoints" not in path.parts and "policy" not in path.parts]
        path = chance.choice(chance.choice([small, open_ones]))
        content = damaged(path.read_bytes(), chance)
        path.unlink()  # it may be linked
        if content is not None:
            path.write_bytes(content)
        done.append(f"{path.relative_to(run_dir)}: {'removed' if content is None else len(content)}")
    return "; ".join(done)


def check(interrupted: Path, folder: Path, seed: int) -> str:
    """Damage a copy of the run and resume it as the driver does, up to where Ray would start. Return how that ended."""
    run_dir, chance = copied(interrupted, folder), random.Random(seed)
    what = f"seed {seed}: {hurt(run_dir, chance)}"
    config = resolve(load_config(None, [*CERTIFIED, f"output_dir={folder}"]), submitted=False)
    try:
        with open_run_dir(config) as place:
            assert place.resume, f"{what}: started from zero"
            whole = Checkpoint(
                folder=interrupted / "checkpoints" / place.resume.folder.name, step=place.resume.step, reward=None
            )
            with Tracker(run_dir, config, resolved=config.model_dump(mode="json")) as tracker:
                assert rewound(place, tracker).state() == expected(whole), what
            assert all(line["step"] <= place.resume.step for line in events(run_dir, "step")), what
            for write in (write_timeline, write_rollouts, write_report):
                write(run_dir)
            newest = max(interrupted.glob("checkpoints/step-*")).name
            if place.resume.folder.name != newest:
                assert any("passed over" in note or "resuming" in note for note in place.notes), what
                return "an older checkpoint"
            return "resumed"
    except QurlError:
        return "an error"
    finally:
        shutil.rmtree(folder)


def expected(whole: Checkpoint) -> dict:
    """The totals of an undamaged checkpoint, without the evaluations at the end."""
    totals = whole.state()["totals"]
    kept = {label: values for label, values in totals["evaluations"].items() if not label.startswith("after")}
    return totals | {"evaluations": kept}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [60, 1000])
def test_no_damage_changes_a_result_silently(tmp_path, interrupted, count):
    found = [check(interrupted, tmp_path / str(seed), seed) for seed in range(count)]
    assert set(found) <= {"resumed", "an older checkpoint", "an error"}
    assert found.count("resumed") > count / 5  # else nothing is tested
    assert found.count("an older checkpoint") > 0


@pytest.mark.slow
@pytest.mark.equal_bits
@pytest.mark.parametrize("seed", range(2000, 2012))
def test_whole_runs_with_damaged_files_end_like_the_undamaged_one(tmp_path, cluster, interrupted, seed):
    whole = run(load_config(None, [*CERTIFIED, f"output_dir={copied(interrupted, tmp_path / 'whole').parent}"]))
    run_dir = copied(interrupted, tmp_path / "damaged")
    what = hurt(run_dir, random.Random(seed))
    try:
        resumed = run(load_config(None, [*CERTIFIED, f"output_dir={run_dir.parent}"]))
    except QurlError:
        return
    same = ("steps", "accuracy_before", "accuracy_after", "accuracy_after_quantized", "eval_problems", "max_rho")
    assert {key: resumed.summary[key] for key in same} == {key: whole.summary[key] for key in same}, what
    assert torch.equal(parameters(resumed.policy), parameters(whole.policy)), what
