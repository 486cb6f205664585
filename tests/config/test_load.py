"""Settings from real YAML files: what is accepted, and what an error says of the rest."""

import re
from pathlib import Path

import pytest
import yaml

from qurl_ray.config import RunConfig, load_config, resolve
from qurl_ray.config.algorithm import PRESETS, TIS
from qurl_ray.config.idle import idle_settings
from qurl_ray.config.learner import LearnerConfig
from qurl_ray.config.load import describe
from qurl_ray.config.names import ELSEWHERE, SAME
from qurl_ray.config.serving import load_serving
from qurl_ray.errors import ConfigError

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "qurl_ray" / "configs").rglob("*.y*ml"))


@pytest.fixture
def load(tmp_path):
    """Write the text to a file, read it as a run's settings."""

    def load(text: str, *overrides: str) -> RunConfig:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return load_config(path, overrides)

    return load


def complaint(load, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


# --- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_of_the_repository_loads_under_its_own_name(path):
    assert load_config(path).name == path.stem


def test_there_are_configs_to_load():
    assert "quickstart.yaml" in [path.name for path in CONFIGS]


def test_no_file_gives_the_defaults():
    assert load_config(None) == RunConfig()


def test_an_empty_mapping_gives_the_defaults(load):
    assert load("{}") == RunConfig()


def test_a_missing_file_names_the_nearest_one(tmp_path):
    (tmp_path / "quickstart.yaml").write_text("steps: 3")
    (tmp_path / "bench.yaml").write_text("steps: 3")
    with pytest.raises(ConfigError, match=r"quickstrat\.yaml does not exist; did you mean .*/quickstart\.yaml\?"):
        load_config(tmp_path / "quickstrat.yaml")


def test_a_missing_file_without_neighbours_names_none(tmp_path):
    with pytest.raises(ConfigError, match=r"does not exist$"):
        load_config(tmp_path / "run.yaml")


def test_a_folder_is_no_config_file(tmp_path):
    with pytest.raises(ConfigError, match="is a folder: give a YAML file"):
        load_config(tmp_path)


def test_invalid_yaml_names_the_file_and_the_place(load):
    message = complaint(load, "steps: 3\nrollout: {workers: 2\n")
    assert "run.yaml is not valid YAML" in message
    assert "line 2" in message


@pytest.mark.parametrize(("text", "kind"), [("- steps", "list"), ("3", "int"), ("steps", "str")])
def test_a_file_that_is_no_mapping_is_refused(load, text, kind):
    assert f"run.yaml holds {kind}, expected a mapping of sections" in complaint(load, text)


def test_a_file_may_not_run_code(load):
    assert "not valid YAML" in complaint(load, "name: !!python/object/apply:os.getcwd []")


# --- unknown keys ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "unknown", "nearest"),
    [
        ("stepps: 3", "stepps", "steps"),
        ("rollouts: {workers: 1}", "rollouts", "rollout"),
        ("rollout: {worker: 2}", "rollout.worker", "rollout.workers"),
        ("sync: {timeout: 3}", "sync.timeout", "sync.timeout_s"),
        ("task: {max_operandd: 9}", "task.max_operandd", "task.max_operand"),
        ("algorithm: {type: grpo, clip_hihg: 0.2}", "algorithm.clip_hihg", "algorithm.clip_high"),
    ],
)
def test_an_unknown_key_names_the_nearest(load, text, unknown, nearest):
    assert complaint(load, text).endswith(f"run.yaml: unknown key {unknown!r}; did you mean {nearest!r}?")


@pytest.mark.parametrize("correction", ["{is_capp: 3}", "{type: acr, is_capp: 3}", "{type: tis, is_capp: 3}"])
def test_an_unknown_key_inside_a_union_names_the_nearest(load, correction):
    message = complaint(load, f"algorithm: {{correction: {correction}}}")
    assert "is_capp'; did you mean 'algorithm.correction.is_cap'?" in message


def test_an_unknown_key_like_no_other_names_none(load):
    assert complaint(load, "zzzzzzzz: 1").endswith("unknown key 'zzzzzzzz'")


def test_every_fault_has_its_line(load):
    message = complaint(load, "stepps: 3\nrollout: {worker: 2}\nlearner: {lr: -1}")
    assert len(message.splitlines()) == 3
    for part in ("'stepps'", "'rollout.worker'", "learner.lr"):
        assert part in message


def test_an_unknown_key_in_an_override_names_the_nearest(load):
    assert "did you mean 'rollout.workers'" in complaint(load, "{}", "rollout.wrkers=2")


# --- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where", "given"),
    [
        ("steps: many", "steps: ", "(got 'many')"),
        ("steps: 2.5", "steps: ", "(got 2.5)"),
        ("steps: 0", "steps: ", "(got 0)"),
        ("learner: {lr: x}", "learner.lr: ", "(got 'x')"),
        ("learner: {lr: .nan}", "learner.lr: ", "(got nan)"),
        ("rollout: {quantization: int9}", "rollout.quantization: ", "(got 'int9')"),
        ("rollout: {temperature: 0}", "rollout.temperature: ", "(got 0)"),
        ("rollout: 3", "rollout: ", "(got 3)"),
        ("name: ../elsewhere", "name: ", "(got '../elsewhere')"),
        ("quantization: {keep: lm_head}", "quantization.keep: ", "(got 'lm_head')"),
        (
            "task: {type: dataset, path: a, held_out_path: 3}",
            "task.held_out_path: expected a file or hub id",
            "(got 3)",
        ),
    ],
)
def test_a_wrong_value_names_its_place_and_what_was_given(load, text, where, given):
    message = complaint(load, text)
    assert f"run.yaml: {where}" in message
    assert message.endswith(given)


