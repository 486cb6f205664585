import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from qurl_ray import planning
from qurl_ray.config import RunConfig
from qurl_ray.config.load import load_config
from qurl_ray.errors import ConfigError
from qurl_ray.planning.__main__ import app
from qurl_ray.planning.machines import GPUS, PRECISIONS
from qurl_ray.planning.memory import check_layout
from qurl_ray.planning.plan import PAYS, RESOLVED_S, make_plan, search, widths
from qurl_ray.planning.report import recommended, verdict
from qurl_ray.planning.shapes import SHAPES, configured_shape
from qurl_ray.planning.speed import EngineRoofline, learn_s
from qurl_ray.planning.workload import Workload, configured_workload, gpus_of

CONFIGS = Path(__file__).parents[2] / "qurl_ray" / "configs"
H100 = GPUS["h100"]

# --- the search ----------------------------------------------------------------------------------


def seconds_of(model, gpus, work):
    """Of the best step in INT8; infinite where nothing fits."""
    found = search(SHAPES[model], H100, gpus, work, "int8", widths(SHAPES[model], gpus), ["object_store"])
    return found.step if found else float("inf")


workloads = st.builds(
    Workload,
    prompts=st.integers(4, 100),
    samples=st.integers(1, 16),
    response=st.integers(64, 8192),
    updates=st.integers(1, 4),
    kept=st.sampled_from([1.0, 0.4]),
    staleness=st.integers(0, 1),
)


@settings(max_examples=20, deadline=None)
@given(workloads, st.sampled_from(["Qwen2.5-0.5B", "Qwen3-8B"]), st.integers(2, 20), st.integers(1, 12))
def test_more_gpus_never_make_a_step_slower(work, model, gpus, more):
    # But for a sync, in which more ranks gather a larger part of each tensor from others.
    assert seconds_of(model, gpus + more, work) <= seconds_of(model, gpus, work) * 1.01


@settings(max_examples=15, deadline=None)
@given(workloads, st.sampled_from(["SmolLM2-135M", "Qwen2.5-7B"]), st.sampled_from(["a100", "h100", "b200"]))
def test_a_format_is_chosen_only_if_it_pays(work, model, gpu):
    try:
        plan = make_plan(SHAPES[model], GPUS[gpu], 8, work)
    except ConfigError:
        return
    base = plan.best["bf16"]
    if base is None or base.overlapped:
        return
    assert plan.chosen == "bf16" or plan.gain(plan.chosen) >= PAYS


def test_turns_or_beside_each_other():
    work = Workload(prompts=64, response=4096)
    turns = make_plan(SHAPES["Qwen2.5-7B"], H100, 8, work).best["bf16"]
    assert turns.layout.placement == "colocated"
    assert turns.layout.engines * turns.layout.tensor_parallel == turns.layout.ranks
    assert turns.step == pytest.approx(turns.rollout + turns.learn + turns.sync + turns.turns)
    ahead = make_plan(SHAPES["Qwen2.5-7B"], H100, 8, Workload(prompts=64, response=4096, staleness=1)).best["bf16"]
    assert ahead.layout.placement == "disaggregated"
    assert ahead.step == pytest.approx(max(ahead.rollout, ahead.learn) + ahead.sync)
    assert ahead.layout.gpus == 8


def test_ten_thousand_gpus_are_planned():
    plan = make_plan(SHAPES["Qwen2.5-7B"], H100, 10_000, Workload(prompts=4096, samples=16))
    assert plan.best["fp8"].layout.gpus <= 10_000


@pytest.mark.parametrize(
    ("gpus", "width", "work", "says"),
    [
        (0, None, {}, "0 GPUs"),
        (20_000, None, {}, "1 to 10,000"),
        (1, None, {"staleness": 1}, "needs 2 GPUs"),
        (8, 3, {}, r"an engine of 3 GPUs.*\[1, 2, 4\]"),
        (1, None, {}, "does not fit"),
    ],
)
def test_what_cannot_be_is_refused(gpus, width, work, says):
    with pytest.raises(ConfigError, match=says):
        make_plan(SHAPES["Qwen2.5-7B"], H100, gpus, Workload(**work), width)


# --- whether it pays -----------------------------------------------------------------------------


