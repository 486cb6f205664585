"""The kit that measures a GPU (benchmarks/gpu), whole and tiny on a CPU: that it runs, what it writes, what it says."""

import html
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
import torch

from benchmarks.gpu import bench as bench_module
from benchmarks.gpu.__main__ import PARTS, main
from benchmarks.gpu.bench import TINY, Bench
from benchmarks.gpu.child import call
from benchmarks.gpu.codes import LIMIT, differing, eye
from benchmarks.gpu.kernels import checked
from benchmarks.gpu.loads import compared
from benchmarks.gpu.page import page
from benchmarks.gpu.runs import FLOWS
from benchmarks.gpu.sleeps import LIMIT_MIB, grown
from benchmarks.gpu.unified import linears
from qurl_ray.errors import ConfigError
from qurl_ray.quant.formats import FORMATS, get_format
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import dequantize_rows, nearest, quantize_rows
from qurl_ray.tables import TRANSPORTS

ROOT = Path(__file__).parents[1]
LACKS = "needs {}, which this Python lacks"
SECTIONS = {"machine", "errors", "skipped", "seconds"}
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


@pytest.mark.slow
def test_every_part_is_measured_or_says_what_it_lacks(figures):
    assert figures["errors"] == {}
    assert figures.keys() == SECTIONS | PARTS.keys()
    assert figures["seconds"].keys() == PARTS.keys()
    assert "no figures of a GPU" in figures["machine"]["device"]
    assert figures["skipped"] == {
        **dict.fromkeys(("codes: vllm, int8", "vllm: all of it", "loads: vllm", "sleeps: vllm"), LACKS.format("vllm")),
        **dict.fromkeys(("runs: all of it", "sync: all of it", "training: all of it"), LACKS.format("ray")),
    }
    assert {name for name in PARTS if not figures[name]} == {"runs", "vllm", "sync", "training"}


@pytest.mark.slow
def test_kernels_are_right_for_all_formats_and_for_ragged_shapes(figures):
    found = figures["kernels"]
    assert {key.partition(",")[0] for key in found} == {*FORMATS, "unified fp8_block"}
    assert {"int8, 100 × 101", "fp8, 100 × 101", "fp8_block, 100 × 101"} <= found.keys()
    assert [key for key, one in found.items() if not one["right"]] == []
    assert max(one["errors"]["float32"] for one in found.values()) < 1e-5
    assert max(one["errors"]["bfloat16"] for one in found.values()) < 5e-3
    for key in (key for key in found if key.startswith("unified")):
        assert found[key]["by_product"]["float32"].keys() == {"FProp", "DGrad", "WGrad"}


@pytest.mark.slow
def test_the_unified_flow_is_timed_beside_bfloat16(figures):
    (one,) = figures["unified"].values()
    assert one["ways"].keys() == {"bfloat16", "fp8_block", "int8"}
    assert all(way["ms_of_a_layer"] > 0 for way in one["ways"].values())
    assert one["ways"]["bfloat16"]["times_as_fast"] == 1


@pytest.mark.slow
def test_gradients_are_timed_and_compared_by_product(figures):
    assert figures["gradients"].keys() == {f"{N} × {K}" for N, K in linears(TINY.shapes[0])}
    for one in figures["gradients"].values():
        assert one["seconds"].keys() == {"bfloat16", "emulation", "quantize W"}
        assert one["errors"].keys() == {"bfloat16", "emulation"}
        assert all(parts.keys() == {"y", "dx", "dW"} for parts in one["errors"].values())
        assert max(one["errors"]["bfloat16"].values()) < 0.005 < 0.03 < min(one["errors"]["emulation"].values())
        assert one["right"]
        assert one["not_used"] == {"scaled_mm": "scaled_mm_block needs a device of type cuda, not cpu"}


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert found["first"] == {"two": {"ms": 1.0, "summary": "1 ms"}}
    assert found["errors"].keys() == {"first: one", "first: all of it"}
    assert found["errors"]["first: all of it"] == "MemoryError: none left"
    assert found["skipped"] == dict.fromkeys(("first: three", "second: all of it"), "no time left")