NO, YES = "(got False); YAML reads no as false, and off", "(got True); YAML reads yes as true, and on"


@pytest.mark.parametrize("word", ["no", "off", "No", "OFF"])
@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("rollout: {{quantization: {}}}", f"'mxfp8' {NO}; write none"),
        ("tracking: {{console: {}}}", f"'none' {NO}; write none"),
        ("algorithm: {{correction: {{reject: {}}}}}", f"'k3' {NO}; write none"),
        ("learner: {{schedule: {}}}", f"'wsd' {NO}"),
        ("algorithm: {{correction: {}}}", f"or package.module:function {NO}"),
        ("tracking: {{experiment: {}}}", f"valid string {NO}; write text in quotes"),
        ("task: {{type: dataset, path: a, answer_column: {}}}", f"valid string {NO}; write text in quotes"),
        ("quantization: {{keep: [{}]}}", f"valid string {NO}; write text in quotes"),
    ],
)
def test_a_word_that_yaml_reads_as_false_is_explained_where_text_is_wanted(load, text, end, word):
    assert complaint(load, text.format(word)).endswith(end)


@pytest.mark.parametrize("word", ["yes", "on"])
@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("name: {}", f"valid string {YES}; write text in quotes"),
        ("task: {{system_prompt: {}}}", f"valid string {YES}; write text in quotes"),
        ("rollout: {{quantization: {}}}", f"'mxfp8' {YES}"),
    ],
)
def test_a_word_that_yaml_reads_as_true_is_explained_where_text_is_wanted(load, text, end, word):
    assert complaint(load, text.format(word)).endswith(end)
    assert "YAML reads" not in complaint(load, f"rollout: {word}")  # no text is wanted here


def test_a_word_that_yaml_reads_as_false_is_explained_in_an_override_and_in_serving():
    with pytest.raises(ConfigError, match=r"'mxfp8' \(got False\); YAML reads no as false, and off; write none"):
        load_config(None, ["rollout.quantization=no"])
    with pytest.raises(ConfigError, match=r"\(got False\); YAML reads no as false, and off; write none"):
        load_serving(None, ["quantization=off"])
    assert load_config(None, ["tracking.experiment=no"]).tracking.experiment == "no"  # an override of text is text


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("steps: yes", "config: steps is a number, not true; YAML reads yes as true"),
        ("learner: {lr: on}", "learner: lr is a number, not true; YAML reads yes as true"),
        ("rollout: {max_staleness: off}", "rollout: max_staleness is a number, not false; YAML reads no as false"),
        (
            "algorithm: {type: dapo, clip_high: no}",
            "algorithm: clip_high is a number, not false; YAML reads no as false",
        ),
    ],
)
def test_a_truth_value_is_no_number(load, text, end):
    assert complaint(load, text).endswith(end)


def test_an_unknown_type_names_those_there_are(load):
    message = complaint(load, "algorithm: {type: gspo}")
    assert "'gspo'" in message
    assert "'dapo', 'grpo'" in message


def test_rates_may_be_written_without_a_point(load):
    """YAML 1.1 reads 1e-6 as text."""
    assert load("learner: {lr: 1e-6}", "learner.weight_decay=1e-2").learner.lr == 1e-6


def test_sections_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().rollout.workers = 3


# --- overrides -------------------------------------------------------------------------------------------------


def test_overrides_win_over_the_file_and_later_ones_over_earlier(load):
    config = load("rollout: {workers: 2, slots: 7}", "rollout.workers=3", "rollout.workers=4", "name=other")
    assert (config.rollout.workers, config.rollout.slots, config.name) == (4, 7, "other")


def test_an_override_may_hold_yaml(load):
    config = load("{}", "quantization.keep=[lm_head, embed]", "learner.threads=2", "tracking.mlflow=false")
    assert (config.quantization.keep, config.learner.threads, config.tracking.mlflow) == (
        ("lm_head", "embed"),
        2,
        False,
    )


def test_an_override_may_hold_an_equals_sign(load):
    assert load("{}", "task.template=Q={prompt}=").task.template == "Q={prompt}="


@pytest.mark.parametrize("override", ["steps", "--steps", "=3", ""])
def test_an_override_without_key_or_value_is_refused(load, override):
    assert complaint(load, "{}", override) == f"override {override!r} is not of the form key=value"


def test_an_override_that_is_no_yaml_is_refused(load):
    assert "override 'steps=[1': the value is not valid YAML" in complaint(load, "{}", "steps=[1")


def test_an_override_cannot_go_into_a_value(load):
    message = complaint(load, "rollout: {workers: 4}", "rollout.workers.x=3")
    assert message == "rollout.workers is a value, not a section: cannot set rollout.workers.x"


def test_an_override_may_change_the_type_of_a_section(load):
    config = load("algorithm: {type: dapo}", "algorithm.type=grpo", "algorithm.correction.type=tis")
    assert (config.algorithm.type, config.algorithm.correction.type) == ("grpo", "tis")


# --- types left out --------------------------------------------------------------------------------------------


def test_sections_without_a_type_are_of_the_default_one(load):
    config = load("model: {layers: 3}\ntask: {max_operand: 9}\nalgorithm: {clip_low: 0.1, correction: {is_cap: 8}}")
    kinds = (config.model.type, config.task.type, config.algorithm.type, config.algorithm.correction.type)
    assert kinds == ("tiny", "arithmetic", "dapo", "acr")
    assert (config.model.layers, config.task.max_operand, config.algorithm.correction.is_cap) == (3, 9, 8.0)