def verdict_of(options):
    result = CliRunner().invoke(app, options.split())
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_short_answers_of_a_large_model_pay():
    said = verdict_of("--model Qwen2.5-14B --gpus 32 --response-length 2048 --prompts 64 --updates 1")
    assert "Quantization pays" in said
    assert "reads and multiplies weights" in said


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--model Qwen3-1.7B --response-length 32768 --mean-length 20000", "reads keys and values"),
        ("--model SmolLM2-135M --gpus 1 --response-length 512 --transport ipc", "launches, sampling"),
        (
            "--model Qwen2.5-0.5B --prompts 256 --samples 1 --response-length 512 --transport ipc",
            "launches, sampling",
        ),
    ],
)
def test_where_it_does_not_pay_the_reason_is_named(options, why):
    said = verdict_of(options)
    assert "Quantization does not pay here" in said
    assert why in said


def test_a_step_that_syncs_faster_is_a_reason():
    said = verdict_of("--model Qwen2.5-0.5B --prompts 256 --samples 1 --response-length 512 --transport object_store")
    assert re.search(r"Quantization pays.*syncs \d\.\d → \d\.\d s", said)


def test_a_step_too_short_for_the_model_is_not_judged():
    said = verdict_of("--config quickstart")
    assert "Quantization is not judged: a step of 0.035 s" in said
    assert "Recommended" not in said
    assert "◀" not in said
    assert "×" not in said.split("updates", 1)[1].split("Quantization")[0].replace("× 1 GPU", "")
    found = json.loads(CliRunner().invoke(app, ["--config", "quickstart", "--json"]).output)
    assert found["formats"]["bf16"]["step_s"] < RESOLVED_S
    assert (found["recommended"], found["quantization_pays"], found["settings"]) == (None, None, [])


def test_where_bf16_fits_nowhere_that_is_the_reason():
    plan = make_plan(SHAPES["Qwen2.5-7B"], H100, 8, Workload())
    said = verdict(replace(plan, best=plan.best | {"bf16": None}))
    assert said == "Quantization pays: in bf16 nothing fits on these GPUs, in fp8 it does."


# --- what can start ------------------------------------------------------------------------------

PRESETS = sorted(path for path in CONFIGS.glob("*.yaml") if load_config(path).rollout.device == "cuda")


def checked(path, *settings, model=None):
    config = load_config(path, list(settings))
    shape = SHAPES[model] if model else configured_shape(config.model)
    return check_layout(shape, H100, configured_workload(config), config)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_presets_for_gpus_can_start(path):
    found = checked(path)
    assert found.problems == []
    assert max(found.gpu.values()) < 0.9 * 85.5e9


@pytest.mark.parametrize(
    ("settings", "model", "says"),
    [
        ((), "Qwen2.5-32B", "start takes 13"),  # 131 GB of whole model on every rank
        (("learner.zero_stage=1",), None, "learn takes"),
        (("rollout.vllm.kv_cache_gb=60",), None, "sync takes"),
        (("rollout.vllm.kv_cache_gb=0.3",), None, "no room for one answer"),
        ((), "Qwen2.5-72B", "hosts need"),
    ],
)
def test_a_layout_that_cannot_start_says_why(settings, model, says):
    assert any(says in problem for problem in checked(CONFIGS / "dapo_7b_math.yaml", *settings, model=model).problems)


@pytest.mark.parametrize(
    "preset",
    [
        "dapo_7b_math",
        "deepscaler_grpo",
        "gsm8k_ppo",
        "jet_rl_qwen3_8b",
        "olmoe_7b_1b",
        "qwen3_30b_a3b",
        "qwen3_8b_1node",
    ],
)
def test_what_is_recommended_can_start(preset):
    path = CONFIGS / f"{preset}.yaml"
    found = json.loads(CliRunner().invoke(app, ["--config", str(path), "--json"]).output)
    assert checked(path, *found["settings"]).problems == []
    assert found["check"]["problems"] == []


def test_room_is_left_for_a_restart_in_full_precision():
    config = CONFIGS / "dapo_7b_math.yaml"
    quantized, full = checked(config), checked(config, "rollout.quantization=none", "quantization.uaq_scale=1")
    assert quantized == full  # the engine of an evaluation holds bf16


def test_32b_on_16_gpus_is_planned_with_ranks_that_read_their_shares():
    plan = make_plan(SHAPES["Qwen2.5-32B"], H100, 16, Workload())
    assert {estimate.layout.stage for estimate in plan.best.values() if estimate} == {"fsdp"}