# --- run again -------------------------------------------------------------------------------------------------------


def resumed(out: Path, **options) -> Bench:
    return Bench(device="cpu", scale=TINY, minutes=5, out=out, **options)


def test_run_again_it_measures_what_is_missing_and_keeps_the_rest(tmp_path):
    measured: list[str] = []
    broken = {"b"}

    def part(bench):
        for key in "abc":
            if figures := bench.attempt(key, lambda key=key: once(key)):
                bench.add(key, figures, f"{key} is done")

    def once(key):
        measured.append(key)
        if key in broken:
            raise OSError("not now")
        return {"ms": float(len(measured))}

    out = tmp_path / "gpu.json"
    first = resumed(out)
    first.part("codes", 1.0, part)
    assert not first.complete("codes")
    assert measured == ["a", "b", "c"]
    broken.clear()
    again = resumed(out)
    assert not again.complete("codes")
    again.part("codes", 1.0, part)
    assert measured == ["a", "b", "c", "b"]
    found = json.loads(out.read_text())
    assert {key: one["ms"] for key, one in found["codes"].items()} == {"a": 1.0, "c": 3.0, "b": 4.0}
    assert found["errors"] == {}
    assert resumed(out).complete("codes")
    assert not resumed(out, fresh=True).complete("codes")


def test_a_part_that_was_cut_off_is_not_complete(tmp_path):
    out = tmp_path / "gpu.json"

    def dies(bench):
        bench.add("a", {"ms": 1.0}, "1 ms")
        raise KeyboardInterrupt

    resumed(out).part("codes", 1.0, lambda bench: bench.skip("a", "no time left"))
    with pytest.raises(KeyboardInterrupt):
        resumed(out).part("codes", 1.0, dies)
    left = resumed(out)
    assert left.figures["codes"].keys() == {"a"}
    assert not left.complete("codes")


@pytest.mark.parametrize("changed", ["commit", "code", "torch", "device", "sizes"])
def test_figures_of_another_machine_or_version_are_not_mixed(changed, tmp_path, monkeypatch):
    out = tmp_path / "gpu.json"
    resumed(out).part("codes", 1.0, lambda bench: bench.add("a", {"ms": 1.0}, "1 ms"))
    found = json.loads(out.read_text())
    out.write_text(json.dumps(found | {"machine": found["machine"] | {"date": "2001-01-01"}}))
    resumed(out)  # a later day is no other machine
    out.write_text(json.dumps(found | {"machine": found["machine"] | {changed: "another"}}))
    with pytest.raises(ConfigError, match=f"{changed} was another, is .*--out, or --fresh"):
        resumed(out)
    with pytest.raises(SystemExit, match="--fresh"):
        main(["--device", "cpu", "--tiny", "--out", str(out)])
    assert resumed(out, fresh=True).figures["errors"] == {}
    out.write_text("[]")
    with pytest.raises(ConfigError, match="holds no figures of this kit"):
        resumed(out)


def test_a_change_of_the_code_that_is_in_no_commit_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_module, "ROOT", tmp_path)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "one.py").write_text("a = 1\n")
    before = bench_module._code()
    (tmp_path / "jobs" / "one.py").write_text("a = 2\n")
    assert bench_module._code() != before


# --- processes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path):
    made = resumed(tmp_path / "gpu.json")
    made.part("vllm", 1.0, lambda bench: None)
    return made


def test_a_process_returns_what_its_function_does(bench):
    assert call(bench, json.loads, s='{"a": [1.5]}') == {"a": [1.5]}


