"""qurl_ray.train and callbacks: runs of objects instead of settings; and runs that are extended."""

import json
import re
import shutil
from pathlib import Path

import datasets
import pytest
import torch
import yaml
from transformers import AutoTokenizer

import qurl_ray
from qurl_ray.config import load_config
from qurl_ray.errors import ConfigError, DataError, ExtensionError
from qurl_ray.training.driver.run import run
from tests.training.runs import WHOLE, events, parameters

FEW = {
    "steps": 2,
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 4},
    "algorithm": {"type": "dapo", "updates_per_rollout": 1, "max_refill_rounds": 1},
    "evaluation": {"problems": 4},
    "tracking": {"mlflow": False, "console": "none"},
}
TALK = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def talking(tiny_spec, tmp_path_factory):
    """A tiny policy whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("model") / "policy"
    shutil.copytree(tiny_spec.source, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TALK
    tokenizer.save_pretrained(folder)
    return folder


class Recorder(qurl_ray.Callback):
    def __init__(self):
        self.seen = []

    def on_step(self, step, metrics):
        self.seen.append(("step", step, "reward/mean" in metrics))

    def on_evaluation(self, step, label, metrics):
        self.seen.append(("evaluation", step, label, metrics["eval/reward"] >= 0.25))

    def on_checkpoint(self, step, folder):
        self.seen.append(("checkpoint", step, (folder / "manifest.json").is_file()))

    def on_end(self, outcome):
        self.seen.append(("end", outcome))


class Broken(qurl_ray.Callback):
    def on_step(self, step, metrics):
        raise ZeroDivisionError("on purpose")


@pytest.mark.slow
@pytest.mark.ray
def test_a_model_rows_and_a_function_are_a_run(talking, tmp_path, cluster):
    """Rows of messages, columns for the reward, a closure, two held-out sets, callbacks of which one raises."""
    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "bonus": n % 3} for n in range(20)]
    sets = {"low": rows[:2], "high": datasets.Dataset.from_list(rows[2:5])}
    extra, recorder = 0.25, Recorder()
    result = qurl_ray.train(
        talking,
        rows[5:],
        lambda answer, problem: extra + problem.meta["bonus"] + len(answer) % 2,
        held_out=sets,
        callbacks=[recorder, Broken()],
        output_dir=tmp_path,
        checkpoint={"every": 1},
        **FEW,
    )
    assert result.summary["steps"] == 2
    assert result.summary["reward_before"] >= 0.25
    assert set(result.summary["eval_sets"]) == {"low", "high"}
    assert recorder.seen == [
        ("evaluation", 0, "before", True),
        *[(kind, step, True) for step in (1, 2) for kind in ("step", "checkpoint")],
        *[("evaluation", 2, label, True) for label in ("after, quantized", "after")],
        ("end", "finished"),
    ]
    warned = [line["message"] for line in events(result.run_dir, "warning")]
    told = r"callback Broken failed \(ZeroDivisionError: on purpose"
    place = rf"{told} \({__file__}, line \d+, in on_step; traceback in .*\)"
    assert any(re.match(place, line) for line in warned)
    settings = yaml.safe_load((result.run_dir / "config.yaml").read_text())
    assert re.fullmatch("given:<lambda>-[0-9a-f]{8}", settings["task"]["reward"])
    kept = tmp_path / "data"
    assert settings["task"]["path"].startswith(str(kept))
    lines = [json.loads(line) for line in Path(settings["task"]["path"]).read_text().splitlines()]
    assert lines == rows[5:]


ASKED = [[{"role": "user", "content": f"{n}+1="}] for n in range(12)]
LAYOUTS = {
    "verl, GSM8K": [
        {
            "data_source": "openai/gsm8k",
            "prompt": prompt,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"split": "train", "index": n, "answer": f"#### {n + 1}", "question": f"{n}+1="},
        }
        for n, prompt in enumerate(ASKED)
    ],
    "TRL, prompt only": [{"prompt": f"{n}+1="} for n in range(12)],
    "TRL, conversational": [{"prompt": prompt, "solution": str(n + 1)} for n, prompt in enumerate(ASKED)],
}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if "TRL" in name else ()) for name in LAYOUTS]
)
def test_layouts_of_verl_and_trl_train_a_step_as_they_are(talking, tmp_path, cluster, layout):
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_list(LAYOUTS[layout]).to_parquet(path)
    reward = (lambda answer, problem: len(answer) % 2) if layout == "TRL, prompt only" else None
    result = qurl_ray.train(talking, path, reward, output_dir=tmp_path, **FEW | {"steps": 1})
    assert result.summary["steps"] == 1
    (step,) = events(result.run_dir, "step")
    assert step["values"]["reward/failed"] == 0
    samples = [json.loads(line) for line in (result.run_dir / "samples.jsonl").read_text().splitlines()]
    expected = {sample["prompt"]: sample["expected"] for sample in samples}
    assert expected
    wanted = {f"{n}+1=": "" if layout == "TRL, prompt only" else str(n + 1) for n in range(12)}
    assert expected.items() <= wanted.items()
    assert not torch.equal(parameters(result.policy), parameters(talking)) or step["values"]["grad_norm"] == 0


def breaks(log_ratio_BT, adv_BT, mask_BT, bounds):
    """An objective that the trial before a run accepts: its answers have three tokens at most."""
    if log_ratio_BT.shape[1] > 3:
        raise ValueError("on purpose")
    return log_ratio_BT.exp() * adv_BT


@pytest.mark.slow
@pytest.mark.ray
def test_an_objective_that_fails_in_a_run_names_its_line_the_step_and_the_traceback(talking, tmp_path, cluster):
    rows = [{"prompt": f"{n}+1=", "answer": str(n)} for n in range(12)]
    algorithm = FEW["algorithm"] | {"objective": f"{__name__}:breaks", "dynamic_sampling": False}
    with pytest.raises(ExtensionError) as caught:
        qurl_ray.train(
            talking,
            rows,
            lambda answer, problem: len(answer) % 3,
            output_dir=tmp_path,
            **FEW | {"algorithm": algorithm},
        )
    told = rf"objective {__name__}:breaks failed: ValueError: on purpose \({__file__}, line \d+, in breaks; "
    (kept,) = re.fullmatch(told + r"traceback in (\S+)\) \(during step 1\)", str(caught.value)).groups()
    assert "ValueError: on purpose" in Path(kept).read_text()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"learning_rate": 1e-5}, ConfigError, "unknown key 'learning_rate'; it is called 'learner.lr' here"),
        ({"rollout": {"max_new_token": 5}}, ConfigError, "did you mean 'rollout.max_new_tokens'"),
        ({"data": []}, DataError, "data has no rows"),
        ({"data": {"train": [], "test": []}}, DataError, "data is a mapping of train, test: give one split"),
        ({"data": [3]}, DataError, "row 0 of data is int, expected a mapping with a prompt"),
        ({"data": [{"prompt": "1", "image": b"x"}]}, DataError, "row 0 of data holds bytes"),
        (
            {"model": "/no/such", "data": [{"prompt": str(n), "answer": "1"} for n in range(3)]},
            ConfigError,
            "no such folder: /no/such",
        ),
    ],
)
def test_bad_arguments_are_an_error_before_anything_starts(tiny_spec, tmp_path, arguments, error, message):
    given = {"model": tiny_spec.source, "data": ["1+1=", "2+2="], "output_dir": tmp_path, **FEW} | arguments
    with pytest.raises(error, match=message):
        qurl_ray.train(**given)
    assert not (tmp_path / "run").exists()


@pytest.mark.ray
@pytest.mark.slow
def test_an_extended_run_ends_like_one_that_was_as_long_from_the_start(tmp_path, cluster):
    small = [setting for setting in WHOLE if not setting.startswith("steps=")]
    long = run(load_config(None, [*small, "steps=5", "name=long", f"output_dir={tmp_path}"]))
    short = load_config(None, [*small, "steps=3", f"output_dir={tmp_path}"])
    run(short)
    with pytest.raises(ConfigError, match="holds a finished run of 3 steps: --extend needs more steps"):
        run(short, extend=True)
    extended = run(load_config(None, [*small, "steps=5", f"output_dir={tmp_path}"]), extend=True)
    assert extended.summary["steps"] == 5
    assert [line["step"] for line in events(extended.run_dir, "step")] == [1, 2, 3, 4, 5]
    assert torch.equal(parameters(extended.policy), parameters(long.policy))
    assert not (tmp_path / "run.1").exists()
