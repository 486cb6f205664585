"""vLLM's own kernels over fixed memory: nothing moves, nothing is lost, two operations a product, clear refusals.

vLLM takes itself for one on an H100, in a process of its own (vllm_cuda.py): no GPU is needed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs the extra cpu or gpu")


def found(*checks: str) -> dict:
    child = subprocess.run(
        [sys.executable, Path(__file__).with_name("vllm_cuda.py"), *checks],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert child.returncode == 0, child.stderr[-3000:]
    (line,) = [line for line in child.stdout.splitlines() if line.startswith("FOUND ")]
    return json.loads(line.removeprefix("FOUND "))


@pytest.fixture(scope="module")
def quick() -> dict:
    """The checks of the default suite, for which vLLM is imported once."""
    return found("memory", "experts")


@pytest.mark.slow
def test_a_product_takes_two_operations_on_a_gpu():
    seen = found("operations")["operations"]
    outside = seen.pop("int8 beside the compiled model")  # where nothing joins plain operations
    assert outside["operations"] == ["dynamic_scaled_int8_quant", "cutlass_scaled_mm"]
    assert seen == {
        "int8": {
            "kernel": "CutlassInt8ScaledMMLinearKernel",
            "operations": ["dynamic_scaled_int8_quant", "cutlass_scaled_mm"],
        },
        "fp8": {
            "kernel": "CutlassFP8ScaledMMLinearKernel",
            "operations": ["dynamic_per_token_scaled_fp8_quant", "cutlass_scaled_mm"],
        },
        "fp8_block": {
            "kernel": "CutlassFp8BlockScaledMMKernel",
            "operations": ["per_token_group_fp8_quant", "cutlass_scaled_mm"],
        },
    }


@pytest.mark.slow
def test_the_compiler_quantizes_with_the_norm_or_silu_before_a_product():
    """Only the input of o_proj, which attention writes, is quantized by an operation of its own."""
    quantized = ("int8", "fp8", "fp8_block")
    assert found("layers")["layers"] == {
        "none": 9,
        "forced": dict.fromkeys(quantized, 13),
        "joined": dict.fromkeys(quantized, 10),
    }


def test_versions_are_written_where_the_first_was_and_multiply_as_defined(quick):
    seen = quick["memory"]
    assert {name: (one["moved"], one["wrong"]) for name, one in seen.items()} == dict.fromkeys(seen, (0, 0))
    assert all(
        one["gap"] < 0.03 for one in seen.values()
    )  # results are bfloat16, and a code of fp8 may be the next one
    assert len(seen) == 9
    assert seen["int8, none"]["parameters"]["weight"] == [[32, 48], [1, 32]]  # [K, N], turned in place
    assert seen["fp8, all"]["parameters"] == {
        "weight": [[32, 48], [1, 32]],
        "weight_scale": [[48, 1], [1, 1]],
    }  # padded
    assert seen["fp8_block, all"]["parameters"]["weight_scale"] == [[2, 1], [1, 1]]


def test_experts_are_slices_of_one_tensor_which_the_fused_operation_reads(quick):
    """Its definition, in float64, gives the learner's mixture: places of gate and up, scales, weights of routes."""
    seen = quick["experts"]
    assert list(seen) == ["none", "int8", "fp8", "fp8_block"]
    for name, of_format in seen.items():
        assert (of_format["moved"], of_format["wrong"]) == (False, 0)
        assert of_format["parameters"] == 6 * 2
        assert of_format["gap"] < (0.01 if name == "none" else 0.04)  # bfloat16 between the two products


@pytest.mark.slow
def test_codes_of_activations_are_read_from_products_in_every_layout():
    for name, (count, differ, further) in found("codes")["codes"].items():
        assert count == 2000 * {"int8": 32, "fp8": 24, "fp8_block": 128}[name]
        assert differ < 0.01 * count  # in the middle of two codes, the definition here takes another one
        assert further == 0


@pytest.mark.slow
def test_a_layer_that_no_kernel_multiplies_is_refused_with_its_name_and_what_works():
    seen = found("refusals")["refusals"]
    assert seen["blocks"].startswith("model.layers.0.mlp.up cannot be fp8_block here: 192 × 128 weights are not whole")
    assert "set rollout.quantization=fp8" in seen["blocks"]
    assert "model.layers.0.mlp.up cannot be int4 here" in seen["int4"]
    assert "set rollout.quantization=fp8" in seen["int4"]
    assert "40 outputs are no multiple of 16: set rollout.quantization=int8" in seen["width"]
    assert "not whole blocks of 128 × 128: set rollout.quantization=fp8" in seen["expert's blocks"]
    assert "mlp.experts.0.gate_up cannot be int4 here" in seen["expert's int4"]
    assert "rollout.dtype=bfloat16" in seen["float32"]
    assert "quantization.kernel=emulation" in seen["float32"]
