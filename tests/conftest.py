"""Shared by all tests: few threads, private caches, a tiny policy made once."""

import os
import signal
from collections import Counter

if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup: jobs that tests start would ignore it, too
    signal.signal(signal.SIGHUP, lambda *_: None)

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("MLFLOW_TRACKING_URI", None)  # else tests would write to a server

from qurl_ray.numerics.invariance import invariance_of  # isort: skip  before torch, so that MKL computes as is wanted

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from qurl_ray.config.model import TinyModel
from qurl_ray.policy.load import load_model, load_tokenizer
from qurl_ray.policy.tiny import cached_tiny_policy
from qurl_ray.quant.formats import Format, get_format
from qurl_ray.quant.linear import weight_max_code
from qurl_ray.quant.quantize import QTensor
from qurl_ray.types import PolicySpec, Problem, Request, SamplingParams

# On a busy machine an example may take any time.
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")

SUMS = [
    Problem(uid=f"{a}+{b}", prompt=f"{a}+{b}=", answer=str(a + b)) for a in range(0, 100, 3) for b in range(0, 100, 7)
]


def taken(format_name: str) -> Format:
    """The format with codes that the kernel of this processor takes, as a run asks for them."""
    return get_format(format_name, weight_max_code(get_format(format_name), torch.device("cpu")))


def arrays_of(q: QTensor) -> tuple[np.ndarray, ...]:
    """Arrays of a weight as they are sent whole, and as engines load them."""
    return tuple(part.numpy() for part in q.parts)


LINEARS = {(256, 18): 1, (256, 768): 4, (512, 256): 4}
"""Some of the quickstart's: they stand for all when it is asked whether this machine has equal bits."""


def pytest_report_header() -> str:
    return f"{invariance_of(LINEARS, head_dim=64).sentence()}; tests run with 2 threads"


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out the slow ones
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make cases of sampled tests slow. Begin with the files that take longest, so that several processes end at about
    the same time."""
    seen: Counter[str] = Counter()
    for item in items:
        if share := item.get_closest_marker("sampled"):
            test = item.nodeid.partition("[")[0]
            if seen[test] % share.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[test] += 1
    items.sort(key=lambda item: item.get_closest_marker("ray") is None)  # stable


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of each folder's tests, and of their fixtures, if there are several folders."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds["/".join(report.nodeid.partition("::")[0].split("/")[:2])] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("seconds by folder, of all processes together")
        terminalreporter.write_line(", ".join(f"{place} {time:.0f}" for place, time in seconds.most_common(40)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("equal_bits"):
        invariance = invariance_of(LINEARS, head_dim=64)
        if not invariance.kept:
            pytest.skip(invariance.sentence())


@pytest.fixture(scope="session", autouse=True)
def _quiet_machine(tmp_path_factory):
    torch.set_num_threads(2)
    os.environ["QURL_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def one_thread():
    """Products of a few rows are slower on two threads, and far slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_spec(_quiet_machine) -> PolicySpec:
    """A two-layer policy with random weights (wider than by default, so that log-probs differ)."""
    config = TinyModel(cold_start=False, layers=2, hidden_size=128, heads=4, kv_heads=2, intermediate_size=256)
    return PolicySpec(source=str(cached_tiny_policy(config, SUMS, lambda *_: None)))


@pytest.fixture(scope="session")
def tokenizer(tiny_spec):
    return load_tokenizer(tiny_spec)


@pytest.fixture
def model(tiny_spec):
    """Random, but far from uniform: weights four times the initial size."""
    model = load_model(tiny_spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


def requests_for(tokenizer, count: int, samples: int, **sampling) -> list[Request]:
    """`samples` requests for each of the first `count` sums, with prompts of different lengths."""
    params = SamplingParams(**({"max_new_tokens": 8, "stop_ids": (tokenizer.eos_token_id,)} | sampling))
    return [
        Request(
            uid=f"{problem.uid}/{g}",
            prompt_ids=np.array(tokenizer(problem.prompt).input_ids, dtype=np.int32),
            seed=hash((p, g)) % 2**63,
            sampling=params,
        )
        for p, problem in enumerate(SUMS[:count])
        for g in range(samples)
    ]
