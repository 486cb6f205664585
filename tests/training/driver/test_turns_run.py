"""Runs with an environment: rollouts of several turns, resumed and killed, learn as undisturbed ones do."""

import json
import re

import pytest
import torch

from qurl_ray.config import load_config
from qurl_ray.errors import ConfigError, DataError, EnvironmentFailed
from qurl_ray.report.timeline import read_timeline
from qurl_ray.spans import ENVIRONMENTS
from qurl_ray.training.driver.early import check_early
from qurl_ray.training.driver.prepare import check_run
from qurl_ray.training.driver.run import run
from tests.actors.test_rows import FORGETS_SIGNS
from tests.data.test_turns import REWRITES
from tests.training.driver.test_run import small_run
from tests.training.runs import SMALL, events, forget_after, parameters, start_job, strike, wait_for_steps
from tests.training.test_survival import finished

BAD = "tests.environments.bad_environments"
TURNS = [
    "model.calculator=true",
    f"environment.type={BAD}:Counts",
    "environment.cut_turns=close",
    "environment.turn_tokens=4",
    "environment.max_turns=3",
    "rollout.max_new_tokens=10",
    "tracking.samples_per_step=4",
]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.equal_bits
def test_a_run_with_turns_has_the_learners_logprobs_and_resumes_to_the_bit(tmp_path, cluster):
    plain = ["steps=3", "checkpoint.every=1", "rollout.quantization=none", "algorithm.correction.type=ignore"]
    result = small_run(tmp_path, *TURNS, *plain)
    for line in events(result.run_dir, "step"):
        assert line["values"]["mismatch/abs_logprob_gap"] == 0
        assert line["values"]["environment/turns"] > 2
        assert line["values"]["environment/failed"] == 0
        assert line["values"]["rollout/mean_length"] <= 10
    samples = [json.loads(line) for line in (result.run_dir / "samples.jsonl").read_text().splitlines()]
    assert samples
    for sample in samples:
        given = [number < 0 for number, count in sample["versions"] for _ in range(count)]
        assert [logprob is None for logprob in sample["logprobs"]] == given
        assert any(given)
        reset, first = sample["said"][:2]
        assert (reset["at"], reset["messages"]) == (0, [])
        assert first["messages"][0]["content"] == f"1: {sample['turns'][0]['text']}"
        assert [turn["at"] + turn["tokens"] for turn in sample["turns"]] == [one["at"] for one in sample["said"][1:]]
        assert sum(turn["tokens"] for turn in sample["turns"]) == sum(not one for one in given)
        assert 0 < sample["turns"][-1]["asked"] + sample["turns"][-1]["waited"] < sample["seconds"]
    assert "from the environment" in (result.run_dir / "rollouts" / "step-1.html").read_text()
    assert "Turns with the environment" in (result.run_dir / "report.html").read_text()
    spans = [one for one in read_timeline(result.run_dir) if one.lane == ENVIRONMENTS]
    assert {one.step for one in spans} >= {1, 2, 3}
    asked = next(one for one in spans if one.figures["engines"])
    drawn = next(one for one in read_timeline(result.run_dir) if one.name == "generate")
    assert asked.start <= drawn.start < asked.start + asked.seconds + 0.5
    assert 20 < max(sum(one.figures.values()) for one in spans) <= 40
    forget_after(result.run_dir, 1)
    again = small_run(tmp_path, *TURNS, *plain)
    assert torch.equal(parameters(again.policy), parameters(result.policy))
    assert [line["step"] for line in events(result.run_dir, "step")] == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    "settings",
    [
        ["algorithm.turn_credit=turn", "algorithm.overlong_buffer=4"],
        pytest.param(
            ["algorithm.type=grpo", "algorithm.turn_credit=turn", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["algorithm.turn_credit=spread", "algorithm.objective=gspo", "algorithm.correction=flashrl"],
            marks=pytest.mark.slow,
        ),
        ["algorithm.type=ppo", "algorithm.turn_credit=turn"],
        pytest.param(["algorithm.type=ppo"], marks=pytest.mark.slow),
    ],
    ids=["turn", "turn and KL", "spread", "PPO, turn", "PPO, token"],
)
def test_a_run_gives_turns_the_credit_that_it_is_told_to(tmp_path, cluster, settings):
    result = small_run(tmp_path, *TURNS, f"environment.type={BAD}:Weighs", "steps=2", *settings)
    for line in events(result.run_dir, "step"):
        assert line["values"]["rollout/trained_samples"] > 4
        assert line["values"]["grad_norm"] > 0
        assert line["values"].get("value/error", 0.0) < 10
    samples = [json.loads(line) for line in (result.run_dir / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        credit, steps = sample["credit"], sample["said"][1:]
        assert [turn["end"] for turn in credit] == [turn["at"] + turn["tokens"] for turn in sample["turns"]]
        assert [turn["reward"] for turn in credit[:-1]] == [step["reward"] for step in steps[:-1]]
        penalty = credit[-1]["reward"] - steps[-1]["reward"]
        assert penalty <= 0 if "algorithm.overlong_buffer=4" in settings else penalty == 0
    known = [turn["advantage"] for sample in samples for turn in sample["credit"] if turn["advantage"] is not None]
    assert any(known) == ("algorithm.type=ppo" not in settings)


@pytest.mark.slow
@pytest.mark.ray
def test_processes_of_a_run_with_turns_are_killed_and_it_ends_where_the_undisturbed_one_does(tmp_path):
    settings = [*SMALL, *TURNS, "steps=12", "checkpoint.every=2", "checkpoint.keep=9"]
    expected = finished(start_job(*settings, f"output_dir={tmp_path / 'undisturbed'}"), tmp_path / "undisturbed/run")
    run_dir = tmp_path / "run"
    job = start_job(*settings, f"output_dir={tmp_path}")
    victims = ("ray::EnvironmentHost", "ray::RolloutWorker", "ray::Coordinator")
    for number, name in enumerate(victims, start=1):
        wait_for_steps(run_dir, 3 * number, job)
        strike(job, name)
    found = finished(job, run_dir)
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (["environment.type=calculater"], ConfigError, "did you mean 'calculator'"),
        (["environment.type=calculator"], ConfigError, "model.calculator=true"),
        (["model.calculator=true", "environment.type=no.such:Game"], EnvironmentFailed, "cannot import no.such"),
        (["model.calculator=true", f"environment.type={BAD}:Counts", "environment.params={speed: 2}"],
         EnvironmentFailed, "ended in error when it was tried on .*speed"),
    ],
)  # fmt: skip
def test_an_environment_that_cannot_be_used_ends_the_run_before_it_starts(tmp_path, settings, error, message):
    with pytest.raises(error, match=message):
        check_run(check_early(load_config(None, [*SMALL, f"output_dir={tmp_path}", *settings])))


