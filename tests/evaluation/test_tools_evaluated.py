"""A policy with tools, evaluated: template, calls, results and the last turn's reward together."""

import json

import pytest

from qurl_ray.config import load_config
from qurl_ray.errors import ConfigError, DataError
from qurl_ray.evaluation.evaluate import evaluate
from qurl_ray.policy.load import load_model, load_tokenizer
from qurl_ray.policy.save import save_policy
from qurl_ray.training.driver.early import check_early
from qurl_ray.training.driver.prepare import check_run
from qurl_ray.types import PolicySpec
from tests.data.test_turns import CHATML
from tests.tools.policy import ANSWER, ASKED, FUNCTION, save_calling_policy
from tests.tools.templates import LLAMA


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_calling_policy(tmp_path_factory.mktemp("calling") / "policy")


def checked(given):
    return check_run(check_early(load_config(None, given))).config


def settings(policy, folder, **params) -> list[str]:
    for name, prompt in (("train", "another one"), ("held", ASKED)):
        (folder / f"{name}.jsonl").write_text(json.dumps({"prompt": prompt, "answer": ANSWER}) + "\n")
    params = {"functions": [FUNCTION], "deterministic": True} | params
    return [
        "model.type=pretrained", f"model.path={policy}", "model.max_length=1024", f"output_dir={folder}",
        "task.type=dataset", f"task.path={folder / 'train.jsonl'}", f"task.held_out_path={folder / 'held.jsonl'}",
        "task.chat=true", "task.reward=exact", "evaluation.problems=1", "environment.type=tools",
        f"environment.params={json.dumps(params)}", "environment.max_turns=3", "rollout.max_new_tokens=160",
        "rollout.quantization=none", "quantization.uaq_scale=1", "tracking.mlflow=false",
    ]  # fmt: skip


def test_a_policy_that_asks_a_tool_solves_the_problem(policy, tmp_path):
    report = evaluate(load_config(None, settings(policy, tmp_path)), policy)
    assert report.accuracy.value == 1.0
    assert report.failed_rewards == 0


def test_the_template_gets_the_tools_unless_the_prompt_has_them_or_the_settings_name_others(policy, tmp_path):
    config = checked(settings(policy, tmp_path))
    (tool,) = config.task.chat_template_args["tools"]
    assert tool["function"]["name"] == "multiply"
    others = [*settings(policy, tmp_path), 'task.chat_template_args={tools: [{"type": "function"}]}']
    assert checked(others).task.chat_template_args == {"tools": [{"type": "function"}]}
    assert "tools" not in checked(settings(policy, tmp_path, described=False)).task.chat_template_args


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        (CHATML, DataError, "no variable 'tools': the prompt has to describe them, with environment.params.described"),
        (LLAMA, ConfigError, r"in the format llama.*reads hermes: set environment\.params\.format=llama"),
        (None, DataError, "tools, of the environment or task.chat_template_args: the tokenizer has no chat template"),
    ],
)
def test_templates_that_do_not_fit_are_refused_before_the_start(policy, tmp_path, template, error, message):
    spec = PolicySpec(source=str(policy))
    tokenizer = load_tokenizer(spec)
    tokenizer.chat_template = template
    save_policy(load_model(spec), tokenizer, tmp_path / "policy")
    with pytest.raises(error, match=message):
        checked(settings(tmp_path / "policy", tmp_path))
