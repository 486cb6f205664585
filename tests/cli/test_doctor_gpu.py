"""`qurl doctor --gpu`, as far as a CPU has what it tries."""

import importlib.metadata

import pytest
import torch

from qurl_ray.cli import doctor_gpu
from qurl_ray.quant.linear import QuantizedLinear
from tests.cli.test_qurl import qurl

CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails():
    done = qurl("doctor", "--gpu")
    assert done.exit_code == 1
    assert "nothing of them was tried" in done.stdout


def test_a_kernel_that_is_wrong_is_found(monkeypatch):
    assert not any(finding.fatal for finding in doctor_gpu.products(CPU))
    forward = QuantizedLinear.forward
    monkeypatch.setattr(QuantizedLinear, "forward", lambda self, x: forward(self, x) * 1.03)
    found = list(doctor_gpu.products(CPU))
    assert all(finding.fatal and "WRONG" in finding.problem for finding in found)


@pytest.mark.parametrize(
    ("capability", "fits"), [((9, 0), True), ((8, 9), True), ((8, 0), True), ((7, 5), False), ((10, 0), False)]
)
def test_a_gpu_runs_code_of_its_major_version(capability, fits):
    assert doctor_gpu.runs_on(["sm_80", "sm_86", "sm_90a", "compute_90"], capability) is fits


@pytest.mark.parametrize(("version", "fits"), [("2.11.0+cu130", True), ("2.10.0", False)])
def test_versions_that_do_not_fit_are_named(monkeypatch, version, fits):
    monkeypatch.setattr(importlib.metadata, "version", {"torch": version, "vllm": "0.32.0"}.get)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["torch==2.11.0", "torch==2.9; extra == 'old'"])
    (finding,) = doctor_gpu.wanted_version("torch", "vllm")
    assert finding.fatal is not fits
    assert ("vllm 0.32.0 asks for torch==2.11.0" in finding.problem) is not fits


@pytest.mark.slow
def test_two_processes_share_memory_or_it_is_said(monkeypatch):
    (finding,) = doctor_gpu.processes(CPU)
    assert (finding.found.startswith("works"), finding.problem) == (True, "")
    monkeypatch.setattr(doctor_gpu, "_PEER_S", 0.0)
    (finding,) = doctor_gpu.processes(CPU)
    assert "sync.transport=ipc would fail" in finding.problem


@pytest.mark.slow
def test_a_tiny_engine_takes_weights_and_generates():
    pytest.importorskip("vllm", reason="needs the extra cpu or gpu")
    found = list(doctor_gpu.engine(CPU))
    assert [finding.what for finding in found] == ["int8", "fp8"]
    assert all(finding.found.startswith("32 tokens") for finding in found), found
