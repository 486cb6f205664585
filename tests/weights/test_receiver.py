"""Sender to receiver: deltas reproduce what was sent bit for bit, and no damage goes unseen."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from qurl_ray.errors import SyncError
from qurl_ray.quant.fingerprint import fingerprint
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.quantize import quantize
from qurl_ray.weights.receiver import decode_buckets
from qurl_ray.weights.stream import Publisher, assemble_manifest
from tests.conftest import arrays_of

INT8 = FORMATS["int8"]
SHAPES = {
    "model.embed_tokens.weight": (320, 96),
    "model.layers.0.self_attn.q_proj.weight": (96, 96),
    "model.layers.0.mlp.up_proj.weight": (256, 96),
    "model.layers.0.mlp.down_proj.weight": (96, 256),
    "model.norm.weight": (96,),
    "model.layers.1.self_attn.q_proj.weight": (96, 96),
    "a.scalar": (),
}
QUANTIZED = dict.fromkeys(name for name in SHAPES if "proj" in name)
Q_PROJ, EMBEDDING = "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"


class Receiver:
    """An engine that holds buffers and generates nothing."""

    def __init__(self) -> None:
        self.version, self.held = None, {}

    def load(self, manifest, payloads) -> None:
        self.version, held = None, dict(self.held)
        for buffers in decode_buckets(payloads, manifest, self.held.__getitem__):
            held |= buffers
        if held.keys() != {record.name for record in manifest.tensors}:
            raise SyncError("incomplete")
        self.held = held
        for record in manifest.tensors:
            if fingerprint(*map(torch.tensor, held[record.name])) != record.fingerprint:
                raise SyncError(f"fingerprint of {record.name}")
        self.version = manifest.version


@pytest.fixture
def parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def move(parameters, by: float = 1e-3) -> None:
    """Far enough that some code of every tensor changes."""
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters.values():
        parameter += by * torch.randn(parameter.shape, generator=generator)


def prepare(publishers, parameters, version, base=None, fmt=INT8, unquantized="bfloat16"):
    """(manifest, payloads by bucket) of all ranks."""
    options = {"version": version, "base_version": base, "unquantized": unquantized}
    buckets = [bucket for p in publishers for bucket in p.prepare(parameters.items(), fmt, **options)]
    return assemble_manifest(version, fmt, [b.records for b in buckets]), [b.payloads for b in buckets]


def publishers_for(ranks=1, **options):
    return [Publisher(QUANTIZED, rank=r, ranks=ranks, bucket_bytes=30_000, **options) for r in range(ranks)]


def same(a, b) -> bool:
    """Bit for bit, NaN included."""
    return a.keys() == b.keys() and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for name in a
        for x, y in zip(a[name], b[name], strict=True)
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("fmt", "unquantized"),
    [("int8", "bfloat16"), ("int8", "float32"), ("fp8_block", "bfloat16"), (None, "bfloat16"), (None, "float16")],
)
def test_deltas_over_several_versions_give_what_a_full_send_gives(parameters, ranks, fmt, unquantized):
    fmt, publishers, engine = FORMATS.get(fmt), publishers_for(ranks), Receiver()
    for version in range(1, 5):
        base = engine.version
        manifest, payloads = prepare(publishers, parameters, version, base, fmt, unquantized)
        engine.load(manifest, payloads)
        assert manifest.base_version == base
        assert engine.version == version
        fresh = Receiver()
        fresh.load(*prepare(publishers_for(), parameters, version, None, fmt, unquantized))
        assert same(engine.held, fresh.held)
        move(parameters)


@pytest.mark.parametrize("unquantized", ["bfloat16", "float16"])
def test_what_arrives_is_the_codes_and_the_rounded_values(parameters, unquantized):
    publishers, engine = publishers_for(), Receiver()
    for version in (1, 2):
        engine.load(*prepare(publishers, parameters, version, engine.version, unquantized=unquantized))
        for name, parameter in parameters.items():
            if name in QUANTIZED:
                q = quantize(parameter, INT8)
                expected = arrays_of(q)
            else:
                expected = (parameter.to(getattr(torch, unquantized)).float().numpy(),)
            assert same({name: engine.held[name]}, {name: expected})
        move(parameters)


def test_values_that_are_no_numbers_arrive_too(parameters):
    publishers, engine = publishers_for(), Receiver()
    engine.load(*prepare(publishers, parameters, 1, unquantized="float32"))
    bits = parameters[EMBEDDING].numpy().view(np.uint32)
    bits[0, :4] = [0x7FC00001, 0xFFC12345, 0x7F800000, 0x80000000]
    engine.load(*prepare(publishers, parameters, 2, 1, unquantized="float32"))
    assert (engine.held[EMBEDDING][0].view(np.uint32) == bits).all()


def test_buckets_are_unpacked_when_they_are_asked_for(parameters):
    manifest, payloads = prepare(publishers_for(), parameters, 1)
    taken = []
    arrived = decode_buckets(
        (taken.append(i) or p for i, p in enumerate(payloads)), manifest, lambda name: pytest.fail(name)
    )
    assert not taken
    assert next(arrived).keys() == {p.name for p in payloads[0]}
    assert taken == [0]


def test_resending_repairs_an_engine_whose_base_was_wrong(parameters):
    publishers, engine = publishers_for(2), Receiver()
    engine.load(*prepare(publishers, parameters, 1))
    move(parameters)
    engine.held[Q_PROJ] = tuple(part.copy() for part in engine.held[Q_PROJ])
    engine.held[Q_PROJ][0][3, 5] ^= 1
    with pytest.raises(SyncError, match=r"fingerprint of .*q_proj"):
        engine.load(*prepare(publishers, parameters, 2, 1))
    buckets = [bucket for p in publishers for bucket in p.resend()]
    engine.load(assemble_manifest(2, INT8, [b.records for b in buckets]), [b.payloads for b in buckets])
    fresh = Receiver()
    fresh.load(*prepare(publishers_for(), parameters, 2))
    assert engine.version == 2
    assert same(engine.held, fresh.held)
    move(parameters)
    engine.load(*prepare(publishers, parameters, 3, 2))  # and it can be the base of deltas


def test_codes_of_a_tied_embedding_follow_it(parameters):
    tied = {"lm_head.weight": EMBEDDING}
    publishers = [Publisher(QUANTIZED | tied, tied=tied, rank=r, ranks=2) for r in range(2)]
    engine = Receiver()
    for version in (1, 2):
        manifest, payloads = prepare(publishers, parameters, version, engine.version)
        engine.load(manifest, payloads)
        assert same({"head": engine.held["lm_head.weight"]}, {"head": arrays_of(quantize(parameters[EMBEDDING], INT8))})
        assert sum(r.float32_bytes for r in manifest.tensors) == sum(4 * p.numel() for p in parameters.values())
        move(parameters)


# --- damage ------------------------------------------------------------------------------------------------------


@pytest.fixture
def second(parameters):
    """(engine that holds version 1, manifest, payloads of version 2 as deltas in one bucket)."""
    publisher, engine = Publisher(QUANTIZED), Receiver()
    engine.load(*prepare([publisher], parameters, 1))
    move(parameters)
    manifest, (bucket,) = prepare([publisher], parameters, 2, 1)
    return engine, manifest, {payload.name: payload for payload in bucket}


def refused(engine, manifest, payloads, match) -> None:
    with pytest.raises(SyncError, match=match):
        engine.load(manifest, [list(payloads)])
    assert engine.version is None


@pytest.mark.parametrize("name", [Q_PROJ, EMBEDDING])
def test_a_truncated_delta_names_tensor_and_version(second, name):
    engine, manifest, payloads = second
    delta = payloads[name].parts[0]
    cut = replace(delta, data=delta.data[: len(delta.data) // 2])
    payloads[name] = replace(payloads[name], parts=(cut, *payloads[name].parts[1:]))
    refused(engine, manifest, payloads.values(), rf"version 2: {name}: a truncated delta")


def test_a_flipped_bit_of_a_whole_tensor_is_seen(parameters):
    manifest, payloads = prepare([Publisher(QUANTIZED)], parameters, 1)
    for payload in payloads[0]:
        for i, part in enumerate(payload.parts):
            damaged = part.copy()
            damaged.reshape(-1)[-1] ^= 1
            parts = (*payload.parts[:i], damaged, *payload.parts[i + 1 :])
            others = [p for p in payloads[0] if p.name != payload.name]
            refused(Receiver(), manifest, [replace(payload, parts=parts), *others], f"fingerprint of {payload.name}")


def test_swapped_tensors_of_one_shape_are_seen(second):
    engine, manifest, payloads = second
    other = Q_PROJ.replace("0", "1")
    swapped = [replace(payloads[Q_PROJ], name=other), replace(payloads[other], name=Q_PROJ)]
    refused(engine, manifest, [p for p in payloads.values() if p.name not in (Q_PROJ, other)] + swapped, "fingerprint")


def test_a_dropped_bucket_is_seen(parameters):
    manifest, payloads = prepare(publishers_for(), parameters, 1)
    with pytest.raises(SyncError, match="incomplete"):
        Receiver().load(manifest, payloads[1:])
    publishers, engine = publishers_for(), Receiver()
    engine.load(*prepare(publishers, parameters, 1))
    move(parameters)
    publishers[0].bucket_bytes = 5000
    manifest, payloads = prepare(publishers, parameters, 2, 1)
    for dropped in range(len(payloads)):
        late = Receiver()
        late.held = engine.held
        with pytest.raises(SyncError, match="fingerprint"):
            late.load(manifest, payloads[:dropped] + payloads[dropped + 1 :])
        assert late.version is None
    engine.load(manifest, payloads)


def test_a_stale_base_is_seen(second, parameters):
    engine, manifest, payloads = second
    refused(engine, replace(manifest, base_version=0), payloads.values(), "a delta to version 1, expected one to 0")
    refused(engine, replace(manifest, base_version=None), payloads.values(), "expected one to None")
    move(parameters)
    engine.load(*prepare([Publisher(QUANTIZED)], parameters, 7))  # the numbers agree, the weights do not
    refused(engine, manifest, payloads.values(), "fingerprint")


def test_a_base_in_full_precision_takes_no_bfloat16_delta(second, parameters):
    engine, manifest, payloads = second
    engine.load(*prepare([Publisher(QUANTIZED)], parameters, 1, unquantized="float32"))
    refused(engine, manifest, payloads.values(), f"{EMBEDDING}: .* bfloat16 does not hold")


@pytest.mark.parametrize(
    ("base", "match"),
    [
        ((np.zeros((96, 96), np.uint8),), "a delta for 2 arrays"),
        ((np.zeros((96, 95), np.uint8), np.ones((96, 1), np.float32)), "a delta for 2 arrays"),
        ((np.zeros((96, 96), np.uint8), np.ones((95, 1), np.float32)), "its base has 95"),
        ((np.zeros((96, 96), np.float32), np.ones((96, 1), np.float32)), "cannot be added to float32"),
        ((np.zeros((96, 96), np.uint8), np.ones((96, 1), np.float64)), "cannot be added to float64"),
        ((), "a delta for 2 arrays"),
    ],
)
def test_a_base_of_another_shape_is_refused(second, base, match):
    engine, manifest, payloads = second
    engine.held[Q_PROJ] = base
    refused(engine, manifest, payloads.values(), f"version 2: {Q_PROJ}: .*{match}")


def test_unknown_payloads_are_refused(second):
    engine, manifest, payloads = second
    for wrong in ({"encoding": "float16"}, {"encoding": "float32"}, {"parts": payloads[Q_PROJ].parts[:1]}):
        damaged = payloads | {Q_PROJ: replace(payloads[Q_PROJ], **wrong)}
        refused(engine, manifest, damaged.values(), f"version 2: {Q_PROJ}: unknown payload")
    wide = replace(payloads[EMBEDDING], parts=(np.zeros(SHAPES[EMBEDDING], np.uint32),))
    refused(engine, manifest, [wide], "unknown payload: uint32 in bfloat16")
    flat = replace(payloads[EMBEDDING], parts=(np.zeros(48000, np.uint16),))
    refused(engine, manifest, [flat], r"shape \(48000,\) was sent")


def test_a_tensor_sent_twice_or_not_listed_is_refused(second):
    engine, manifest, payloads = second
    refused(engine, manifest, [*payloads.values(), payloads[Q_PROJ]], f"version 2: {Q_PROJ}: sent twice")
    other = replace(payloads[Q_PROJ], name="other.weight")
    refused(engine, manifest, [*payloads.values(), other], "version 2: other.weight: the manifest does not list it")


# --- size --------------------------------------------------------------------------------------------------------


def test_a_step_of_training_takes_less_than_a_twentieth_of_bfloat16(parameters):
    """20 updates of AdamW at 1e-6, on weights as large as those of small language models."""
    publishers, engine = publishers_for(), Receiver()
    engine.load(*prepare(publishers, parameters, 1))
    trained = [torch.nn.Parameter(p) for p in parameters.values()]
    optimizer = torch.optim.AdamW(trained, lr=1e-6)
    for _ in range(20):
        for p in trained:
            p.grad = torch.randn(p.shape)
        optimizer.step()
    manifest, payloads = prepare(publishers, {n: p.detach() for n, p in zip(SHAPES, trained, strict=True)}, 2, 1)
    engine.load(manifest, payloads)
    sent = sum(record.bytes for record in manifest.tensors)
    assert 0 < sent < sum(record.float32_bytes for record in manifest.tensors) / 40
    assert sent == sum(payload.bytes for bucket in payloads for payload in bucket)