def test_a_failure_in_a_process_is_an_error_of_its_part_alone(bench):
    def part(bench):
        bench.attempt("raises", lambda: call(bench, json.loads, s="["))
        bench.attempt("dies", lambda: call(bench, os._exit, status=3))
        bench.add("works", {"found": call(bench, json.loads, s="1")}, "it works")

    bench.part("vllm", 1.0, part)
    assert bench.figures["errors"]["vllm: raises"].startswith("RuntimeError: JSONDecodeError: Expecting value")
    assert "exit status 3" in bench.figures["errors"]["vllm: dies"]
    assert bench.figures["vllm"]["works"]["found"] == 1
    assert "Traceback" in bench.log.read_text()


def test_a_process_that_takes_longer_than_its_part_is_killed_with_what_it_started(bench):
    bench._stops = time.monotonic() + 1
    assert bench.attempt("hangs", lambda: call(bench, subprocess.run, args=["sleep", "271"])) is None
    assert "left of the part" in bench.figures["skipped"]["vllm: hangs"]
    lines = (process.info["cmdline"] for process in psutil.process_iter(["cmdline"]))
    assert ["sleep", "271"] not in list(lines)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(400)
def test_cut_by_its_minutes_it_still_writes_all_figures_and_a_page_that_names_what_was_cut(tmp_path):
    out = tmp_path / "gpu.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--minutes",
        "0.5",
        "--device",
        "cpu",
        "--tiny",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found, text = json.loads(out.read_text()), out.with_suffix(".html").read_text()
    assert found.keys() == SECTIONS | PARTS.keys()
    assert found["seconds"].keys() == PARTS.keys()
    assert found["errors"] == {}
    cut = {key for key, why in found["skipped"].items() if "no time left" in why or "left of the part" in why}
    assert {"runs", "training"} <= {key.partition(":")[0] for key in cut}
    assert all(html.escape(key) in text and html.escape(why) in text for key, why in found["skipped"].items())
    assert not any(resumed(out).complete(key.partition(":")[0]) for key in cut)


