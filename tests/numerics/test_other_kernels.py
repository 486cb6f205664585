"""Engine and learner agree with other kernels, too: a processor's own and those of older ones, in fresh processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qurl_ray.numerics.processor import cpuinfo

ROOT = Path(__file__).parents[2]
OLDER = {"MKL_CBWR": "AVX2,STRICT", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
OLDEST = {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}
ONE_BY_ONE = [{name: value} for variables in (OLDER, OLDEST) for name, value in variables.items()]


def agreement(variables: dict[str, str], threads: tuple[int, ...]) -> dict:
    kept = {k: v for k, v in os.environ.items() if k not in OLDER}
    found = subprocess.run(
        [sys.executable, "tests/numerics/agreement.py", *map(str, threads)],
        cwd=ROOT,
        env=kept | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, OLDER, OLDEST], ids=["this machine's", "older", "oldest"])
def test_engine_and_learner_agree_wherever_it_is_promised(variables):
    found = agreement(variables, threads=(1, 2) if variables else (1, 2, 4, 8, 16))
    if not found["kept"]:
        pytest.skip(found["sentence"])
    assert found["differing"] == []


@pytest.mark.slow
@pytest.mark.parametrize("variables", ONE_BY_ONE, ids=lambda v: "=".join(*v.items()))
def test_engine_and_learner_agree_with_each_variable_alone(variables):
    test_engine_and_learner_agree_wherever_it_is_promised(variables)


@pytest.mark.slow
@pytest.mark.skipif(
    cpuinfo().get("vendor_id") != "GenuineIntel", reason="the variable does nothing on other makers' CPUs"
)
@pytest.mark.parametrize("instructions", ["AVX512", "AVX2", "SSE4_2"])
def test_engine_and_learner_agree_with_fewer_instructions_of_mkl(instructions):
    test_engine_and_learner_agree_wherever_it_is_promised({"MKL_ENABLE_INSTRUCTIONS": instructions})