def test_a_config_survives_being_saved_and_read(load, tmp_path):
    config = load("algorithm: {type: grpo, correction: {type: ignore}}\ntask: {type: dataset, path: a.jsonl}")
    (tmp_path / "saved.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    assert load_config(tmp_path / "saved.yaml") == config


# --- parts that do not agree -----------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["grpo", "dapo"])
def test_a_group_of_one_is_refused(load, algorithm):
    message = complaint(load, f"algorithm: {{type: {algorithm}}}\nrollout: {{samples_per_prompt: 1}}")
    assert f"rollout.samples_per_prompt is 1: {algorithm} compares" in message
    assert "use at least 2" in message


def test_more_updates_than_prompts_are_refused(load):
    load("rollout: {prompts_per_step: 4}\nalgorithm: {updates_per_rollout: 4}")
    message = complaint(load, "rollout: {prompts_per_step: 4}\nalgorithm: {updates_per_rollout: 5}")
    assert "algorithm.updates_per_rollout (5) exceeds rollout.prompts_per_step (4)" in message


def test_uaq_with_full_precision_rollouts_is_refused(load):
    load("rollout: {quantization: none}")
    message = complaint(load, "rollout: {quantization: none}\nquantization: {uaq_scale: 1.5}")
    assert "quantization.uaq_scale must be 1 when rollout.quantization is none" in message


ON_GPUS = [
    "rollout.engine=vllm",
    "rollout.device=cuda",
    "learner.device=cuda",
    "rollout.vllm.kv_cache_gb=4",
    "rollout.dtype=bfloat16",
]


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
@pytest.mark.parametrize("missing", range(3))
def test_direct_transports_need_vllm_and_gpus(transport, missing):
    placement = "colocated" if transport == "ipc" else "disaggregated"
    overrides = [f"sync.transport={transport}", *ON_GPUS, f"placement={placement}"]
    assert load_config(None, overrides).sync.transport == transport
    del overrides[1 + missing]
    with pytest.raises(
        ConfigError,
        match=rf"sync\.transport={transport} sends from GPU to GPU: it needs rollout.engine=vllm.*use object_store",
    ):
        load_config(None, overrides)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["ipc"], "it needs placement=colocated; elsewhere use nccl"),
        (["rdma"], "sync.transport"),
    ],
)
def test_what_a_weight_transfer_cannot_do_is_refused(overrides, reason):
    transport, *others = overrides
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*ON_GPUS, f"sync.transport={transport}", *others])
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "rollout: {engine: 'outside:engine', kv_cache: fp8}",
            "engine=outside:engine cannot store keys and values as kv_cache=fp8: use full",
        ),
        ("rollout: {dtype: bfloat16}\nsync: {unquantized: float32}", "rollout.dtype=bfloat16 cannot hold"),
        (
            "rollout: {cuda_graphs: true}",
            "cuda_graphs needs engine=torch or vllm and device=cuda, not engine=torch and device=cpu",
        ),
        (
            "rollout: {lossless: true, quantization: none, engine: vllm}",
            "the sampler of engine=vllm cannot share: use engine=torch",
        ),
        ("rollout: {lossless: true, quantization: none, device: cuda}", "device=cpu and dtype=float32, not cuda"),
        ("rollout: {cuda_graphs: true, engine: vllm}", "not engine=vllm and device=cpu"),
        (
            "rollout: {device: cuda, engine: vllm}",
            "set rollout.dtype=bfloat16 or float16, or quantization.kernel=emulation",
        ),
        ("rollout: {device: cuda, engine: vllm, dtype: bfloat16, quantization: int4}", "take fp8 or int8, or"),
        (
            "rollout: {device: cuda, engine: vllm, dtype: bfloat16, quantization: mxfp8}",
            "no kernel for mxfp8 whose",
        ),
        (
            "precision_flow: unified\nrollout: {engine: vllm, dtype: bfloat16, vllm: {tensor_parallel: 2}}",
            "tensor_parallel=2, each quantizes its part of a row by the range of that part; take fp8_block",
        ),
        (
            "rollout: {quantization: nvfp4_w4a4, engine: vllm, vllm: {tensor_parallel: 2}}",
            "tensor_parallel=2, each quantizes its part of a row by the range of that part; take fp8_block",
        ),
        (
            "rollout: {device: cuda, engine: vllm, dtype: bfloat16, quantization: nvfp4_w4a4}",
            "no kernel for nvfp4_w4a4 whose",
        ),
    ],
)
def test_engines_that_could_not_do_it_are_refused(load, text, reason):
    assert reason in complaint(load, text)


def test_graphs_are_for_gpus_and_vllm_has_them_unasked(load):
    rollout = load("rollout: {cuda_graphs: true, device: cuda}").rollout
    assert (rollout.graphs, rollout.restarts_for_formats) == (True, False)
    vllm = "rollout: {engine: vllm, device: cuda, dtype: bfloat16"
    for rest, graphs, start in (("}", True, 900), (", cuda_graphs: false}", False, 180)):
        rollout = load(vllm + rest).rollout
        assert (rollout.graphs, rollout.restarts_for_formats, rollout.start_limit_s) == (graphs, True, start)
    assert not load("rollout: {engine: vllm}").rollout.graphs
    assert load("rollout: {start_timeout_s: 7}").rollout.start_limit_s == 7


def test_probes_have_more_tokens_where_rounding_is_noise(load):
    exact, noisy = load("steps: 2"), load("rollout: {dtype: bfloat16, engine: vllm}")
    assert (exact.probe_tokens, exact.probe_tolerance) == (8, 0.2)
    assert (noisy.probe_tokens, noisy.probe_tolerance) == (512, 1.0)
    shared = load("rollout: {engine: vllm, vllm: {tensor_parallel: 2}}")
    assert (shared.probe_tokens, shared.probe_tolerance) == (512, 1.0)
    gpu = load("rollout: {engine: vllm, device: cuda, dtype: bfloat16}")
    assert (gpu.probe_tokens, gpu.probe_tolerance) == (8192, 1.0)
    given = load("sync: {probe_tokens: 0, probe_tolerance: 0.5}")
    assert (given.probe_tokens, given.probe_tolerance) == (0, 0.5)


