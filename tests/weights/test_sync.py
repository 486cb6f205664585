"""A sync from end to end without Ray: real sender, learner, workers and engines, and every kind of damage between them.

Damage is done to what one of two workers receives. It must end up with the right weights all the same, or be left out;
and it must never generate before.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from qurl_ray.actors.fleet import Fleet
from qurl_ray.actors.health import Health, Heartbeat
from qurl_ray.actors.local import LocalActor
from qurl_ray.actors.rollout_worker import RolloutWorker
from qurl_ray.config import load_config
from qurl_ray.errors import StaleWeights, SyncError
from qurl_ray.learner.equalizer import equalizer_for
from qurl_ray.learner.learner import make_learner
from qurl_ray.policy.load import load_model, tied_head
from qurl_ray.quant.units import units
from qurl_ray.rendezvous import Rendezvous
from qurl_ray.training.rank.objectives import objective_settings
from qurl_ray.weights.delta import Delta
from qurl_ray.weights.floor import ProbeFloor
from qurl_ray.weights.gate import WeightGate
from qurl_ray.weights.messages import Gap
from qurl_ray.weights.sender import Sender
from qurl_ray.weights.stream import Publisher
from qurl_ray.weights.transports.protocol import Link
from tests.conftest import requests_for


class Worker(RolloutWorker):
    """Keeps a list of loads. `damage`, and whether it is done again, is done to what it receives."""

    damage = None

    def __init__(self, index, loads, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._index, self._loads = index, loads

    def heartbeat(self):
        return Heartbeat(boot=str(self._index), pid=0, node="", version=self._engine.version, log="")

    def commit(self, manifest, buckets, probe):
        self._loads.append(self._index)
        if self.damage:
            damage, always = self.damage
            buckets = damage([list(bucket) for bucket in buckets], self)
            self.damage = (damage, True) if always else None
        return super().commit(manifest, buckets, probe)


class Rig:
    """A learner, a sender, two workers, and what is said."""

    def __init__(self, spec, tokenizer, *overrides, **options) -> None:
        self.config = load_config(None, ["rollout.slots=8", "sync.probe_every=1", *overrides])
        self.model = load_model(spec)
        settings = objective_settings(self.config)
        names = units(self.model, self.config.quantization.keep)
        self.equalizer = equalizer_for(
            self.model, self.config.quantization, names, {self.config.rollout.quantization} - {"none"}
        )
        learner = make_learner(
            self.model, self.config.learner, settings, temperature=1.0, total_updates=1, equalizer=self.equalizer
        )
        self.loads: list[int] = []
        kind = {"kernel": "auto", "threads": 2}
        self.workers = [Worker(index, self.loads, spec, self.config.rollout, **kind) for index in range(2)]
        self.warnings: list[str] = []
        loop = asyncio.new_event_loop()
        self.fleet = loop.run_until_complete(self._start())
        probe = requests_for(tokenizer, 1, 4, stop_ids=(), ignore_eos=True)
        self.gate = WeightGate(
            self.fleet, ranks=1, timeout_s=9, probe=probe, tolerance=0.2, floor=ProbeFloor(), warn=self.warnings.append
        )
        publisher = Publisher(names, bucket_bytes=50_000, tied=tied_head(self.model))

        def call(message, _):
            reply = loop.run_until_complete(self.gate.receive(message))
            return lambda: reply

        link = Link(name=self.config.sync.transport, publisher=publisher, call=call, host="", timeout_s=9)
        largest = self.workers[0].weight_max_code
        self.sender = Sender(self.config, learner, link, largest, probe[0].prompt_ids, **options)
        self.requests = requests_for(tokenizer, 3, 2)

    async def _start(self) -> Fleet:
        fleet = Fleet([LocalActor(worker) for worker in self.workers], self.config.rollout, lambda *_: None)
        await fleet.started()
        return fleet

    def move(self, by: float = 1e-4) -> None:
        with torch.no_grad():
            for index, parameter in enumerate(self.model.parameters()):
                parameter += by * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))

    def answers(self, worker: int):
        version = self.fleet.version
        return [c.logprobs.tolist() for c in self.workers[worker].generate(self.requests, version, 60)]


@pytest.fixture
def rig(tiny_spec, tokenizer, monkeypatch):
    monkeypatch.setattr("qurl_ray.actors.rollout_worker.ray.get", lambda bucket: bucket)
    monkeypatch.setattr("qurl_ray.weights.transports.object_store.ray.put", lambda payloads: list(payloads))
    return lambda *overrides, **options: Rig(tiny_spec, tokenizer, *overrides, **options)


@pytest.mark.equal_bits
@pytest.mark.parametrize("format_name", ["none", "int8", "fp8", "fp8_block"])
def test_probes_agree_to_the_bit_and_a_second_version_travels_as_a_delta(rig, format_name):
    rig = rig()
    rig.sender.send(format_name)
    assert rig.gate.metrics["sync/delta"] == 0
    whole = rig.gate.metrics["sync/bytes"]
    rig.move()
    rig.sender.send(format_name)
    metrics = rig.gate.metrics
    assert rig.fleet.version == 2
    assert metrics["sync/probe_gap"] == metrics["sync/probe_gap_max"] == 0
    assert metrics["sync/refits"] == 0
    assert "sync/probe_kl" not in metrics
    assert not rig.warnings
    if format_name != "none":  # a float32 value that moves changes most of its bits
        assert metrics["sync/delta"] == 1
        assert metrics["sync/bytes"] < whole / 2
    assert rig.answers(0) == rig.answers(1)


@pytest.mark.equal_bits
@pytest.mark.parametrize("format_name", ["none", "int8"])
def test_the_part_of_fp8_keys_in_the_mismatch_is_measured(rig, format_name):
    """Without codes, nothing but keys differs from full precision, and the two KLs are one."""
    rig = rig("rollout.kv_cache=fp8")
    rig.move(0.02)
    rig.sender.send(format_name)
    metrics = rig.gate.metrics
    keys, whole = metrics["sync/probe_kl_keys"], metrics["sync/probe_kl"]
    assert metrics["sync/probe_gap_max"] == 0
    assert 1e-7 < keys < 1e-2
    assert (whole == keys) == (format_name == "none")


def noisy(rig, *scales: float):
    """The learner finds these gaps, in parts of 0.3 nats, at the next probes of worker 1; worker 0 stays near 0.3."""
    rng, coming = np.random.default_rng(7), list(scales)

    def gaps(probes, _):
        means = [0.3 * np.exp(0.05 * rng.standard_normal()) for _ in probes]
        means[-1] *= coming.pop(0) if coming else 1.0
        return [Gap(mean=float(mean), largest=float(mean)) for mean in means]

    rig.sender._gaps = gaps


def test_a_gap_that_grows_has_the_weights_sent_again_and_costs_no_engine(rig):
    rig = rig()
    rig.gate._tolerance = 1.0
    noisy(rig, *[1.0] * 20, *[2.0] * 10)
    for _ in range(20):
        rig.sender.send("int8")
    assert not rig.warnings
    for _ in range(3):
        rig.sender.send("int8")
    again, helpless = rig.warnings
    assert "rollout worker 1 is in quarantine and gets weights" in again
    assert "times as far as usual" in again
    assert "rollout worker 1 (worker 1, int8 on" in helpless
    assert "sending them again did not help" in helpless
    assert [member.health for member in rig.fleet.members] == [Health.HEALTHY] * 2
    for _ in range(6):  # it is usual now
        rig.sender.send("int8")
    assert len(rig.warnings) == 2
    assert rig.loads.count(1) == rig.loads.count(0) + 1


def test_a_false_alarm_costs_one_resend(rig):
    rig = rig()
    rig.gate._tolerance = 1.0
    noisy(rig, *[1.0] * 20, 3.0)
    for _ in range(30):
        rig.sender.send("int8")
    (again,) = rig.warnings
    assert "in quarantine" in again
    assert rig.loads.count(1) == rig.loads.count(0) + 1
    assert [member.health for member in rig.fleet.members] == [Health.HEALTHY] * 2


def test_probes_are_drawn_every_so_many_syncs_and_after_anything_unusual(rig):
    """A new format, factors that moved, and weights sent again are probed whatever the count says."""
    rig = rig("sync.probe_every=4", "quantization.equalize=true", "rollout.quantization=int8")
    drawn: list[int] = []
    generate = rig.workers[0]._engine.generate
    rig.workers[0]._engine.generate = lambda asked, **rest: drawn.append(len(asked)) or generate(asked, **rest)

    def probed(format_name: str = "int8") -> bool:
        rig.move()
        rig.sender.send(format_name)
        assert rig.fleet.version == rig.sender._version
        return drawn[-1] > 0

    assert [probed() for _ in range(6)] == [True, False, False, False, True, False]
    assert "sync/probe_gap" not in rig.gate.metrics
    assert probed("none")
    assert probed("int8")
    assert not probed()
    rig.equalizer._adopt({name: found + 1 for name, found in rig.equalizer._exponents.items()})
    assert probed()
    assert not probed()
    rig.workers[0].damage = (each(flip), False)
    assert probed(), "it was sent again"
    assert "quarantine" in rig.warnings[0]


def test_whole_weights_travel_where_all_engines_are_near(rig):
    """`auto` sends changes across nodes only; a setting decides for both."""
    for delta, across, expected in (("auto", False, 0), ("auto", True, 1), ("true", False, 1), ("false", True, 0)):
        one = rig(f"sync.delta={delta}", across_nodes=across)
        one.sender.send("int8")
        one.move()
        one.sender.send("int8")
        assert one.gate.metrics["sync/delta"] == expected
        assert 0 < one.gate.metrics["sync/codes_changed"] < 0.5


@pytest.mark.equal_bits
def test_the_probe_knows_of_everything_that_engines_compute_with(rig):
    rig = rig('quantization.keep=["embed_tokens"]')  # an INT8 head, tied to an embedding in bfloat16
    rig.move(0.3)
    rig.sender.send("int8")
    assert rig.gate.metrics["sync/probe_gap_max"] == 0
    head = rig.workers[0]._engine.resident("lm_head.weight")
    assert [part.dtype for part in head] == [np.uint8, np.float32]
    rig.sender.send("none")
    assert rig.gate.metrics["sync/probe_gap_max"] == 0


@pytest.mark.sampled(3)
@pytest.mark.equal_bits
@pytest.mark.parametrize("packing", ["true", "false"])
@pytest.mark.parametrize("format_name", ["none", "int8", "fp8"])
def test_the_probe_knows_of_rounded_keys_and_values(rig, format_name, packing):
    rig = rig("rollout.kv_cache=fp8", f"learner.packing={packing}")
    for _ in range(2):  # the scales of the second version are not those of the first
        rig.sender.send(format_name)
        assert rig.gate.metrics["sync/probe_gap_max"] == 0
        assert "emulation of fp8 keys and values" in rig.gate.kernels
        rig.move(0.3)
    assert not rig.warnings


# --- damage --------------------------------------------------------------------------------------------------------


def each(change):
    """Damage that replaces the first payload (in any bucket) for which `change` returns something."""

    def damage(buckets, worker):
        for bucket in buckets:
            for place, payload in enumerate(bucket):
                changed = change(payload)
                if changed is not None:
                    bucket[place] = changed
                    return buckets
        raise AssertionError("nothing to damage")

    return damage


def flip(payload):
    part = payload.parts[0]
    if isinstance(part, Delta):
        data = bytearray(part.data)
        data[len(data) // 2] ^= 4
        return replace(payload, parts=(replace(part, data=bytes(data)), *payload.parts[1:]))
    damaged = part.copy()
    damaged.reshape(-1)[7] ^= 1
    return replace(payload, parts=(damaged, *payload.parts[1:]))


def truncate(payload):
    part = payload.parts[0]
    if isinstance(part, Delta):
        return replace(payload, parts=(replace(part, data=part.data[:-9]), *payload.parts[1:]))
    return replace(payload, parts=(part[:-1], *payload.parts[1:]))


def drop_bucket(buckets, worker):
    return buckets[:-1]


def swap_layers(buckets, worker):
    found = {
        p.name: (bucket, i) for bucket in buckets for i, p in enumerate(bucket) if p.name.endswith("up_proj.weight")
    }
    (one, (a, i)), (other, (b, j)) = list(found.items())[:2]
    a[i], b[j] = replace(b[j], name=one), replace(a[i], name=other)
    return buckets


def foreign_base(buckets, worker):
    """The engine holds other weights than it believes: the delta is added to the wrong codes."""
    module = next(m for m in worker._engine._model.modules() if hasattr(m, "weight") and m.weight.ndim == 1)
    module.weight.data.add_(0.5)
    return buckets


def stale_version(buckets, worker):
    """The engine missed a version. (What is refused here is seen before anything is decoded.)"""
    worker._engine.version = 0
    return [[replace(p, base_version=0) if p.base_version is not None else p for p in b] for b in buckets]


@pytest.mark.sampled(2)
@pytest.mark.equal_bits
@pytest.mark.parametrize("second", [False, True], ids=["whole", "delta"])
@pytest.mark.parametrize("damage", [each(flip), each(truncate), drop_bucket, swap_layers], ids=lambda d: d.__name__)
def test_damage_is_healed_by_a_refit_in_full_and_said(rig, damage, second):
    rig = rig()
    if second:
        rig.sender.send("int8")
        rig.move()
    rig.workers[1].damage = damage, False
    rig.loads.clear()
    rig.sender.send("int8")
    assert rig.loads == [0, 1, 1]  # the other one is not bothered
    assert rig.gate.metrics["sync/refits"] == 1
    (warning,) = rig.warnings
    assert f"rollout worker 1 is in quarantine and gets weights {rig.fleet.version} in full" in warning
    assert rig.gate.metrics["sync/probe_gap_max"] == 0
    assert rig.answers(0) == rig.answers(1)


@pytest.mark.parametrize("damage", [foreign_base, stale_version])
def test_a_delta_to_other_weights_is_refused_and_healed(rig, damage):
    rig = rig()
    rig.sender.send("int8")
    rig.move()
    rig.workers[1].damage = damage, False
    rig.sender.send("int8")
    assert len(rig.warnings) == 1
    assert rig.answers(0) == rig.answers(1)
    rig.move()
    rig.sender.send("int8")  # and deltas go on from there
    assert rig.gate.metrics["sync/delta"] == 1
    assert len(rig.warnings) == 1


@pytest.mark.parametrize("broken", [lambda logits: logits * 3, lambda logits: logits * float("nan")])
def test_the_probe_finds_what_fingerprints_cannot(rig, monkeypatch, broken):
    rig = rig()
    rig.sender.send("int8")
    engine = rig.workers[1]._engine
    load = engine.load

    def load_and_break(*version):
        load(*version)
        head = engine._head
        engine._head = lambda x: broken(head(x))

    engine.load = load_and_break
    rig.move()
    rig.sender.send("int8")
    assert "in quarantine" in rig.warnings[0]
    assert "log-probs of the probe are off by" in rig.warnings[0]
    assert "rollout worker 1 is left out" in rig.warnings[1]
    assert [member.health for member in rig.fleet.members] == [Health.HEALTHY, Health.OUT]
    rig.move()
    rig.sender.send("int8")
    assert len(rig.warnings) == 2


def test_a_sync_that_sends_a_copy_of_the_start_for_ever_ends_the_run(rig, monkeypatch):
    """Engines hold exactly what was sent: only log-probs can tell that it is not the learner's."""
    rig = rig()
    copies = [(name, parameter.detach().clone()) for name, parameter in rig.model.named_parameters()]
    monkeypatch.setattr(rig.sender._learner, "named_parameters", lambda: iter(copies))
    rig.sender.send("int8")
    assert rig.gate.metrics["sync/probe_gap"] == 0
    rig.move(0.05)
    with pytest.raises(SyncError, match="could take weights 2: its log-probs of the probe are off by"):
        rig.sender.send("int8")