FITS_NOWHERE = (
    r"does not fit on 8 × h100 in any format\. .* (\d) rank\(s\) to a sequence: learn takes (\d+\.\d) GB of a GPU, and "
    r"(\d+\.\d) can be planned with: learner (\d+\.\d) \+ CUDA (\d+\.\d) \+ sleeping engine (\d+\.\d) \+ activations "
    r"(\d+\.\d)"
)


def test_where_nothing_fits_the_one_limit_is_named_with_its_arithmetic():
    with pytest.raises(ConfigError) as caught:
        make_plan(SHAPES["Qwen2.5-72B"], H100, 8, Workload(), fixed=set())
    total, limit, *parts = map(float, re.search(FITS_NOWHERE, str(caught.value)).groups()[1:])
    assert sum(parts) == pytest.approx(total, abs=0.2)
    assert total > limit
    assert ("shorter answers" in str(caught.value)) == (total - parts[-1] < limit)


def test_an_engine_without_room_says_what_is_beside_it():
    """7B on one H200: a learner that cannot leave the GPU holds 16 bytes of each parameter, and the engine two."""
    with pytest.raises(ConfigError) as caught:
        make_plan(SHAPES["Qwen2.5-7B"], GPUS["h200"], 1, Workload(), fixed=set())
    said = re.search(
        r"keys and values take (\d+\.\d) GB of a GPU, and of (\d+\.\d) are left (-?\d+\.\d) beside "
        r"learner (\d+\.\d) \+ CUDA (\d+\.\d) \+ engine (\d+\.\d)\.",
        str(caught.value),
    )
    answer, limit, left, learner, cuda, engine = map(float, said.groups())
    assert left < answer
    assert limit - learner - cuda - engine == pytest.approx(left, abs=0.2)
    assert engine == pytest.approx((2 * SHAPES["Qwen2.5-7B"].params + 4.6e9) / 1e9, abs=0.05)


def test_answers_too_long_for_one_rank_are_shared_by_several():
    """32B on 16 GPUs with answers of 16K tokens, the layout of the preset dapo_32b."""
    asked = "--model Qwen2.5-32B --gpus 16 --response-length 16384"
    with pytest.raises(ConfigError, match=r"with 1 rank\(s\) to a sequence"):
        make_plan(SHAPES["Qwen2.5-32B"], H100, 16, Workload(response=16384))
    settings = json.loads(CliRunner().invoke(app, [*asked.split(), "--json"]).output)["settings"]
    assert {"placement=colocated", "learner.backend=fsdp", "learner.sequence_parallel=2"} <= set(settings)
    config = CONFIGS / "dapo_32b.yaml"
    assert checked(config, *settings, "rollout.max_new_tokens=16384", "model.max_length=17408").problems == []


@pytest.mark.parametrize(("fixed", "transport"), [(set(), "ipc"), ({"transport"}, "object_store")])
def test_the_transport_is_chosen_before_it_is_said_whether_quantization_pays(fixed, transport):
    plan = make_plan(SHAPES["Qwen3-8B"], H100, 8, Workload(response=16384), fixed=fixed)
    assert {estimate.work.transport for estimate in plan.best.values()} == {transport}
    assert ("sync.transport=ipc" in recommended(plan)) == (transport == "ipc")
    assert (plan.best["bf16"].sync < 5) == (transport == "ipc")


def test_the_transport_of_a_plan_is_the_best_unless_it_is_named():
    options = "--model Qwen2.5-7B --response-length 2048 --json"
    found = json.loads(CliRunner().invoke(app, options.split()).output)
    for values in found["formats"].values():
        assert values["sync_s"] == min(values["sync"]["seconds"].values())
    assert not {"transport", "micro_tokens", "sequence_parallel"} & set(found["work"])
    assert "the best if absent" in " ".join(CliRunner().invoke(app, ["--help"]).output.split())


# --- the command ---------------------------------------------------------------------------------