def test_a_penalty_longer_than_the_answer_is_refused(load):
    message = complaint(load, "rollout: {max_new_tokens: 4}\nalgorithm: {overlong_buffer: 5}")
    assert "algorithm.overlong_buffer exceeds rollout.max_new_tokens" in message


def test_heads_that_do_not_divide_the_width_are_refused(load):
    assert "hidden_size must be a multiple of heads" in complaint(load, "model: {hidden_size: 66}")


@pytest.mark.parametrize(
    "task",
    [
        "{template: Q}",
        "{type: dataset, path: openai/gsm8k, template: Q}",
        "{type: custom, problems: 'a:b', template: ''}",
    ],
)
def test_a_template_without_the_prompt_is_refused(load, task):
    assert "template: must contain {prompt} (got " in complaint(load, f"task: {task}")


# --- where runs go ---------------------------------------------------------------------------------------------


def test_the_output_folder_is_the_setting_then_the_variable_then_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("QURL_RUNS", str(tmp_path / "shared"))
    named = RunConfig(output_dir=Path("~/mine"))
    for submitted in (False, True):
        assert resolve(named, submitted=submitted).output_dir == tmp_path / "home" / "mine"
        assert resolve(RunConfig(), submitted=submitted).output_dir == tmp_path / "shared"
    monkeypatch.delenv("QURL_RUNS")
    assert resolve(RunConfig(), submitted=False).output_dir == tmp_path / "runs"
    assert resolve(RunConfig(), submitted=True).output_dir == tmp_path / "home" / "qurl-runs"


def test_an_empty_variable_counts_as_absent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QURL_RUNS", "")
    assert resolve(RunConfig(), submitted=False).output_dir == tmp_path / "runs"


def test_only_the_output_folder_changes(tmp_path):
    before = RunConfig(output_dir=tmp_path, steps=7)
    assert resolve(before, submitted=False) == before


# --- settings that do nothing ----------------------------------------------------------------------------------


def test_the_defaults_have_an_effect():
    assert idle_settings(RunConfig()) == []


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            "algorithm: {updates_per_rollout: 1}",
            "algorithm.correction.type=acr has the same effect as tis with algorithm.updates_per_rollout=1",
        ),
        ("algorithm: {correction: monitor}", "has no effect on training with algorithm.correction.metrics_only=true"),
        (
            "algorithm: {correction: naive, calibrate_every: 5, updates_per_rollout: 1}",
            "algorithm.calibrate_every=5 only makes the clip bounds four times as wide",
        ),
        (
            "algorithm: {correction: flashrl, objective: gspo, clip_low: 0.2}",
            "algorithm.clip_low=0.2 has no effect with algorithm.objective=gspo",
        ),
        ("algorithm: {correction: flashrl, objective: gspo, clip_high: 0.28}", "remove it: the default is 0.0004"),
        ("algorithm: {correction: flashrl, objective: tbpo, dual_clip: 3}", "algorithm.dual_clip=3.0 has no effect"),
        ("algorithm: {correction: flashrl, objective: cispo, clip_high: 0.2}", "remove it: the default is 4.0"),
        (
            "algorithm: {correction: flashrl, objective: gspo, updates_per_rollout: 1}",
            "algorithm.objective=gspo clips nothing with algorithm.updates_per_rollout=1",
        ),
        (
            "algorithm: {correction: flashrl, dual_clip: 3, updates_per_rollout: 1}",
            "algorithm.dual_clip=3.0 has no effect with algorithm.updates_per_rollout=1",
        ),
        ("algorithm: {kl_in: reward}", "algorithm.kl_in=reward has no effect with algorithm.kl_coef=0"),
        (
            "algorithm: {kl_in: reward, kl_estimator: k2}",
            "algorithm.kl_in=reward and algorithm.kl_estimator=k2 have no effect with algorithm.kl_coef=0",
        ),
        ("algorithm: {kl_coef: 0.1, kl_estimator: k1}", "its gradient has mean zero; choose k2 or k3"),
        (
            "algorithm: {type: ppo, critic: shared, critic_lr: 1.0e-3}",
            "algorithm.critic_lr=0.001 has no effect with algorithm.critic=shared",
        ),
        (
            "algorithm: {type: ppo, critic_coef: 0.5}",
            "algorithm.critic_coef=0.5 has no effect with algorithm.critic=separate",
        ),
        ("learner: {offload_while_waiting: true}", "only costs time with learner.device=cpu"),
        ("learner: {zero_stage: 3}", "learner.zero_stage=3 has no effect with learner.backend=torch"),
        (
            "rollout: {quantization: none}",
            "algorithm.correction.type=acr has almost no effect with full-precision rollouts",
        ),
        (
            "rollout: {quantization: int4}",
            "rollout.quantization=int4 with precision_flow=rollout_only leaves the whole",
        ),
        ("rollout: {quantization: nvfp4}\nprecision_flow: rollout_only", "set precision_flow=unified"),
        ("rollout: {top_p: 0.9}", "rollout.top_p=0.9 truncates the engine's distribution but not the learner's"),
        ("rollout: {top_k: 5}", "rollout.top_k=5 truncates the engine's distribution but not the learner's"),
        ("rollout: {top_p: 0.9, top_k: 5}", "rollout.top_p=0.9 and rollout.top_k=5 truncate the engine's distribution"),
    ],
)
def test_an_idle_setting_is_announced_in_a_sentence(load, settings, sentence):
    (found,) = idle_settings(load(settings))
    assert sentence in found


