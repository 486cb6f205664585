"""What is checked before a run's folder is made and anything is started."""

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from qurl_ray.config import load_config, resolve
from qurl_ray.data.tasks import load_task
from qurl_ray.errors import ConfigError, DataError, QurlError
from qurl_ray.training.driver import prepare
from qurl_ray.training.driver.dry_run import dry_run
from qurl_ray.training.driver.early import check_early
from qurl_ray.training.driver.prepare import check_run
from qurl_ray.training.driver.run import run
from qurl_ray.training.driver.run_dir import open_run_dir
from tests.runs.test_checkpoint import write
from tests.training.runs import SMALL


@pytest.fixture
def policy(tiny_spec, tmp_path):
    """A copy of the tiny policy, to be damaged."""
    return shutil.copytree(tiny_spec.source, tmp_path / "policy")


def of(policy, *settings):
    left_out = ("model.", "task.max_operand=") if "task.type=dataset" in settings else ("model.",)
    common = [setting for setting in SMALL if not setting.startswith(left_out)]
    return load_config(
        None,
        ["model.type=pretrained", f"model.path={policy}", *common, f"output_dir={policy.parent / 'runs'}", *settings],
    )


def test_a_model_of_a_relative_path_is_found_by_processes_in_other_folders(tiny_spec, tmp_path, monkeypatch):
    """Ray Train's workers, for one, run in a folder of their session."""
    folder = Path(tiny_spec.source)
    monkeypatch.chdir(folder.parent)
    settings = [
        "model.type=pretrained",
        f"model.path={folder.name}",
        "rollout.max_new_tokens=4",
        f"output_dir={tmp_path}",
    ]
    config = load_config(None, settings)
    assert check_run(check_early(config)).spec.source == str(folder.resolve())


def lose_a_layer(policy):
    file = policy / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if "layers.1." not in name}
    save_file(kept, file, metadata={"format": "pt"})


def cut(policy):
    os.truncate(policy / "model.safetensors", 5000)


def settings(**changed):
    def apply(policy):
        file = policy / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    return apply


def chat_template(text):
    return lambda policy: (policy / "chat_template.jinja").write_text(text)


def nothing(policy):
    pass


@pytest.mark.parametrize(
    ("damage", "given", "kind", "message"),
    [
        (lose_a_layer, [], ConfigError, r"12 missing \(model.layers.1.input_layernorm.weight"),
        (cut, [], ConfigError, "model.safetensors is damaged"),
        (settings(hidden_act="gelu_fancy"), [], ConfigError, "activation function 'gelu_fancy' is not known"),
        (settings(vocab_size=17), [], ConfigError, r"\[18, 128\], expected \[17, 128\]"),
        (nothing, ["model.max_length=65"], ConfigError, "max_length=65 exceeds the context"),
        (nothing, ["rollout.max_new_tokens=63"], DataError, "exceeds the context 64"),
        (chat_template("{% if %}"), ["task.chat=true"], DataError, "the tokenizer's chat template failed on train-"),
        (chat_template("{{ 1 // 0 }}"), ["task.chat=true"], DataError, "chat template failed on .*: ZeroDivisionError"),
        (chat_template(""), ["task.chat=true"], DataError, "has no tokens"),
    ],
)
def test_a_policy_that_cannot_be_used_leaves_no_folder(policy, monkeypatch, damage, given, kind, message):
    damage(policy)
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    with pytest.raises(kind, match=message):
        run(of(policy, *given))
    assert not (policy.parent / "runs").exists()


def test_a_held_out_file_that_grew_ends_a_resume_before_anything_is_changed(policy, tmp_path, monkeypatch):
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "held_out")}
    for place, file in enumerate(files.values()):
        file.write_text("".join(f'{{"prompt": "{n}+{place}=", "answer": "1"}}\n' for n in range(9)))
    given = ["task.type=dataset", *(f"task.{key}={files[name]}" for key, name in KEYS), "task.reward=exact"]
    config = resolve(of(policy, *given), submitted=False)
    state = {"collector": {"problems": load_task(config.task, eval_problems=40).digest()}, "totals": {}}
    with open_run_dir(config) as place:
        write(place.path, 3, state=json.dumps(state))
    for file in ("summary.json", "metrics.jsonl"):
        (place.path / file).write_text("{}\n")
    assert "its run resumes after step 3" in dry_run(check_early(config, dry=True), fresh=False).checked[2]
    with files["held_out"].open("a") as held_out:
        held_out.write('{"prompt": "9+9=", "answer": "18"}\n')
    for start in (lambda config, fresh: dry_run(check_early(config, dry=True), fresh=fresh), run):
        with pytest.raises(DataError, match=r"held-out ones included, .* differ from those of .*step-000003"):
            start(config, fresh=False)
    assert [(place.path / file).read_text() for file in ("summary.json", "metrics.jsonl")] == ["{}\n", "{}\n"]
    assert "its run is moved aside" in dry_run(check_early(config, dry=True), fresh=True).checked[2]


KEYS = [("path", "train"), ("held_out_path", "held_out")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["task.template=Q {prompt}"], "task.template is for pretrained models"),
        (["rollout.max_new_tokens=80"], "exceeds the context 64"),
        (["rollout.quantization=int4", "model.intermediate_size=200"], "width 200"),
        (["task.type=reasoning_gym", "task.dataset=chain_sum", "task.train_size=8"], "the tiny policy reads .* only"),
    ],
)
def test_a_tiny_policy_is_made_only_for_a_run_that_fits_it(tmp_path, monkeypatch, given, message):
    monkeypatch.setattr(prepare, "cached_tiny_policy", lambda *_: pytest.fail("the policy was made"))
    with pytest.raises(QurlError, match=message):
        run(load_config(None, [*given, "tracking.mlflow=false", f"output_dir={tmp_path / 'runs'}"]))
    assert not (tmp_path / "runs").exists()
