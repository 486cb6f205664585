"""Formats with arrays of their own, one of them from outside the package, travel and are held by their own bytes."""

import numpy as np
import pytest
import torch

from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.engines.vllm.shards import (
    TensorShard,
    cut,
    fingerprint_pieces,
    join_fingerprints,
    join_shards,
)
from qurl_ray.errors import QuantizationError, SyncError
from qurl_ray.policy.load import load_model
from qurl_ray.quant.fingerprint import fingerprint
from qurl_ray.quant.formats import FORMATS, Format
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import QTensor, concatenate, dequantize, quantize
from qurl_ray.quant.units import units
from qurl_ray.transfer.shared_memory import opened, tensor_at
from qurl_ray.weights.local import send_into
from qurl_ray.weights.messages import Header
from qurl_ray.weights.receiver import decode_buckets
from qurl_ray.weights.stream import Publisher, assemble_manifest
from qurl_ray.weights.transports.direct import SharedMemory
from qurl_ray.weights.transports.protocol import Link
from tests.conftest import arrays_of, requests_for
from tests.weights.nibbles import NIBBLES


@pytest.fixture(params=["nibbles", "nvfp4", "mxfp4", "mxfp8"])
def fmt(monkeypatch, request) -> Format:
    monkeypatch.setitem(FORMATS, "nibbles", NIBBLES)
    return FORMATS[request.param]


@pytest.fixture
def weight(fmt) -> QTensor:
    return quantize(torch.randn(24, 64, generator=torch.Generator().manual_seed(3)), fmt)


def test_a_weight_is_its_values_to_half_a_step(weight, fmt):
    w = torch.randn(24, 64, generator=torch.Generator().manual_seed(3))
    assert weight.shape == w.shape
    assert [(part.dtype, part.shape) for part in arrays_of(weight)] == [
        (part.dtype, part.shape) for part in fmt.parts(w.shape)
    ]
    # Of E2M1's steps the last is a third of its largest value, and MX's scales may leave out a quarter of a block's.
    share = {"nibbles": 1 / 7, "nvfp4": 1 / 3, "mxfp4": 1 / 2, "mxfp8": 1 / 4}[fmt.name]
    amax = w.unflatten(1, (-1, fmt.group)).abs().amax(dim=2)
    step = amax.mul(share).repeat_interleave(fmt.group, dim=1) * 1.1
    assert ((dequantize(weight) - w).abs() <= step / 2 + 1e-3).all()
    linear = QuantizedLinear(weight, None)
    x = torch.randn(3, 64)
    torch.testing.assert_close(linear(x), x @ dequantize(weight).T)
    assert all(map(torch.equal, linear.resident().parts, weight.parts))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(fmt, value):
    w = torch.ones(4, 64)
    w[1, 2] = value
    with pytest.raises(QuantizationError, match=f"{fmt.name}: weight has nan or inf"):
        quantize(w, fmt)
    quantize(w, fmt, finite=True)  # the caller knows better, and nothing waits for a GPU


@pytest.mark.parametrize("bucket_bytes", [1 << 26, 5000])
def test_an_engine_takes_it_whole_and_as_changes(tiny_spec, tokenizer, fmt, bucket_bytes):
    model, engine = load_model(tiny_spec), TorchEngine(tiny_spec, slots=8)
    names = units(model, [r"lm_head\."])
    publisher = Publisher(names, bucket_bytes=bucket_bytes)
    answers, whole = [], 0
    for version in (1, 2, 3):
        manifest = send_into(
            publisher, engine, model.named_parameters(), fmt, version=version, base_version=version - 1 or None
        )
        for name, parameter in model.named_parameters():
            if name in names:
                assert all(map(np.array_equal, engine.resident(name), arrays_of(quantize(parameter, fmt))))
        whole = whole or {record.name: record for record in manifest.tensors}["model.layers.0.mlp.up_proj.weight"].bytes
        answers.append([c.logprobs.tolist() for c in engine.generate(requests_for(tokenizer, 2, 2), version=version)])
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[:3] *= 1.5
    assert engine.kernels() == [f"emulation of {fmt.name}"]
    assert answers[0] != answers[1]
    records = {record.name: record for record in manifest.tensors}
    assert manifest.base_version == 2
    changed = records["model.layers.0.mlp.up_proj.weight"]
    assert 0 < changed.bytes < whole // 4
    assert records["model.layers.0.mlp.down_proj.weight"].changed == 0


@pytest.mark.parametrize("part", [0, 1, 2])
def test_damage_to_any_of_its_arrays_is_seen(tiny_spec, fmt, part):
    if part == len(fmt.parts((32, 32))):
        pytest.skip("it has two arrays")
    model, engine = load_model(tiny_spec), TorchEngine(tiny_spec, slots=8)
    names = units(model, [r"lm_head\."])
    buckets = list(Publisher(names).prepare(model.named_parameters(), fmt, version=1))
    manifest = assemble_manifest(1, fmt, [bucket.records for bucket in buckets])
    payload = next(p for bucket in buckets for p in bucket.payloads if p.name.endswith("v_proj.weight"))
    payload.parts[part].view(np.uint8)[1, 0] ^= 1
    with pytest.raises(SyncError, match=r"v_proj.weight is .* in the engine"):
        engine.load(manifest, decode_buckets((bucket.payloads for bucket in buckets), manifest, engine.resident))
    assert engine.version is None


def test_shards_add_up_to_the_whole(weight, fmt):
    shards = [
        TensorShard(start=start, stop=start + 12, at=0, columns=columns)
        for start in (0, 12)
        for columns in ((0, 32), (32, 64))
    ]
    parts = [cut(weight, shard) for shard in shards]
    found = [(shard, arrays_of(part)) for shard, part in zip(shards, parts, strict=True)]
    whole = join_shards("w", tuple(weight.shape), fmt, found)
    assert all(map(np.array_equal, whole, arrays_of(weight)))
    pieces = [
        piece
        for shard, part in zip(shards, parts, strict=True)
        for piece in fingerprint_pieces(part.parts, tuple(weight.shape), shard, fmt)
    ]
    assert join_fingerprints("w", tuple(weight.shape), fmt, pieces) == fingerprint(*weight.parts)
    assert all(map(torch.equal, concatenate([weight.cut((0, 5)), weight.cut((5, 24))]).parts, weight.parts))
    with pytest.raises(QuantizationError, match=r"columns.* cut through"):
        weight.cut((0, 24), (0, 24))


def test_a_direct_transport_hands_over_its_bytes(weight, fmt):
    sent = []

    def call(message, _):
        sent.append(message)
        return lambda: {0: ("a process", 1)}

    link = Link(name="ipc", publisher=Publisher(dict.fromkeys(["w"])), call=call, host="", timeout_s=1)
    link.header = Header(version=1, attempt=0, rank=0, format=fmt.name, weight_max_code=fmt.weight_max)
    transport = SharedMemory(link)
    transport.begin()
    (value,) = [value for _, value in transport.staged([("w", dequantize(weight))], fmt, "float32")]
    transport.commit()
    (bucket,) = [message.bucket for message in sent if hasattr(message, "bucket")]
    ((name, format_name, places),) = bucket.items
    memory = torch.from_numpy(opened(bucket.source["memory"]["rank 0"]))
    arrived = QTensor.of([tensor_at(memory, place) for place in places], FORMATS[format_name])
    assert name == "w"
    assert all(map(torch.equal, arrived.parts, value.parts))