@pytest.mark.parametrize(
    "settings",
    [
        "algorithm: {updates_per_rollout: 1, correction: {type: tis}}",
        "rollout: {quantization: none}\nalgorithm: {correction: {type: ignore}}",
        "rollout: {quantization: none, max_staleness: 1}",
        "rollout: {quantization: fp8_block, max_staleness: 1}\nprecision_flow: unified",
    ],
)
def test_the_same_setting_elsewhere_is_no_news(load, settings):
    assert idle_settings(load(settings)) == []


@pytest.mark.parametrize("objective", ["ppo", "gspo", "tbpo", "cispo"])
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("algorithm", ["dapo", "grpo", "ppo"])
def test_every_named_correction_comes_back_from_what_a_run_writes(load, algorithm, name, objective):
    overrides = [f"algorithm.objective={objective}", f"algorithm.correction={name}"]
    text = f"algorithm: {{type: {algorithm}, correction: {{type: acr, is_cap: 8}}, clip_low: 0.1, dual_clip: 3}}"
    if name in ("acr", "qurl") and objective != "ppo":
        assert "algorithm.correction=flashrl, or sequence_tis, goes with it" in complaint(load, text, *overrides)
        return
    config = load(text, *overrides)
    assert config.algorithm.correction == PRESETS[name]
    assert RunConfig.model_validate(yaml.safe_load(yaml.safe_dump(config.model_dump(mode="json")))) == config
    # A new objective comes with bounds of its own; the old one's go.
    expected = {"ppo": (0.1, 3), "gspo": (3e-4, None), "tbpo": (3e-4, 1.0007), "cispo": (1.0, None)}
    assert (config.algorithm.clip_low, config.algorithm.dual_clip) == expected[objective]


def test_one_setting_of_a_named_correction_can_be_changed(load):
    config = load("algorithm: {correction: mis}", "algorithm.correction=flashrl", "algorithm.correction.is_cap=8")
    assert config.algorithm.correction == TIS(is_cap=8)


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ("{correction: flash}", "no correction has this name; there are naive, ignore"),
        ("{correction: flashrl, objective: gspoo}", "is neither built in (ppo, gspo, tbpo, cispo)"),
        ("{correction: flashrl, objective: tbpo, dual_clip: null}", "tbpo without dual_clip is gspo"),
        ("{correction: flashrl, objective: cispo, dual_clip: 3}", "set dual_clip to null"),
        ("{correction: flashrl, calibrate_every: 5}", "calibrate_every needs correction=naive"),
        (
            "{correction: {type: naive, metrics_only: true}, calibrate_every: 5}",
            "calibrate_every needs a correction, not just its metrics",
        ),
        (
            "{correction: {type: ignore, ess_floor: 0.5}}",
            "ess_floor has no effect with the corrections naive and ignore, which use no weights",
        ),
        ("{correction: {type: tis, reject_low: 0.5}}", "reject_low has no effect with reject=none"),
        ("{correction: {type: tis, reject_high: 0.5}}", "reject_high has no effect with reject=none"),
        ("{correction: {type: tis, reject: geometric, reject_low: 2}}", "must be below reject_high=1.001"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_sentence(load, algorithm, sentence):
    assert sentence in complaint(load, f"algorithm: {algorithm}")


FLOW = "precision_flow: unified\nrollout: {quantization: fp8_block}\n"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("precision_flow: unified\nrollout: {quantization: none}", "trains through the format of the rollouts"),
        ("precision_flow: unified_int8\nrollout: {quantization: fp8}", "needs rollout.quantization=int8, not fp8"),
        ("quantization: {backward: full}", "is of unified flows: set precision_flow=unified"),
        ("precision_flow: unified\nquantization: {backward: quantized}", "needs the square blocks of"),
        ("precision_flow: unified\nrollout: {kv_cache: fp8}", "needs rollout.kv_cache=full"),
        (FLOW + "sync: {unquantized: bfloat16}", "needs sync.unquantized=auto"),
    ],
)
def test_what_a_unified_flow_cannot_have_is_refused(load, settings, sentence):
    assert sentence in complaint(load, settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("algorithm: {correction: ignore}", "they need a correction"),
        ("algorithm: {correction: monitor}", "they need a correction"),
        ("learner: {offload_while_waiting: true}", "they cannot share a GPU"),
    ],
)
def test_what_rollouts_that_run_ahead_cannot_have_is_refused(load, settings, sentence):
    assert sentence in complaint(load, settings + "\nrollout: {max_staleness: 1}")


COLOCATED = [
    "placement=colocated",
    *ON_GPUS,
    "learner.workers=8",
    "rollout.workers=4",
    "rollout.vllm.tensor_parallel=2",
]


def test_colocated_learners_make_room_unless_they_are_told_not_to():
    assert load_config(None, COLOCATED).learner.offload_while_waiting
    assert load_config(None, ["placement=colocated"]).learner.offload_while_waiting
    assert not load_config(None, [*COLOCATED, "learner.offload_while_waiting=false"]).learner.offload_while_waiting
    assert not load_config(None, ON_GPUS).learner.offload_while_waiting


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("rollout.quantization=none", "certifies a format, and rollout.quantization=none has none: set it to 0"),
        ("rollout.max_staleness=1", "with rollout.max_staleness=1 they would draw answers of the next steps with"),
        ("learner.lora={}", "learner.lora.base=codes has no policy in full precision to compare with"),
        ("evaluation.certificate.reward_range=[1, 1]", "reward_range is [least, largest], and 1 is not below 1"),
    ],
)
def test_what_a_certificate_cannot_have_is_refused_in_one_line(override, sentence):
    given = ["evaluation.certificate.every=20", "algorithm.correction=tis"]
    with pytest.raises(ConfigError, match=re.escape(sentence)) as caught:
        load_config(None, [*given, override])
    assert "\n" not in str(caught.value)