def test_json_has_what_the_table_has():
    result = CliRunner().invoke(
        app, ["--model", "Qwen/Qwen2.5-7B", "--gpus", "8", "--response-length", "8192", "--json"]
    )
    found = json.loads(result.output)
    assert (found["model"], found["gpus"], found["work"]["mean"]) == ("Qwen2.5-7B", 8, 2048)
    assert set(found["formats"]) == set(PRECISIONS)
    assert found["quantization_pays"] == (found["recommended"] != "bf16")
    int8 = found["formats"]["int8"]
    assert int8["weights_bytes_per_gpu"] * int8["tensor_parallel"] == pytest.approx(8.71e9, rel=0.01)


def test_formats_without_a_kernel_are_planned_on_request_and_never_recommended():
    options = ["--model", "Qwen2.5-7B", "--gpu", "h200", "--gpus", "8", "--formats", "int4,NVFP4"]
    found = json.loads(CliRunner().invoke(app, [*options, "--json"]).output)
    assert list(found["formats"]) == [*PRECISIONS, "int4", "nvfp4"]
    held = {name: values["weights_bytes_per_gpu"] for name, values in found["formats"].items()}
    assert held["int4"] < held["nvfp4"] < held["int8"]
    assert found["formats"]["int4"]["rollout_gain"] > found["formats"]["fp8"]["rollout_gain"]
    assert found["recommended"] in PRECISIONS
    page = CliRunner().invoke(app, options).output
    assert "int4, nvfp4: with a kernel, which this package does not have" in " ".join(page.split())
    refused = CliRunner().invoke(app, [*options[:-1], "int3"])
    assert refused.exit_code == 2
    assert "format 'int3': a plan compares bf16, int8, fp8, and can add int4, nvfp4, mxfp4, mxfp8" in refused.stderr