def settings_with(template: str, spec, tokenizer, folder) -> list[str]:
    """SMALL, with a policy that has this chat template."""
    from qurl_ray.policy.load import load_model
    from qurl_ray.policy.save import save_policy

    tokenizer = type(tokenizer).from_pretrained(spec.source)
    tokenizer.chat_template = template
    save_policy(load_model(spec), tokenizer, folder / "policy")
    small = [setting for setting in SMALL if not setting.startswith("model.")]
    return [*small, "model.type=pretrained", f"model.path={folder / 'policy'}", "task.chat=true"]


def test_a_template_that_rewrites_turns_is_refused_before_the_start(tiny_spec, tokenizer, tmp_path):
    common = [*settings_with(REWRITES, tiny_spec, tokenizer, tmp_path), "environment.type=calculator"]
    with pytest.raises(DataError, match="rewritten_history=keep"):
        check_run(check_early(load_config(None, common)))
    for history in ("keep", "new_row"):
        check_run(check_early(load_config(None, [*common, f"environment.rewritten_history={history}"])))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.equal_bits
def test_a_run_with_new_rows_has_the_learners_logprobs_and_resumes_to_the_bit(tiny_spec, tokenizer, tmp_path, cluster):
    common = settings_with(FORGETS_SIGNS, tiny_spec, tokenizer, tmp_path)
    turns = [setting for setting in TURNS if not setting.startswith("model.")]
    plain = ["rollout.quantization=none", "algorithm.correction.type=ignore", "environment.rewritten_history=new_row"]
    settings = [*common, *turns, *plain, "steps=3", "checkpoint.every=1", f"output_dir={tmp_path}"]
    result = run(load_config(None, settings))
    for line in events(result.run_dir, "step"):
        values = line["values"]
        assert values["mismatch/abs_logprob_gap"] == 0
        assert 4 < values["environment/new_rows"] < 2 * values["rollout/samples"]
        assert values["rollout/trained_samples"] <= 8 * 4  # trajectories, not rows
        assert values["rollout/mean_length"] <= 10
        assert values["environment/failed"] == 0
        assert values["grad_norm"] > 0
    assert events(result.run_dir, "evaluation")
    samples = [json.loads(line) for line in (result.run_dir / "samples.jsonl").read_text().splitlines()]
    several = [sample for sample in samples if sample.get("rows")]
    assert any(sample["advantage"] for sample in several)
    for sample in several:
        trained = sample["advantage"] is not None  # of all rows, each token in its place
        assert sample["proximal_logprobs"] == (sample["logprobs"] if trained else None)
        at = [turn["at"] for turn in sample["turns"]]
        for begin in sample["rows"]:  # between two turns, and first its prompt
            assert sample["logprobs"][begin] is None
            assert begin in [turn["at"] + turn["tokens"] for turn in sample["turns"]]
            assert begin < max(at)
    assert "new row" in (result.run_dir / "report.html").read_text()
    pages = (result.run_dir / "rollouts").glob("step-*.html")
    assert any(re.search(r'"rows": ?\[\d', page.read_text()) for page in pages)
    forget_after(result.run_dir, 1)
    again = run(load_config(None, settings))
    assert torch.equal(parameters(again.policy), parameters(result.policy))


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["algorithm.type=ppo"], marks=pytest.mark.slow),
        ["algorithm.type=grpo", "algorithm.turn_credit=turn", "algorithm.kl_coef=0.1", "algorithm.kl_in=reward"],
    ],
    ids=["PPO", "turn and KL"],
)
def test_rows_learn_with_a_value_model_and_with_credit_of_turns(tiny_spec, tokenizer, tmp_path, cluster, more):
    common = settings_with(FORGETS_SIGNS, tiny_spec, tokenizer, tmp_path)
    turns = [setting for setting in TURNS if not setting.startswith("model.")]
    rows = [f"environment.type={BAD}:Weighs", "environment.rewritten_history=new_row", "learner.workers=2"]
    result = run(load_config(None, [*common, *turns, *rows, "steps=2", f"output_dir={tmp_path}", *more]))
    for line in events(result.run_dir, "step"):
        assert line["values"]["environment/new_rows"] > 4
        assert line["values"]["grad_norm"] > 0