def test_a_certificate_of_engines_that_restart_for_a_format_is_refused():
    gpu = ["rollout.engine=vllm", "rollout.device=cuda", "rollout.dtype=bfloat16", "learner.device=cuda"]
    with pytest.raises(ConfigError, match="vllm on CUDA must restart for full precision, which takes minutes"):
        load_config(None, ["evaluation.certificate.every=20", *gpu])


def test_a_guard_of_certificates_needs_some():
    with pytest.raises(
        ConfigError, match=r"guard\.cost_max is compared with certificates: set evaluation\.certificate"
    ):
        load_config(None, ["guard.cost_max=0.1"])
    assert load_config(None, ["guard.cost_max=0.1", "evaluation.certificate={every: 5}"]).guard.cost_max == 0.1


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("rollout.max_staleness=1", "has engines and learner take turns, and rollout.max_staleness=1 has them work"),
        ("rollout.device=cpu", "rollout.device=cpu and learner.device=cuda must be the same"),
        (
            "rollout.workers=8",
            "rollout.workers=8 of rollout.vllm.tensor_parallel=2 GPUs need learner.workers=16, not 8",
        ),
        ("rollout.vllm.tensor_parallel=3", "need learner.workers=12, not 8"),
        ("rollout.max_workers=5", "no room for more engines than ranks"),
        ("rollout.vllm.kv_cache_gb=null", "engine=vllm would otherwise take the learner's memory"),
        ("sync.transport=nccl", "two processes on one GPU, which NCCL refuses: use sync.transport=ipc"),
        ("placement=together", "placement"),
    ],
)
def test_what_takes_turns_cannot_have_is_refused(override, reason):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [*COLOCATED, override])
    assert reason in str(caught.value)


def test_vllm_cannot_take_turns_on_a_cpu(load):
    assert "engine=vllm cannot do that on a CPU" in complaint(load, "placement: colocated\nrollout: {engine: vllm}")


def test_a_fleet_cannot_grow_to_fewer_workers(load):
    assert "max_workers (1) is below workers (2)" in complaint(load, "rollout: {workers: 2, max_workers: 1}")


@pytest.mark.parametrize(
    ("settings", "backward"),
    [
        (FLOW, "quantized"),
        (FLOW + "quantization: {backward: full}", "full"),
        ("precision_flow: unified_int8", "straight_through"),
        ("precision_flow: unified\nrollout: {quantization: int4}", "straight_through"),
        ("rollout: {quantization: nvfp4}", "straight_through"),
    ],
)
def test_a_format_has_its_backward(load, settings, backward):
    assert load(settings).backward() == backward
    assert load(settings + "\nalgorithm: {correction: flashrl, calibrate_every: 5}").algorithm.calibrate_every == 5


@pytest.mark.parametrize(
    ("settings", "flow"),
    [
        ("rollout: {quantization: mxfp4}", "unified"),
        ("rollout: {quantization: nvfp4_w4a4}", "unified"),
        ("rollout: {quantization: mxfp4}\nprecision_flow: rollout_only", "rollout_only"),
        ("rollout: {quantization: mxfp4}\nlearner: {lora: {rank: 4}}", "rollout_only"),
        ("rollout: {quantization: mxfp8}", "rollout_only"),
        ("rollout: {quantization: int4}", "rollout_only"),  # as before these two
    ],
)
def test_floats_of_4_bits_train_through_their_codes(load, settings, flow):
    assert load(settings).precision_flow == flow


def test_another_type_drops_the_settings_of_the_old_one(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("algorithm: {correction: {type: acr, is_cap: 3}, clip_high: 0.3}\ntask: {operators: '+-'}\n")
    changed = load_config(
        path, ["algorithm.correction.type=ignore", "task.type=reasoning_gym", "task.dataset=chain_sum"]
    )
    assert changed.algorithm.correction.type == "ignore"
    assert changed.algorithm.clip_high == 0.3
    assert changed.task.dataset == "chain_sum"
    assert load_config(path, ["algorithm.correction.type=acr"]).algorithm.correction.is_cap == 3


def test_a_setting_of_another_type_is_called_that():
    with pytest.raises(ConfigError, match=r"is a setting of model\.type=tiny; see --help model\.hidden_size"):
        load_config(None, ["model.type=pretrained", "model.path=x", "model.hidden_size=64"])


def test_head_sizes_that_no_kernel_takes_are_refused():
    with pytest.raises(ConfigError, match=r"model: hidden_size / heads must be 32, 64, 96 or 128, not 25"):
        load_config(None, ["model.hidden_size=100"])


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("task.images=true", "images are not supported"),
    ],
)
def test_what_is_not_supported_says_so_and_not_only_that_the_key_is_unknown(override, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_config(None, [override])


@pytest.mark.parametrize("override", ["rollout.multi_turn=true", "task.tools=[]"])
def test_several_turns_and_tools_are_found_under_environment(override):
    with pytest.raises(ConfigError, match=r"settings of environment.*docs/agents\.md"):
        load_config(None, [override])


def test_offloading_the_optimizer_needs_shards():
    with pytest.raises(ConfigError, match="needs backend=deepspeed"):
        load_config(None, ["learner.offload_optimizer=true"])
    assert load_config(None, ["learner.offload_optimizer=true", "learner.backend=deepspeed"])


def test_a_target_needs_evaluations_on_the_way():
    with pytest.raises(ConfigError, match=r"evaluation\.target_reward=0\.9 is looked at every evaluation\.every steps"):
        load_config(None, ["evaluation.target_reward=0.9"])
    assert load_config(None, ["evaluation.target_reward=0.9", "evaluation.every=5"]).evaluation.target_reward == 0.9
    quickstart = Path("qurl_ray/configs/quickstart.yaml")
    assert load_config(quickstart, ["evaluation.target_reward=null"]).evaluation.target_reward is None


@pytest.mark.parametrize("where", ["s3://bucket/runs", "gs://bucket", "s3:/bucket", "s3:bucket/x"])
def test_a_url_is_no_folder_of_runs(where, monkeypatch):
    with pytest.raises(ConfigError, match="is a URL: give a folder"):
        resolve(RunConfig(output_dir=Path(where)), submitted=False)
    monkeypatch.setenv("QURL_RUNS", where)
    with pytest.raises(ConfigError, match="is a URL: give a folder"):
        resolve(RunConfig(), submitted=True)


# --- names of other frameworks, text, short forms ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "unknown", "here"),
    [
        ("learning_rate: 1", "learning_rate", "learner.lr"),
        ("learner: {learning_rate: 1}", "learner.learning_rate", "learner.lr"),
        ("rollout: {n: 8}", "rollout.n", "rollout.samples_per_prompt"),
        ("algorithm: {beta: 0.1}", "algorithm.beta", "algorithm.kl_coef"),
        ("train_batch_size: 8", "train_batch_size", "rollout.prompts_per_step"),
        ("save-freq: 8", "save-freq", "checkpoint.every"),
    ],
)
def test_a_name_of_another_framework_is_translated(load, text, unknown, here):
    assert complaint(load, text).endswith(f"unknown key {unknown!r}; it is called {here!r} here (--help {here})")