def test_codes_of_rounded_parameters_are_noticed_and_said(rig, monkeypatch):
    """They differ here and there from those of the learner's float32, where a value lies between two."""
    rig = rig()
    rig.sender.send("int8")
    rounded = lambda: ((name, p.detach().bfloat16().float()) for name, p in rig.model.named_parameters())  # noqa: E731
    monkeypatch.setattr(rig.sender._learner, "named_parameters", rounded)
    rig.move(0.05)
    rig.sender.send("int8")
    assert rig.gate.metrics["sync/probe_gap"] > 0.005
    assert "in quarantine" in rig.warnings[0]
    assert "times as far as usual" in rig.warnings[0]
    assert "sending them again did not help" in rig.warnings[-1]


def test_without_a_fit_engine_the_run_ends_and_none_generates(rig):
    rig = rig()
    rig.sender.send("int8")
    rig.workers[0].damage = each(flip), True
    rig.workers[1].damage = each(flip), True
    rig.move()
    with pytest.raises(SyncError, match="no rollout worker could take weights 2"):
        rig.sender.send("int8")
    for version in (1, 2):
        with pytest.raises(StaleWeights):
            rig.workers[1].generate(rig.requests, version, 60)


# --- ranks ---------------------------------------------------------------------------------------------------------


def test_ranks_hear_of_one_outcome_in_their_order_and_of_its_error():
    async def both(action):
        rendezvous = Rendezvous(2)
        calls = [rendezvous.arrive("key", rank, f"from {rank}", action) for rank in (1, 0)]
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert not rendezvous._gatherings
        return found

    async def join(brought):
        return " and ".join(brought)

    async def fail(brought):
        raise SyncError("no")

    assert asyncio.run(both(join)) == ["from 0 and from 1"] * 2
    assert [str(error) for error in asyncio.run(both(fail))] == ["no", "no"]


def test_a_transport_that_fails_is_aborted_and_its_error_ends_the_send(rig, monkeypatch):
    rig, aborted = rig(), []
    transport = rig.sender._fallback
    monkeypatch.setattr(transport, "put", lambda _: 1 / 0)
    monkeypatch.setattr(transport, "abort", lambda: aborted.append(True))
    with pytest.raises(ZeroDivisionError):
        rig.sender.send("int8")
    assert aborted == [True]
    assert not rig.fleet.those(Health.HEALTHY)