def test_what_is_recommended_is_a_run():
    path = CONFIGS / "dapo_7b_math.yaml"
    found = json.loads(CliRunner().invoke(app, ["--config", str(path), "--gpus", "16", "--json"]).output)
    config = load_config(path, found["settings"])
    assert (config.placement, config.rollout.quantization) == ("colocated", found["recommended"])
    assert config.learner.workers == config.rollout.workers * config.rollout.vllm.tensor_parallel == 16


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_has_a_plan(path):
    result = CliRunner().invoke(app, ["--config", str(path)])
    assert result.exit_code == 0, result.output
    assert "Quantization" in result.output
    assert ("layout can start" in result.output) == (path in PRESETS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_speedup_names_its_source_and_every_figure_of_a_gpu_is_marked(path):
    said = CliRunner().invoke(app, ["--config", str(path)]).output
    rows, text = said.split("\n\n", 1)
    for line in rows.splitlines():
        if "×" in line and "gain" in line:
            assert re.search(r"\[(S|S, T)\]\*", line), line
        if re.search(r", s\b|tokens/s|KV|start /|object store|ipc", line):
            assert "*" in line, line
    verdict, legend = " ".join(text.split()).split("* Computed", 1)
    for speedup in re.finditer(r"\d\.\d+×", verdict):
        after = verdict[speedup.end() :]
        assert re.match(r" \[(S|T|S, T)\]\*", after) or speedup[0] == "1.05×", speedup.group() + after[:20]
    assert "Nothing was measured with this model on this GPU" in legend
    assert "silybench" in legend
    assert "torchtitan" in legend


SPEED = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_h200_speed.json").read_text())
"""What an H200 measured."""


@pytest.mark.parametrize(("precision", "measured"), [("bf16", "none"), ("int8", "int8"), ("fp8", "fp8")])
def test_decode_steps_that_an_h200_measured_are_taken(precision, measured):
    for model in ("Qwen2.5-7B", "Qwen2.5-Math-7B"):  # of the same shape
        engine = EngineRoofline(shape=SHAPES[model], gpu=GPUS["h200"], precision=precision)
        for batch, row in SPEED["vllm"][f"Qwen2.5-7B, graphs, {measured}"]["batches"].items():
            assert 1e3 * engine.decode_s(int(batch), 512) == pytest.approx(row["ms"], rel=1e-3)
        between = (1e3 * engine.decode_s(32, 512) + 1e3 * engine.decode_s(128, 512)) / 2
        assert 1e3 * engine.decode_s(80, 512) == pytest.approx(between)
        longer = 32 * 1000 * 2 * 28 * 4 * 128 * 2 / (4.8e12 * 0.88)  # keys and values of a thousand tokens more
        assert engine.decode_s(32, 1512) - engine.decode_s(32, 512) == pytest.approx(longer)
        steps = [engine.decode_s(batch, 512) for batch in range(1, 600, 7)]
        assert steps == sorted(steps)


def test_the_learners_step_is_what_an_h200_measured():
    work = Workload(prompts=8, samples=1, prompt=256, response=768, mean=768.0, updates=1, checkpointing=False)
    found = SPEED["step"]["Qwen2.5-7B, packed"]["extrapolated_seconds"]
    for fp8, name in ((False, "bfloat16"), (True, "fp8_block")):
        learned = learn_s(SHAPES["Qwen2.5-7B"], GPUS["h200"], work, ranks=1, stage=0, fp8=fp8)
        assert learned == pytest.approx(found[name], rel=1e-3)


@pytest.mark.parametrize("more", ["", "--tensor-parallel 2"])
def test_a_plan_for_an_h200_names_the_card_that_measured(more):
    said = verdict_of(f"--model Qwen2.5-7B --gpu h200 --fp8-learner {more}")
    assert "one NVIDIA H200 measured with this package on 2026-11-27" in said
    assert "bf16 4.71, 5.08, 7.99, 15.80" in said
    assert "learner, s [H200]*" in said
    assert "tokens/s drawn [H200]*" in said
    options = ["--model", "Qwen2.5-7B", "--gpu", "h200", "--json"]
    assert json.loads(CliRunner().invoke(app, options).output)["measured"]["decode_ms"]["fp8"][-1] == 13.799


@pytest.mark.parametrize(
    "options", ["--model Qwen2.5-7B --gpu h100", "--model Qwen3-8B --gpu h200", "--model Qwen2.5-14B --gpu h200"]
)
def test_no_other_plan_claims_to_be_measured(options):
    said = verdict_of(options)
    assert "[H200" not in said
    assert "Nothing was measured with this model on this GPU" in said


def test_a_config_gives_its_own_step_and_options_come_on_top():
    config = load_config(CONFIGS / "dapo_7b_math.yaml")
    work = configured_workload(config)
    assert (work.prompts, work.samples, work.response, work.updates) == (512, 16, 8192, 16)
    assert gpus_of(config) == 8
    assert gpus_of(RunConfig()) == 2
    result = CliRunner().invoke(
        app, ["--config", str(CONFIGS / "dapo_7b_math.yaml"), "--gpus", "64", "--mean-length", "4000", "--json"]
    )
    found = json.loads(result.output)
    assert (found["gpus"], found["work"]["mean"], found["work"]["prompts"]) == (64, 4000, 512)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--model Qwen/Qwen2.5-6B", "near it: Qwen2.5-"),
        ("--model Qwen2.5-7B --gpu h10", "did you mean 'h100'"),
        ("--model Qwen2.5-7B --gpus -3", "-3 GPUs"),
        ("--model Qwen2.5-7B --response-length 0", "response is 0"),
        ("--model Qwen2.5-7B --mean-length 9999", "between 1 and the limit"),
        ("--config nowhere.yaml", "does not exist"),
        ("--model Qwen2.5-7B --transport mail", "there are object_store, ipc, nccl"),
        ("", "name a --model"),
    ],
)
def test_errors_say_the_way_out(options, says):
    result = CliRunner().invoke(app, options.split())
    assert result.exit_code == 2
    assert says in result.output


def test_help_names_models_and_gpus():
    said = CliRunner().invoke(app, ["--help"], terminal_width=200).output
    assert all(name in said for name in ("Qwen2.5-Math-7B", "b200", "--json"))


# --- layers --------------------------------------------------------------------------------------

CORE = {"machines", "shapes", "workload", "memory"}
"""Modules of the memory model, which a run itself uses; the others are the calculator."""
BELOW = {"config", "errors", "extensions", "planning", "tables"}


def test_planning_is_pure_and_its_core_does_not_know_the_calculator():
    for path in Path(planning.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = [name] if name else [alias.name for alias in getattr(node, "names", ())]
            for found in names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                assert not found.startswith(("torch", "ray", "transformers")), f"{path.name} imports {found}"
                if found.startswith("qurl_ray."):
                    package, *module = found.split(".")[1:]
                    assert package in BELOW, f"{path.name} imports {found}"
                    assert package != "planning" or path.stem not in CORE or module[0] in CORE, f"{path.name}: {found}"