def test_sections_of_another_framework_are_translated(load):
    for key, here in (
        ("actor_rollout_ref.rollout.n", "rollout.samples_per_prompt"),
        ("data.train_batch_size", "rollout.prompts_per_step"),
        ("trainer.total_training_steps", "steps"),
    ):
        assert complaint(load, "{}", f"{key}=8").endswith(
            f"unknown key {key!r}; it is called {here!r} here (--help {here})"
        )
    assert "no second pass" in complaint(load, "{}", "ppo_epochs=2")


def test_parameters_of_a_function_are_no_sections_of_ours(load):
    given = "task: {type: custom, problems: tests.config.test_load:problems, params: {n: 5, type: easy}}"
    params = load(given, "task.params.model=judge-7b", "task.params.type=hard").task.params
    assert params == {"n": 5, "type": "hard", "model": "judge-7b"}


def problems(n, model, type):
    return []


def test_names_of_other_frameworks_lead_to_the_settings_of_adapters(load):
    for key in ("lora_rank", "use_peft", "model.lora_alpha"):
        assert "adapters are settings of learner.lora" in complaint(load, "{}", f"{key}=8")


def test_names_of_other_frameworks_lead_to_settings_and_hide_none():
    keys = {row[0].split(".type=")[0] for row in describe()} | {"algorithm.type"}
    assert set(ELSEWHERE) <= keys
    names = [other for others in ELSEWHERE.values() for other in others]
    assert len(names) == len(set(names))


def test_the_page_on_migrating_has_the_names_that_errors_know():
    page = (ROOT / "docs" / "migrating.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
    for here, *others in rows:
        keys = set(re.findall(r"`([a-z_.]+)", here))
        for cell in others:  # quotients are other figures than their parts
            for name in [] if " / " in cell else re.findall(r"`(?:--)?([a-z_.]+)`", cell):
                known = SAME.get(name.rpartition(".")[2])
                assert known is None or known in keys, (name, keys)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("task.template={prompt}", "{prompt}"),
        ("task.template=Q: {prompt}", "Q: {prompt}"),
        ("task.template='{prompt} '", "{prompt} "),
        ("task.template=[{prompt}]", "[{prompt}]"),
        ("task.template=- {prompt}: x", "- {prompt}: x"),
        ("task.template=@{prompt}", "@{prompt}"),
    ],
)
def test_a_setting_that_is_text_takes_it_as_it_is(load, override, value):
    assert load("{}", override).task.template == value


def test_numbers_and_null_are_text_where_text_is_wanted(load):
    assert load("{}", "name=7").name == "7"
    assert load("{}", "task.reward=null").task.reward is None
    assert load("{}", "model.type=pretrained", "model.path=123").model.path == "123"
    assert "NUL" in complaint(load, "{}", "task.template={prompt}\0")


@pytest.mark.parametrize("name", ["acr", "tis", "naive"])
def test_the_name_of_a_correction_is_short_for_its_type(load, name):
    assert load("{}", f"algorithm.correction={name}").algorithm.correction.type == name
    capped = load("{}", "algorithm.correction=tis", "algorithm.correction.is_cap=3").algorithm.correction
    assert (capped.type, capped.is_cap) == ("tis", 3)


def test_the_name_of_a_type_is_short_for_its_section(load):
    assert load("algorithm: grpo").algorithm.type == "grpo"
    short = load("algorithm: {type: dapo, max_refill_rounds: 3}", "algorithm=grpo", "algorithm.clip_low=0.1").algorithm
    assert (short.type, short.clip_low, short.max_refill_rounds) == ("grpo", 0.1, 10)
    assert "expected tags" in complaint(load, "{}", "algorithm=gropo")


def test_a_value_in_place_of_a_section_is_told(load):
    message = complaint(load, "rollout: int8")
    told = "rollout: give rollout.<setting>=… (--help rollout lists them): it is a section, not a value (got 'int8')"
    assert message.endswith(told)


def test_a_name_is_that_of_a_file_of_the_package_unless_there_is_one_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(Path("quickstart")).name == "quickstart"
    Path("quickstart").write_text("name: mine")
    assert load_config(Path("quickstart")).name == "mine"
    with pytest.raises(ConfigError, match=r"quikstart does not exist; did you mean quickstart\?"):
        load_config(Path("quikstart"))