# --- what the figures say --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8", "fp8", "fp8_block"])
def test_codes_are_read_from_products_and_other_ones_are_noticed(name, dtype):
    fmt, cpu, size = get_format(name), torch.device("cpu"), (48, 256)
    assert eye(*size, fmt, cpu).scale.shape == (-(-48 // fmt.rows), -(-256 // (fmt.group or 256)))

    def multiply(x):
        codes, amax = quantize_rows(x.float(), fmt)
        return dequantize_rows((codes, amax), fmt)[:, :48].to(x.dtype)

    assert differing(multiply, size, fmt, 40, cpu, dtype) == [40 * 48, 0, 0]

    def by_powers_of_two(x):
        amax = x.float().abs().amax(dim=1, keepdim=True).log2().ceil().exp2()
        return (x.float() / amax * fmt.activation_max).to(fmt.dtype).float()[:, :48] * amax / fmt.activation_max

    count, _, further = differing(by_powers_of_two, size, fmt, 40, cpu, dtype)
    assert further / count > LIMIT
    assert differing(lambda x: multiply(x) * torch.nan, size, fmt, 40, cpu, dtype)[2] == count


@pytest.mark.parametrize("name", FORMATS)
def test_products_of_every_format_are_compared_with_float64(name, tmp_path, monkeypatch):
    bench, fmt = resumed(tmp_path / "gpu.json"), FORMATS[name]
    assert checked(bench, fmt, 48, 256)["right"]
    linear = QuantizedLinear.forward
    monkeypatch.setattr(QuantizedLinear, "forward", lambda self, x: 1.01 * linear(self, x))
    assert not checked(bench, fmt, 48, 256)["right"]


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_in_the_middle_of_two_codes_either_is_right(name):
    fmt, size = get_format(name), (256, 256)

    def by_reciprocals(x):
        scale = x.float().abs().amax(dim=1, keepdim=True) / fmt.activation_max
        return (nearest(x.float() * (1 / scale), fmt) * scale).to(x.dtype)

    count, differ, further = differing(by_reciprocals, size, fmt, 1000, torch.device("cpu"), torch.bfloat16)
    assert differ / count > LIMIT
    assert further == 0


def test_answers_are_compared_up_to_where_they_part():
    one = [[[1, 2, 3], [-1.0, -1.0, -1.0]]]
    assert compared(one, one) == {"same_tokens": 3 / 16, "largest_difference": 0.0}
    other = [[[1, 2, 4], [-1.0, -1.5, -9.0]]]
    assert compared(one, other) == {"same_tokens": 2 / 16, "largest_difference": 0.5}


@pytest.mark.slow
def test_loads_are_compared_with_a_fresh_engine_and_with_the_learner(figures):
    for name in TINY.formats:
        one = figures["loads"][f"torch, {name}"]
        assert len(one["gaps"]) == TINY.versions * TINY.answers
        assert one["gap_mean"] < 1e-3
        assert one["gap_of_another_version"] > 100 * one["gap_mean"]
        assert one["fresh"] == {"same_tokens": 1.0, "largest_difference": 0.0}


@pytest.mark.slow
def test_growth_is_what_stays_and_not_what_libraries_allocate_at_first(figures):
    assert grown([0.0] * 20 + [500.0] * 180) == 0
    assert grown([2.0 * cycle for cycle in range(200)]) == 320 > LIMIT_MIB
    (one,) = figures["sleeps"].values()
    assert (one["cycles"], one["grows"]) == (TINY.cycles, False)
    assert one["seconds"].keys() == {"sleep", "wake", "load"}


@pytest.mark.slow
def test_the_page_has_the_figures_and_loads_nothing(figures):
    spoilt = figures | {"errors": {"vllm: all of it": "<script>alert(1)</script> & more"}}
    text = page(spoilt)
    assert not re.search(r"<(script|link|img|iframe)|https?:|url\(|@import|\bsrc=|\bhref=", text)
    assert "default-src 'none'" in text
    assert "Tiny shapes" in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in text
    for name in PARTS:
        assert f"<h2>{name}, " in text
        for one in figures[name].values():
            assert one["summary"].replace("&", "&amp;").replace("<", "&lt;").replace("'", "&#x27;") in text
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 6 + len(figures["gradients"])  # of all parts that were measured but the kernels
    assert all(ElementTree.fromstring(drawing).tag == "svg" for drawing in drawings)


def test_the_documentation_has_the_parts_and_their_minutes():
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", (ROOT / "docs" / "gpu.md").read_text(), re.MULTILINE)
    assert {name: int(minutes) for name, minutes in rows} == PARTS
    assert sum(PARTS.values()) == 45


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1500)
def test_whole_it_runs_on_a_cpu_with_vllm_and_ray(tmp_path):
    pytest.importorskip("vllm", reason="needs the extra cpu or gpu")
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--out", str(out)]
    assert subprocess.run(command, cwd=ROOT, timeout=1400).returncode == 0
    found = json.loads(out.read_text())
    assert found["errors"] == {}
    direct = {f"sync: {name}, disaggregated" for name, entry in TRANSPORTS.entries.items() if entry.direct}
    assert found["skipped"].keys() == {"vllm: graphs", "sleeps: vllm"} | direct
    assert found["codes"].keys() == {"torch, int8", "vllm, int8"}
    assert found["vllm"].keys() == {"tiny, eager, none", "tiny, eager, int8"}
    assert found["loads"].keys() == {f"{engine}, {name}" for engine in ("vllm", "torch") for name in TINY.formats}
    assert all(one["gap_of_another_version"] > 10 * one["gap_mean"] for one in found["loads"].values())
    assert found["runs"].keys() == FLOWS.keys()
    assert found["sync"].keys() == {"object_store, disaggregated"}
    assert found["training"].keys() == set(TINY.formats)
    assert (tmp_path / "gpu.html").read_text().count("<svg") == 11 + len(found["gradients"])
    assert not any(resumable for resumable in ("kernels", "training") if not resumed(out).complete(resumable))
