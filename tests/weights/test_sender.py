"""The sender by itself: a learner of two parameters, and a gate that only writes down what it is told."""

import math

import numpy as np
import pytest
import torch

from qurl_ray.config import load_config
from qurl_ray.quant.equalize import Factors
from qurl_ray.types import Adapters, Completion
from qurl_ray.weights.messages import Commit, Gap, Header, Scored
from qurl_ray.weights.sender import Sender
from qurl_ray.weights.stream import Publisher
from qurl_ray.weights.transports.protocol import Link

PROMPT = np.array([1, 2], dtype=np.int32)


def completion(*logprobs: float) -> Completion:
    tokens = np.arange(len(logprobs), dtype=np.int32)
    return Completion(uid="a", token_ids=tokens, logprobs=np.float32(logprobs), versions=tokens, finish="length")


class FakeLearner:
    """Two parameters, of which the matrix is sent as codes. It finds these log-probs, answer by answer."""

    def __init__(self) -> None:
        self.matrix, self.vector = torch.randn(16, 128), torch.randn(128)
        self.found: list[list[float]] = []
        self.without_fp8_keys = self.in_full = 0.0

    adapters = None

    def named_parameters(self, *, trained=False):
        if not trained:
            yield "linear.weight", self.matrix
        yield "norm.weight", self.vector

    def changing_parameters(self):
        return self.named_parameters(trained=True)

    def factors(self):
        return {}

    def logprobs(self, completions, prompt_ids, precision):
        assert len(completions) == len(self.found)
        moved = 0.0 if precision.kv_cache == "fp8" else self.without_fp8_keys if precision.fmt else self.in_full
        return [np.float32(values) + np.float32(moved) for values in self.found]


class FakeGate:
    """Writes messages down. Answers with these probes, and wants a version again as often as is said."""

    def __init__(self) -> None:
        self.messages: list = []
        self.probes: list[list[Completion]] = []
        self.again, self.error = 0, None

    def call(self, message, _):
        self.messages.append(message)

        def reply():
            if self.error:
                raise self.error
            if isinstance(message, Commit):
                return self.probes
            self.again -= 1
            return self.again >= 0

        return reply

    @property
    def commits(self) -> list[Commit]:
        return [message for message in self.messages if isinstance(message, Commit)]


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr("qurl_ray.weights.transports.object_store.ray.put", list)

    def make(*settings: str, probe: bool = True, **options):
        config = load_config(None, ["quantization.equalize=false", *settings])
        learner, gate = FakeLearner(), FakeGate()
        publisher = Publisher(dict.fromkeys(["linear.weight"]))
        link = Link(name="object_store", publisher=publisher, call=gate.call, host="", timeout_s=1)
        largest = {"int8": 63, "fp8": 448}.__getitem__
        return Sender(config, learner, link, largest, PROMPT if probe else None, **options), learner, gate

    return make


def test_versions_are_numbered_from_the_one_that_engines_may_hold(made):
    sender, _, gate = made(version=41)
    for _ in range(2):
        sender.send("int8")
    assert [commit.header.version for commit in gate.commits] == [42, 43]
    assert gate.commits[0].header == Header(
        version=42, attempt=0, rank=0, format="int8", weight_max_code=63, probe=True
    )


@pytest.mark.parametrize(
    ("delta", "across", "travels"), [("auto", True, True), ("auto", False, False), ("true", False, True)]
)
def test_changes_travel_to_engines_that_hold_the_version_before_in_the_same_format(made, delta, across, travels):
    sender, learner, gate = made(f"sync.delta={delta}", across_nodes=across)
    bases = []
    for format_name in ("int8", "int8", "fp8", "fp8", "none", "int8"):
        learner.matrix[0, 0] += 0.5
        sender.send(format_name)
        bases.append({record.base_version for record in gate.commits[-1].records} - {None})
    assert bases == [set(), {1} if travels else set(), set(), {3} if travels else set(), set(), set()]


def test_a_version_that_engines_did_not_take_comes_again_whole_until_they_have(made):
    sender, learner, gate = made("sync.delta=true")
    sender.send("int8")
    learner.matrix[0, 0] += 0.5
    gate.again = 2
    sender.send("int8")
    again = gate.commits[1:]
    assert [(c.header.version, c.header.attempt) for c in again] == [(2, 0), (2, 1), (2, 2)]
    assert [any(record.base_version for record in c.records) for c in again] == [True, False, False]
    assert all(c.header.probe for c in again[1:])
    sender.resend()  # for an engine that was restarted
    assert (gate.commits[-1].header.version, gate.commits[-1].header.attempt) == (2, 3)


