"""A dry run: it finds what a run would find before it starts, and leaves no trace."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from qurl_ray.config import load_config
from qurl_ray.data.tasks import load_task
from qurl_ray.errors import CheckpointError, ConfigError, DataError, QuantizationError, QurlError, RewardError
from qurl_ray.policy import gguf
from qurl_ray.policy.load import load_model, load_tokenizer, outline
from qurl_ray.policy.save import save_policy
from qurl_ray.training.driver import dry_run as module
from qurl_ray.training.driver.dry_run import DryRun
from qurl_ray.training.driver.early import check_early
from qurl_ray.training.driver.job import run_job
from qurl_ray.training.driver.prepare import check_run
from qurl_ray.training.driver.run import run
from qurl_ray.training.driver.run_dir import open_run_dir
from qurl_ray.types import PolicySpec
from tests.runs.test_checkpoint import write


@pytest.fixture
def here(tmp_path, tiny_spec, monkeypatch):
    """A folder to work in, with a policy, problems, and an empty cache."""
    save_policy(load_model(tiny_spec), load_tokenizer(tiny_spec), tmp_path / "policy")
    lines = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("QURL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("QURL_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(*given):
    return load_config(None, ["name=mine", "rollout.max_new_tokens=6", "tracking.mlflow=false", *given])


def dry_run(given, *, fresh: bool) -> DryRun:
    return module.dry_run(check_early(given, dry=True), fresh=fresh)


def tree(folder: Path) -> dict[str, tuple]:
    found = {path: path.stat() for path in folder.rglob("*")}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


RUNS_ONLY = "memory, placement, and what answers of the policy do to the reward: the run shows these"
PRETRAINED = ["model.type=pretrained", "model.path=policy"]
SUMS = ["task.type=dataset", "task.path=sums.jsonl"]
GYM = ["task.type=reasoning_gym", "task.dataset=chain_sum", "task.train_size=20", "task.held_out_size=5"]


@pytest.mark.parametrize(
    ("given", "problems"),
    [
        ([], "8000 training and 500 held-out problems with reward exact"),
        ([*PRETRAINED, *SUMS], "9 training and 1 held-out problems with reward math_verify"),
        ([*PRETRAINED, *GYM, "model.max_length=64"], "20 training and 5 held-out problems with reward reasoning_gym"),
    ],
)
def test_it_says_what_it_checked_and_writes_nothing(here, given, problems):
    before = tree(here)
    found = dry_run(config(*given), fresh=False)
    assert tree(here) == before
    assert found.checked == [
        "settings",
        "functions",
        f"the folder {here}/runs/mine (new)",
        problems,
        "the model (Qwen2ForCausalLM)",
        "saving of the policy",
        found.checked[6],
        "the tokens that end an answer: '<eos>' (1)",
        "lengths of prompts and answers in a context of 64 tokens",
    ]
    assert re.fullmatch(
        r"checkpoints of \d+ MB, 3 at a time, and the policy: \d+ MB of [\d.]+ GB free", found.checked[6]
    )
    assert found.unchecked == [RUNS_ONLY]
    assert "equal bits of engine and learner" in found.invariance
    assert yaml.safe_load(found.settings)["output_dir"] == str(here / "runs")


def test_it_shows_every_token_that_ends_an_answer(here):
    (here / "policy" / "generation_config.json").write_text('{"eos_token_id": [1, 5, 7]}')
    assert (
        "the tokens that end an answer: '<eos>' (1), '2' (5), '4' (7)"
        in dry_run(config(*PRETRAINED, *SUMS), fresh=False).checked
    )


def test_what_is_written_only_at_the_end_is_tried(here, monkeypatch):
    """A tokenizer that cannot be saved, settings that cannot be, and settings that cannot be read again."""
    given = config(*PRETRAINED, *SUMS)
    whole = here / "policy" / "tokenizer_config.json"
    before = whole.read_text()
    for owner, method in ((PreTrainedTokenizerBase, "save_pretrained"), (PreTrainedConfig, "to_json_file")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, lambda *_, **__: json.dumps(object))
            for check in (lambda: dry_run(given, fresh=False), lambda: check_run(check_early(given))):
                with pytest.raises(ConfigError, match=r"could not save its policy: .* not JSON serializable"):
                    check()
    assert whole.read_text() == before
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "save_pretrained", lambda *_: None)
        with pytest.raises(ConfigError, match=r"could not save its policy: .* not be read again"):
            dry_run(given, fresh=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (["task.type=dataset", "task.path=no.jsonl"], DataError, "no such file: .*/no.jsonl"),
        (
            [*SUMS, "task.answer_column=anwser"],
            DataError,
            "has no column 'anwser'",
        ),
        ([*SUMS, "task.held_out_path=no.parquet"], DataError, "no such file: .*/no.parquet"),
        ([*GYM, "task.dataset=chain_sums"], DataError, "no data set 'chain_sums'; did you mean 'chain_sum'"),
        ([*GYM, "task.params={most: 2}"], DataError, "has no parameter 'most'"),
        (["task.reward=tests.training.rewards:no_such"], RewardError, "no_such"),
        (["task.reward=operator:truediv"], RewardError, r"ended in error on the expected answer"),
        (["task.template=Q {prompt}"], ConfigError, "task.template is for pretrained models"),
        ([*PRETRAINED, *SUMS, "rollout.max_new_tokens=62"], DataError, "exceeds the context 64"),
        ([*PRETRAINED, "model.max_length=65"], ConfigError, "max_length=65 exceeds"),
        (["model.type=pretrained", "model.path=/no/such"], ConfigError, "no such folder: /no/such"),
        (["model.type=pretrained", "model.path=./no"], ConfigError, r"model.path=./no: no such folder: .*/no"),
        (["model.type=pretrained", "model.path=~/no"], ConfigError, "no such folder: /.*/no"),
        (["model.type=pretrained", "model.path=~nosuchuser/no"], ConfigError, "no such folder: .*~nosuchuser/no"),
        (["model.type=pretrained", "model.path=runs/old/policy"], ConfigError, "no such folder: .*/runs/old/policy"),
        (["model.type=pretrained", "model.path=sums.jsonl"], ConfigError, "is a file: give the folder of the model"),
        (["model.type=gguf", "model.path=~nosuchuser/no.gguf"], ConfigError, "no such file"),
        (["task.type=dataset", "task.path=/no/such"], DataError, "no such file: /no/such"),
        (["task.type=dataset", "task.path=./no"], DataError, "no such file: .*/no"),
        (["task.type=dataset", "task.path=~nosuchuser/no"], DataError, "no such file: .*/~nosuchuser/no"),
        ([*SUMS, "task.held_out_path=data/sums/no"], DataError, "no such file: .*/data/sums/no"),
        (["output_dir=/proc/x"], ConfigError, "cannot write to /proc/x: .* in /proc; set output_dir"),
        (["output_dir=/sys/x/y"], ConfigError, "cannot write to /sys/x/y: .* in /sys; set output_dir"),
        (["model.type=gguf", "model.path=no.gguf"], ConfigError, "no such file"),
        (["rollout.quantization=int4", "model.intermediate_size=200"], QuantizationError, "width 200"),
        (["output_dir=sums.jsonl"], ConfigError, "sums.jsonl is no folder to write in; set output_dir"),
        (["output_dir=sums.jsonl/below"], ConfigError, "sums.jsonl is no folder to write in; set output_dir"),
        (["output_dir=.", "name=policy"], ConfigError, "policy is there and is no run"),
        (["tracking.sinks=[tests.training.rewards:none]"], QurlError, "none"),
    ],
)
def test_it_ends_in_the_error_of_the_run(here, given, kind, message):
    before = tree(here)
    with pytest.raises(kind, match=message):
        dry_run(config(*given), fresh=False)
    assert tree(here) == before


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TMPDIR", "/tmp/" + 110 * "x", "bytes longer than the system takes; set .RAY_TMPDIR or .TMPDIR"),
        ("RAY_TMPDIR", "/tmp/" + 50 * "x", "bytes longer than the system takes"),
        ("RAY_TMPDIR", "/proc/x", "Ray cannot be started here: .* in /proc"),
        ("QURL_CACHE", "/proc/x", "cannot write to the cache folder /proc/x: .*; set .QURL_CACHE or .HOME"),
        ("HOME", "/proc/x", "cannot write to the cache folder /proc/x/.cache/qurl-ray: .*"),
    ],
)
def test_folders_outside_the_run_are_checked_by_the_dry_run_and_by_the_run(here, monkeypatch, variable, value, message):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    if variable == "HOME":
        monkeypatch.delenv("QURL_CACHE")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setenv(variable, value)
    for start in (dry_run, run):
        with pytest.raises(ConfigError, match=message) as caught:
            start(config(), fresh=False)
        assert "\n" not in str(caught.value)
    assert not (here / "runs").exists()


def test_a_policy_without_all_its_weights_is_found(here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    file = here / "policy" / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if "layers.1." not in name}
    save_file(kept, file, metadata={"format": "pt"})
    for path in ("policy", "~/policy"):
        with pytest.raises(ConfigError, match="12 missing"):
            dry_run(config("model.type=pretrained", f"model.path={path}"), fresh=False)


SHAPE = {
    "vocab_size": 18,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
} | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
UNKNOWN = {
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, [], "is a Conv1d, a kind of layer that is not known"),
    "qwen3_5_text": ({}, [], "is a Qwen3_5GatedDeltaNet, a kind of layer that is not known"),
    "gpt_oss": ({"num_local_experts": 1}, [], "is a GptOssTopKRouter, a kind of layer that is not known"),
    "mistral": ({"sliding_window": 8}, ["learner.device=cuda"], "the model has one of 8 tokens"),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_folder_with_a_layer_that_is_not_known_is_refused(here, kind):
    options, given, message = UNKNOWN[kind]
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SHAPE | options)).save_pretrained(here / "other")
    load_tokenizer(PolicySpec(source=str(here / "policy"))).save_pretrained(here / "other")
    given = config("model.type=pretrained", "model.path=other", *SUMS, "task.reward=exact", *given)
    for check in (lambda: dry_run(given, fresh=False), lambda: check_run(check_early(given, dry=True))):
        with pytest.raises(ConfigError, match=message):
            check()


def test_it_tells_what_a_run_would_do_with_a_run_of_its_name(here):
    going_on = pytest.raises(ConfigError, match="a run named mine is still going on")
    with open_run_dir(config("output_dir=runs", "seed=3")), going_on:
        dry_run(config("seed=3"), fresh=False)
    assert "mine (new)" in dry_run(config("seed=4"), fresh=False).checked[2]  # that start failed before its first step
    task = load_task(config().task, eval_problems=config().evaluation.problems)
    state = json.dumps({"collector": {"problems": task.digest()}})
    write(here / "runs" / "mine", 3, state=state)
    before = tree(here)
    assert "mine (its run resumes after step 3)" in dry_run(config("seed=3"), fresh=False).checked[2]
    with pytest.raises(ConfigError, match="with other settings: seed: 3 → 4"):
        dry_run(config("seed=4"), fresh=False)
    assert "mine (its run is moved aside)" in dry_run(config("seed=4"), fresh=True).checked[2]
    assert tree(here) == before
    write(here / "runs" / "mine", 4, state=state)
    os.truncate(here / "runs" / "mine" / "checkpoints" / "step-000004" / "loop.json", 0)
    before = tree(here)
    assert "mine (its run resumes after step 3)" in dry_run(config("seed=3"), fresh=False).checked[2]
    os.truncate(here / "runs" / "mine" / "checkpoints" / "step-000003" / "loop.json", 0)
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* is whole"):
        dry_run(config("seed=3"), fresh=False)
    assert tree(here).keys() == before.keys()


def test_the_hub_is_left_to_the_run(here):
    """But a reward is looked for, and the rest is checked."""
    hub = ["task.type=dataset", "task.path=openai/gsm8k", "task.held_out_path=sums.jsonl"]
    found = dry_run(config(*hub, *PRETRAINED), fresh=False)
    assert found.unchecked == ["problems and prompts, as openai/gsm8k would come from the hub", RUNS_ONLY]
    assert "the model (Qwen2ForCausalLM)" in found.checked
    with pytest.raises(RewardError, match="no_such"):
        dry_run(config(*hub, "task.reward=tests.training.rewards:no_such"), fresh=False)
    found = dry_run(config("model.type=pretrained", "model.path=org/name"), fresh=False)
    assert found.unchecked == ["the model and prompts, as model.path would come from the hub", RUNS_ONLY]
    assert "500 held-out problems" in found.checked[3]


def test_a_template_without_the_prompt_is_refused_though_the_hub_is_not_asked(here):
    hub = ["model.type=pretrained", "model.path=org/name", "task.type=dataset", "task.path=openai/gsm8k"]
    with pytest.raises(ConfigError, match=r"template: must contain \{prompt\}"):
        dry_run(config(*hub, "task.template=Q"), fresh=False)


def test_secrets_are_not_shown_and_an_address_without_one_is_shown_whole(here):
    reference = "tests.training.driver.test_dry_run:problems"
    given = ["task.type=custom", f"task.problems={reference}", "task.reward=exact"]
    given += ["task.params={api_key: sk-1, url: 'http://me:sesame@host/x'}", "tracking.mlflow_uri=http://host:5000/x@y"]
    settings = yaml.safe_load(dry_run(config(*given), fresh=False).settings)
    assert settings["task"]["params"] == {"api_key": "…", "url": "http://…@host/x"}
    assert settings["tracking"]["mlflow_uri"] == "http://host:5000/x@y"
    with pytest.raises(DataError, match=r"failed with task\.params") as caught:
        dry_run(config(*given, "task.params.fail=true"), fresh=False)
    assert "sk-1" not in str(caught.value)
    assert "sesame" not in str(caught.value)


def problems(fail=False, **params):
    assert not fail
    return [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(10)]


def test_it_shows_one_problem_as_policy_and_reward_get_it(here):
    assert dry_run(config(*PRETRAINED, *SUMS, "task.template=<eos>{prompt}7"), fresh=False).example == [
        "the prompt of train-0 as the policy reads it, 6 tokens:",
        "  <eos>0+1=7",
        "expected answer: '1'; reward math_verify gives it 1",
    ]


BAD = "tests.environments.bad_environments"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "check", [lambda given: dry_run(given, fresh=False), lambda given: check_run(check_early(given))]
)
@pytest.mark.parametrize(
    ("given", "answer", "message"),
    [
        ([f"environment.type={BAD}:Nowhere"], "1", "has no Nowhere"),
        ([f"environment.type={BAD}:NOT_AN_ENVIRONMENT"], "1", "NOT_AN_ENVIRONMENT"),
        (
            [f"environment.type={BAD}:FailsToReset"],
            "1",
            "ended in error when it was tried on train-0: .*no such problem",
        ),
        ([f"environment.type={BAD}:Misbehaves"], "raise", "ended in error when it was tried on train-0"),
        ([f"environment.type={BAD}:Misbehaves"], "exit", "ended in died when it was tried on train-0"),
        ([f"environment.type={BAD}:Misbehaves", "environment.timeout_s=2"], "hang", "ended in timeout"),
        ([f"environment.type={BAD}:ReturnsDict"], "1", "ended in invalid .*: step returned dict, expected a Step"),
        (["environment.type=tools", "environment.params={functions: [tests.training.rewards:none]}"], "1", "none"),
    ],
)
def test_an_environment_plays_one_turn(here, check, given, answer, message):
    rows = [{"prompt": f"{n}+1=", "answer": answer} for n in range(4)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(QurlError, match=message):
        check(config(*PRETRAINED, "task.type=dataset", "task.path=rows.jsonl", "task.reward=exact", *given))


def test_the_tools_that_a_prompt_names_are_shown(here):
    given = config(*PRETRAINED, *SUMS, "environment.type=tools", "environment.params={functions: [python]}")
    tools = [{"type": "function", "function": {"name": "python"}}]
    task = given.task.model_copy(update={"chat_template_args": {"tools": tools}})
    trial = module.Trial(config=given.model_copy(update={"task": task}), notes=[], prompt=np.array([1, 2]), reply=None)
    policy = SimpleNamespace(tokenizer=load_tokenizer(PolicySpec(source=str(here / "policy"))))
    example = module._example(load_task(given.task, eval_problems=9), 1.0, policy, trial)
    assert example[-1] == "tools in the prompt: python; none is called by this answer"


def test_tools_that_a_prompt_has_to_describe_are_shown_with_the_form_of_a_call(here):
    settings = "environment.params={functions: [python], described: false}"
    example = dry_run(config(*PRETRAINED, *SUMS, "environment.type=tools", settings), fresh=False).example
    (at,) = (number for number, line in enumerate(example) if "described is false" in line)
    schema = json.loads(example[at + 1])
    assert schema["name"] == "python"
    assert "code" in schema["parameters"]["properties"]
    assert example[at + 2].endswith('<tool_call>{"name": …, "arguments": {…}}</tool_call>')


def test_a_problem_without_an_answer_is_tried_with_an_empty_one(here):
    (here / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(4)))
    settings = ["task.type=dataset", "task.path=rows.jsonl", "task.answer_column=null"]
    settings += ["task.reward=tests.training.rewards:constant", f"environment.type={BAD}:Counts"]
    example = dry_run(config(*PRETRAINED, *settings), fresh=False).example
    shown = "expected answer: the problem has none; reward tests.training.rewards:constant gives an empty answer 0.5"
    assert shown in example
    assert "reply to an empty answer as a first turn" in example[-1]


def test_the_reply_of_an_environment_is_shown(here):
    found = dry_run(config(*PRETRAINED, *SUMS, f"environment.type={BAD}:Counts"), fresh=False)
    assert found.example[-1] == "the environment's reply to this answer as a first turn: user: 1: 1"
    assert f"one turn of environment {BAD}:Counts" in found.checked


def test_a_run_that_fills_the_disk_is_refused(here, monkeypatch):
    usage = shutil.disk_usage(here)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=int(1.2e7)))
    given = [*PRETRAINED, *SUMS, "checkpoint.every=1"]
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    for start in (dry_run, run):
        with pytest.raises(ConfigError, match=r"too small: checkpoints of 5 MB, 3 at a time.*: 16 MB of 12 MB free"):
            start(config(*given), fresh=False)
    assert not (here / "runs").exists()
    dry_run(config(*given, "steps=1"), fresh=False)


def test_a_run_for_gpus_is_refused_where_there_are_none(here, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    given = config(*PRETRAINED, *SUMS, "learner.device=cuda")
    for start in (lambda: run_job(given, dry=True, fresh=False), lambda: run(given)):
        with pytest.raises(ConfigError, match=r"this machine cannot hold the run: 1 GPU .* set \$RAY_ADDRESS"):
            start()
    assert "saving of the policy" in capsys.readouterr().out, "the dry run has not said the rest"
    assert not (here / "runs").exists()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert dry_run(given, fresh=False).missing is None


def test_a_run_of_far_more_processes_than_cores_is_refused(here, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for workers, refused in ((15, False), (16, True)):
        found = dry_run(config(*PRETRAINED, *SUMS, f"rollout.workers={workers}"), fresh=False)
        assert bool(found.missing) == refused
    with pytest.raises(ConfigError, match="16 rollout workers and 1 learner ranks compute on 2 cores; lower"):
        run(config(*PRETRAINED, *SUMS, "rollout.workers=16"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert dry_run(config(*PRETRAINED, *SUMS, "rollout.workers=16"), fresh=False).missing is None


def test_a_folder_that_cannot_be_written_is_no_small_disk(here):
    for start in (dry_run, run):
        with pytest.raises(ConfigError, match="cannot write to /proc/nope"):
            start(config(*PRETRAINED, *SUMS, "output_dir=/proc/nope"), fresh=False)


def test_a_gguf_file_that_was_not_converted_has_unchecked_tensors(here, monkeypatch):
    (here / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(module, "gguf_outline", lambda *_: outline(PolicySpec(source=str(here / "policy"))))
    given = config("model.type=gguf", "model.path=model.gguf", *SUMS)
    found = dry_run(given, fresh=False)
    assert found.unchecked == ["the tensors of the GGUF file, as the run would convert it", RUNS_ONLY]
    assert "the model (Qwen2ForCausalLM)" in found.checked
    (here / "policy").rename(gguf._folder(here / "model.gguf"))
    assert dry_run(given, fresh=False).unchecked == [RUNS_ONLY]


def test_a_policy_in_the_cache_of_the_hub_is_checked(here, monkeypatch):
    """The cache as huggingface_hub lays it out."""
    snapshot = here / "hub" / "models--org--name" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    (here / "policy").rename(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "hub"))
    given = config("model.type=pretrained", "model.path=org/name")
    assert "the model (Qwen2ForCausalLM)" in dry_run(given, fresh=False).checked
    assert check_run(check_early(given)).spec.source == "org/name"
    os.truncate(snapshot / "model.safetensors", 5000)
    with pytest.raises(ConfigError, match=r"0123/model\.safetensors is damaged"):
        dry_run(given, fresh=False)
    with pytest.raises(ConfigError, match=r"0123/model\.safetensors is damaged"):
        check_run(check_early(given))


def test_it_says_what_a_run_would_announce_about_problems_and_model(here, capsys):
    """30 of 40 rows cannot be used, and there is a column that the policy does not see."""
    rows = [{"prompt": f"{n}+1=" if n < 10 else " ", "answer": str(n + 1), "system": "Be brief."} for n in range(40)]
    (here / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = config(*PRETRAINED, "task.type=dataset", f"task.path={here / 'rows.jsonl'}")
    assert run_job(given, dry=True, fresh=False) == 0
    said = capsys.readouterr().err
    assert f"note: {here / 'rows.jsonl'}: 30 of 40 rows skipped, prompt or answer empty" in said
    assert f"note: {here / 'rows.jsonl'}: columns that the policy does not see: system" in said
    assert dry_run(given, fresh=False).notes == list(check_run(check_early(given)).task.notes)


def test_special_tokens_in_prompts_are_announced(here):
    tokenizer = load_tokenizer(PolicySpec(source=str(here / "policy")))
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(here / "policy")
    (here / "sums.jsonl").write_text(4 * '{"prompt": "<eos>1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    given = config(*PRETRAINED, *SUMS, "task.chat=true", "task.reward=exact")
    for notes in (check_run(check_early(given)).task.notes, dry_run(given, fresh=False).notes):
        assert any("prompts hold special tokens, '<eos>'" in note for note in notes), notes


def test_a_chat_without_a_chat_template_is_refused(here):
    with pytest.raises(DataError, match=r"task\.chat=true: the tokenizer has no chat template"):
        dry_run(config(*PRETRAINED, *SUMS, "task.chat=true"), fresh=False)
