"""The kit that measures a GPU (benchmarks/gpu), whole and tiny on a CPU: that it runs, what it writes, what it says."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import PARTS, main
from benchmarks.gpu.bench import TINY, Bench
from qurl_ray.quant.formats import FORMATS

ROOT = Path(__file__).parents[1]
ABSENT = ("ray", "vllm", "mlflow", "typer", "datasets", "deepspeed", "matplotlib")
WITHOUT = f"import sys; sys.modules |= dict.fromkeys({ABSENT}); from benchmarks.gpu.__main__ import main; main()"


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """Of the whole kit, run where torch and transformers are all there is."""
    out = tmp_path_factory.mktemp("kit") / "gpu.json"
    command = [sys.executable, "-c", WITHOUT, "--device", "cpu", "--tiny", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "s left]" in done.stdout
    return json.loads(out.read_text())


def test_every_part_is_measured(figures):
    assert figures["errors"] == {}
    assert figures["skipped"] == []
    assert figures.keys() == {"machine", "errors", "skipped", "seconds", *PARTS}
    assert figures["seconds"].keys() == PARTS.keys()
    assert "no figures of a GPU" in figures["machine"]["device"]


def test_kernels_are_right_for_all_formats_and_for_ragged_shapes(figures):
    found = figures["kernels"]
    assert {key.partition(",")[0] for key in found} == {*FORMATS, "unified fp8_block"}
    assert {"int8, 100 × 101", "fp8, 100 × 101", "fp8_block, 100 × 101"} <= found.keys()
    assert [key for key, one in found.items() if not one["right"]] == []
    assert max(one["errors"]["float32"] for one in found.values()) < 1e-5
    assert max(one["errors"]["bfloat16"] for one in found.values()) < 5e-3
    for key in (key for key in found if key.startswith("unified")):
        assert found[key]["by_product"]["float32"].keys() == {"FProp", "DGrad", "WGrad"}


def test_the_unified_flow_is_timed_beside_bfloat16(figures):
    (one,) = figures["unified"].values()
    assert one["ways"].keys() == {"bfloat16", "fp8_block", "int8"}
    assert all(way["ms_of_a_layer"] > 0 for way in one["ways"].values())
    assert one["ways"]["bfloat16"]["times_as_fast"] == 1


def test_steps_are_measured_with_few_layers_and_extrapolated(figures):
    assert figures["step"].keys() == {"tiny, packed", "tiny, padded"}
    for one in figures["step"].values():
        assert one["measured"].keys() == {str(layers) for layers in TINY.layers}
        assert all(
            part[way]["skipped_updates"] == 0
            for part in one["measured"].values()
            for way in one["extrapolated_seconds"]
        )
        few, more = (one["measured"][str(layers)]["bfloat16"]["seconds"] for layers in TINY.layers)
        assert one["extrapolated_seconds"]["bfloat16"] == pytest.approx(few + 3 * (more - few))  # 4 layers of 1 and 2


def test_rollouts_are_measured_by_format_and_batch(figures):
    assert figures["rollout"].keys() == {f"tiny, eager, batch {count}" for count in TINY.batches}
    for one in figures["rollout"].values():
        assert one["formats"].keys() == {"none", "int8", "fp8", "fp8_block"}
        assert one["formats"]["none"]["kernels"] == []
        assert all(part["kernels"] for name, part in one["formats"].items() if name != "none")
        few, more = one["formats"]["int8"]["measured_ms"].values()
        expected = few + 3 * (more - few) + one["head_ms"]
        assert one["formats"]["int8"]["extrapolated_ms"] == pytest.approx(expected)


def test_without_a_gpu_it_says_so_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="not measured: no CUDA device"):
        main(["--out", str(tmp_path / "gpu.json")])
    assert list(tmp_path.iterdir()) == []


def test_what_fails_or_has_no_time_left_is_written_and_the_rest_goes_on(tmp_path):
    bench = Bench(device="cpu", scale=TINY, minutes=1 / 600, out=tmp_path / "gpu.json")

    def part(bench):
        bench.attempt("one", lambda: torch.zeros(2) @ torch.zeros(3))
        bench.add("two", {"ms": 1.0}, "1 ms")
        time.sleep(0.1)
        bench.attempt("three", lambda: pytest.fail("there was no time left"))
        raise MemoryError("none left")

    bench.part("first", 1.0, part)
    bench.part("second", 1.0, part)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["first"] == {"two": {"ms": 1.0}}
    assert found["errors"].keys() == {"first: one", "first: all of it"}
    assert found["errors"]["first: all of it"] == "MemoryError: none left"
    assert found["skipped"] == ["first: three", "second: all of it"]