# --- schedules of the learning rate --------------------------------------------------------------------------------


def rates(total=11, **fields):
    learner = LearnerConfig(**fields)
    return [round(learner.rate(done, total), 4) for done in range(total)]


def test_schedules_of_the_learning_rate():
    assert rates() == [1.0] * 11
    assert rates(schedule="linear") == [round(1 - n / 10, 4) for n in range(11)]
    assert rates(lr_final_share=0.5) == [round(1 - n / 20, 4) for n in range(11)]
    assert rates(schedule="cosine", lr_final_share=0.1)[::5] == [1.0, 0.55, 0.1]
    assert rates(schedule="wsd", decay_share=0.2) == [1.0] * 9 + [0.5, 0.0]
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert LearnerConfig(schedule="linear").rate(99, 10) == 0.0  # beyond the end


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "constant", "lr_final_share": 0.1}, "keeps the rate"),
        ({"schedule": "cosine", "lr_final_share": 1.0}, "never falls"),
        ({"optimizer": "muon", "backend": "deepspeed"}, "whole matrices"),
        ({"optimizer": "muon", "backend": "fsdp"}, "backend=fsdp divides"),
        ({"compute": "float16", "backend": "deepspeed"}, "scales losses"),
        ({"workers": 3, "sequence_parallel": 2}, "no multiple of sequence_parallel=2"),
        ({"optimizer": "adamw_8bit", "device": "cuda", "backend": "fsdp"}, "divided by rows"),
        ({"offload_optimizer": True, "backend": "fsdp"}, "needs backend=deepspeed"),
        ({"optimizer": "adamw_8bit"}, "computes on GPUs"),
        (
            {"optimizer": "adamw_8bit", "device": "cuda", "backend": "deepspeed", "offload_optimizer": True},
            "cannot move",
        ),
    ],
)
def test_learners_that_contradict_themselves(fields, message):
    with pytest.raises(ValueError, match=message):
        LearnerConfig(**fields)


def test_rates_so_far_depend_on_the_number_of_updates_only_once_they_fall():
    assert LearnerConfig().same_rates(50, 100, 200)
    assert not LearnerConfig(schedule="linear").same_rates(1 + 1, 100, 200)
    wsd = LearnerConfig(schedule="wsd", decay_share=0.1, warmup_steps=5)
    assert wsd.same_rates(90, 100, 200)
    assert not wsd.same_rates(92, 100, 200)
    for done in (1, 50, 90):
        assert [wsd.rate(n, 100) for n in range(done)] == [wsd.rate(n, 200) for n in range(done)]


# --- credit of turns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "whole"),
    [
        ("{turn_credit: turn}", "trajectory"),
        ("{type: grpo, turn_credit: spread}", "trajectory"),
        ("{type: ppo, turn_credit: turn}", "token"),
    ],
)
def test_credit_of_turns_needs_an_environment(load, algorithm, whole):
    text = f"algorithm: {algorithm}"
    message = complaint(load, text)
    assert "has no effect without environment.type" in message
    assert f"or turn_credit to {whole}" in message
    environment = "\nenvironment: {type: calculator}\nmodel: {calculator: true}"
    assert load(text + environment).algorithm.turn_credit != whole
    assert load(text, f"algorithm.turn_credit={whole}").algorithm.turn_credit == whole


@pytest.mark.parametrize(
    ("algorithm", "allowed"),
    [
        ("dapo", "'trajectory', 'turn' or 'spread'"),
        ("grpo", "'trajectory', 'turn' or 'spread'"),
        ("ppo", "'token' or 'turn'"),
    ],
)
def test_a_kind_of_credit_is_one_of_its_algorithm(load, algorithm, allowed):
    assert allowed in complaint(load, f"algorithm: {{type: {algorithm}, turn_credit: step}}")


@pytest.mark.parametrize("objective", ["ppo", "gspo", "tbpo", "cispo"])
def test_every_objective_takes_credit_of_turns(load, objective):
    text = f"algorithm: {{correction: flashrl, objective: {objective}, turn_credit: turn}}"
    config = load(text + "\nenvironment: {type: calculator}\nmodel: {calculator: true}")
    assert (config.algorithm.objective, config.algorithm.turn_credit) == (objective, "turn")


@pytest.mark.parametrize(
    ("settings", "full", "evaluated"),
    [
        ((), True, "int8"),
        (("rollout.quantization=fp8_block",), True, "fp8_block"),
        (("rollout.quantization=fp8_block", "export.quantized=int8"), True, "int8"),
        (("rollout.quantization=none",), True, "none"),
        (("rollout.engine=vllm", "rollout.dtype=bfloat16", "rollout.device=cuda"), False, "int8"),
        (
            ("rollout.engine=vllm", "rollout.dtype=bfloat16", "rollout.device=cuda", "export.quantized=fp8"),
            False,
            "int8",
        ),
        (
            ("rollout.engine=vllm", "rollout.dtype=bfloat16", "rollout.device=cuda", "evaluation.full_precision=true"),
            True,
            "int8",
        ),
        (("evaluation.full_precision=false", "export.quantized=fp8"), False, "int8"),
    ],
)
def test_evaluations_never_restart_an_engine_unless_that_is_asked_for(settings, full, evaluated):
    config = load_config(None, settings)
    assert (config.evaluates_full_precision, config.evaluated_format) == (full, evaluated)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_an_engine_that_holds_one_format_at_a_time_starts_once_in_a_run_of_any_preset(path):
    """Else it would start for the first weights, for an evaluation, and for the rollouts again: minutes each."""
    config = load_config(path)
    if config.rollout.restarts_for_formats:
        first = "none" if config.evaluates_full_precision else config.rollout.quantization
        assert {first, config.rollout.quantization, config.evaluated_format} == {config.rollout.quantization}