def test_where_adapters_alone_are_trained_versions_are_subsets_until_one_is_wanted_again(made):
    sender, learner, gate = made(across_nodes=False)
    learner.adapters = Adapters(rank=1, alpha=1.0, targets=("all_linear",))
    for format_name in ("int8", "int8", "fp8", "fp8"):  # another format is another set of codes
        learner.vector += 0.5
        sender.send(format_name)
    names = [{record.name for record in commit.records} for commit in gate.commits]
    whole, part = {"linear.weight", "norm.weight"}, {"norm.weight"}
    assert names == [whole, part, whole, part]
    assert [commit.header.subset_of for commit in gate.commits] == [None, 1, None, 3]
    gate.again = 1
    sender.send("fp8")
    assert [commit.header.subset_of for commit in gate.commits[-2:]] == [4, None]
    assert [{record.name for record in commit.records} for commit in gate.commits[-2:]] == [part, whole]
    learner.factors = lambda: {"linear": Factors()}  # the factors have moved, and with them the codes
    sender._config = sender._config.model_copy(
        update={"quantization": sender._config.quantization.model_copy(update={"equalize": True})}
    )
    sender.send("fp8")
    assert gate.commits[-1].header.subset_of is None


def test_every_so_many_versions_are_probed_and_all_that_are_unusual(made):
    sender, _, gate = made("sync.probe_every=3")
    for format_name in ("int8", "int8", "int8", "int8", "none", "none"):
        sender.send(format_name)
    assert [c.header.probe for c in gate.commits] == [True, False, False, True, True, False]


def test_a_gap_is_the_difference_over_all_tokens_of_an_engine(made):
    sender, learner, gate = made()
    gate.probes = [[completion(-1.0, -2.0), completion(-3.0)], [completion(-1.0, -2.0), completion(-4.0)]]
    learner.found = [[-1.0, -2.0], [-3.0], [-1.5, -2.0], [-3.0]]
    sender.send("int8")
    (scored,) = [message for message in gate.messages if isinstance(message, Scored)]
    assert scored.gaps == (Gap(mean=0.0, largest=0.0), Gap(mean=0.5, largest=1.0))
    assert scored.header == gate.commits[0].header


def test_kls_are_from_the_engine_with_fp8_keys_to_that_without_and_to_full_precision(made):
    sender, learner, gate = made("rollout.kv_cache=fp8")
    gate.probes = [[completion(-1.0, -2.0), completion(-3.0)], [completion(-1.0, -2.0)]]
    learner.found = [[-1.0, -2.0], [-3.0], [-1.5, -2.0]]
    learner.without_fp8_keys, learner.in_full = -0.25, 0.5
    sender.send("int8")
    first, second = gate.messages[-1].gaps

    def k3(*log_rho: float) -> float:
        return sum(math.exp(x) - 1 - x for x in log_rho) / len(log_rho)

    assert (first.mean, second.mean) == (0.0, 0.25)
    assert [first.kl_keys, second.kl_keys] == pytest.approx([k3(-0.25)] * 2)
    assert [first.kl, second.kl] == pytest.approx([k3(0.5), k3(0.0, 0.5)])


def test_without_a_probe_nothing_is_scored(made):
    sender, _, gate = made(probe=False)
    gate.probes = [[]]
    sender.send("int8")
    assert gate.messages[-1].gaps == ()


@pytest.mark.parametrize(
    ("settings", "format_name", "sent"),
    [
        ([], "int8", 2),
        ([], "none", 4),
        (["sync.unquantized=float32"], "int8", 4),
        (["precision_flow=unified", "rollout.quantization=fp8_block"], "fp8", 4),
    ],
)
def test_tensors_without_codes_travel_in_as_many_bits_as_both_sides_compute_with(made, settings, format_name, sent):
    sender, _, gate = made(*settings)
    sender.send(format_name)
    (vector,) = [record for record in gate.commits[0].records if record.name == "norm.weight"]
    assert vector.bytes == 128 * sent


def test_what_a_failed_version_holds_is_released_and_the_next_one_is_whole(made):
    sender, _, gate = made("sync.delta=true")
    sender.send("int8")
    gate.error = TimeoutError()
    with pytest.raises(TimeoutError):
        sender.send("int8")
    assert sender._transport._objects == []
    gate.error = None
    sender.resend()
    assert not any(record.base_version for record in gate.commits[-1].records)
