"""The sender: tensors shared out over ranks and buckets, codes counted, damage impossible to assemble."""

import numpy as np
import pytest
import torch

from qurl_ray.errors import QuantizationError, SyncError
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.quantize import quantize
from qurl_ray.quant.units import Unit, units
from qurl_ray.weights.stream import Publisher, assemble_manifest, count_codes
from tests.conftest import arrays_of

INT8 = FORMATS["int8"]


def names_of(model) -> dict[str, Unit]:
    return units(model, (r"lm_head\.",))


def records_of(buckets):
    return tuple(record for bucket in buckets for record in bucket.records)


def payloads_of(buckets):
    return {payload.name: payload for bucket in buckets for payload in bucket.payloads}


def drawn(publisher, model, fmt=INT8, version=1, **options):
    return list(publisher.prepare(model.named_parameters(), fmt, version=version, **options))


def move(model, share: float = 0.01) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + share * torch.randn(p.shape))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_together_send_every_tensor_once(model, ranks):
    parts = [records_of(drawn(Publisher(names_of(model), rank=r, ranks=ranks), model)) for r in range(ranks)]
    manifest = assemble_manifest(4, INT8, parts)
    assert sorted(r.name for r in manifest.tensors) == sorted(name for name, _ in model.named_parameters())
    assert {r.name for r in manifest.tensors if r.format == "int8"} == names_of(model).keys()
    alone = records_of(drawn(Publisher(names_of(model)), model))
    assert {r.name: r.fingerprint for r in manifest.tensors} == {r.name: r.fingerprint for r in alone}
    if ranks > 1:
        with pytest.raises(SyncError, match="sent twice"):
            assemble_manifest(4, INT8, [parts[0], parts[0]])


@pytest.mark.parametrize("unquantized", ["float32", "bfloat16", "float16"])
def test_what_is_sent_is_a_copy(model, unquantized):
    sent = payloads_of(drawn(Publisher(names_of(model)), model, None, unquantized=unquantized))
    before = sent["model.norm.weight"].parts[0].copy()
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    assert (sent["model.norm.weight"].parts[0] == before).all()


def test_int8_sends_a_quarter_of_the_quantized_bytes(model):
    records = records_of(drawn(Publisher(names_of(model)), model))
    quantized = [r for r in records if r.format == "int8"]
    assert sum(r.bytes for r in quantized) / sum(r.float32_bytes for r in quantized) < 0.27
    wide = torch.randn(192, 576)
    (record,) = records_of(Publisher({"wide"}).prepare([("wide", wide)], INT8, version=1))
    assert record.bytes == 192 * 576 + 4 * 192
    assert record.bytes <= 0.26 * record.float32_bytes
    assert record.float32_bytes == 4 * 192 * 576


def test_changed_codes_are_counted_against_the_version_before(model):
    publisher = Publisher(names_of(model))
    codes, changed = count_codes(records_of(drawn(publisher, model)))
    assert changed.total() == 0
    before = {name: quantize(p, INT8).codes for name, p in model.named_parameters() if name in names_of(model)}
    for version, base in ((2, None), (3, 2)):  # sent whole, sent as deltas: the same count
        move(model)
        after = {name: quantize(p, INT8).codes for name, p in model.named_parameters() if name in before}
        expected = sum(int((after[name] != before[name]).sum()) for name in before)
        codes, changed = count_codes(records_of(drawn(publisher, model, version=version, base_version=base)))
        assert changed.total() == expected > 0
        assert codes.keys() == {f"{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up", "down")}
        assert codes.total() == sum(codes.numel() for codes in before.values())
        before = after


def test_a_tensor_that_is_quantized_already_is_sent_as_it_is(model, monkeypatch):
    q = quantize(torch.randn(8, 16), INT8)
    monkeypatch.setattr("qurl_ray.weights.stream.quantize", lambda *_: pytest.fail("quantized a second time"))
    (bucket,) = Publisher({"a.weight"}).prepare([("a.weight", q)], INT8, version=1)
    codes, scale = bucket.payloads[0].parts
    assert (codes == arrays_of(q)[0]).all()
    assert (scale.view(np.float32) == arrays_of(q)[1]).all()
    (without,) = Publisher({}).prepare([("a.weight", q)], None, version=1)
    assert without.records[0] == bucket.records[0]


def test_buckets_keep_the_order_and_their_limit():
    sizes = [10, 20, 70, 200, 5, 95, 1]  # values of 4 bytes; the limit is 100 of them
    parameters = [(f"p{i}", torch.randn(size)) for i, size in enumerate(sizes)]
    buckets = list(Publisher({}, bucket_bytes=400).prepare(parameters, None, version=1))
    assert [[r.shape[0] for r in b.records] for b in buckets] == [[10, 20, 70], [200], [5, 95], [1]]
    assert [b.bytes for b in buckets] == [400, 800, 400, 4]
    assert [p.name for b in buckets for p in b.payloads] == [name for name, _ in parameters]
    assert not list(Publisher({}, rank=1, ranks=2).prepare(parameters[:1], None, version=1))


def test_nothing_is_quantized_before_its_bucket_is_asked_for():
    seen = []

    def parameters():
        for i in range(4):
            seen.append(i)
            yield f"p{i}", torch.randn(10)

    buckets = Publisher({}, bucket_bytes=40).prepare(parameters(), None, version=1)
    assert not seen
    next(buckets)
    assert seen == [0, 1]


def test_what_float16_cannot_hold_is_refused_by_name():
    values = torch.tensor([1.0, -70_000.0, torch.inf])
    with pytest.raises(SyncError, match="gain has values beyond 65504"):
        list(Publisher({}).prepare([("gain", values)], None, version=1, unquantized="float16"))
    list(Publisher({}).prepare([("gain", values[[0, 2]])], None, version=1, unquantized="float16"))


def test_bfloat16_is_rounded_to_nearest_and_ties_to_even():
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0xBF808000], np.uint32)
    parameters = [("p", torch.from_numpy(bits.view(np.float32)))]
    (bucket,) = Publisher({}).prepare(parameters, None, version=1, unquantized="bfloat16")
    assert bucket.payloads[0].parts[0].tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0xBF80]
    assert 2 * bucket.records[0].bytes == bucket.records[0].float32_bytes == 20


def test_a_delta_is_made_only_to_what_was_sent_last_in_the_same_form(model):
    publisher = Publisher(names_of(model))

    def bases(version, base, fmt=INT8, unquantized="bfloat16"):
        buckets = drawn(publisher, model, fmt, version, base_version=base, unquantized=unquantized)
        return {record.base_version for record in records_of(buckets)}

    assert bases(1, None) == {None}
    assert bases(2, 1) >= {1}
    assert bases(3, 1) == {None}
    assert bases(4, 3) >= {3}
    assert bases(5, 4, unquantized="float32") == {None}
    assert bases(6, 5, fmt=FORMATS["fp8"], unquantized="float32") == {None}
    assert bases(7, 6, fmt=None, unquantized="float32") == {None}
    assert bases(8, 7, fmt=None, unquantized="float32") >= {7}
    assert bases(9, 8, fmt=INT8) == {None}


def test_a_version_that_was_not_drawn_to_its_end_is_no_base(model):
    publisher = Publisher(names_of(model), bucket_bytes=1)
    with pytest.raises(SyncError, match="nothing to resend"):
        list(publisher.resend())
    drawn(publisher, model)
    next(publisher.prepare(model.named_parameters(), INT8, version=2, base_version=1))
    with pytest.raises(SyncError, match="nothing to resend"):
        list(publisher.resend())
    assert {r.base_version for r in records_of(drawn(publisher, model, version=3, base_version=2))} == {None}
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(QuantizationError):
        drawn(publisher, model, version=4, base_version=3)
    with pytest.raises(SyncError, match="nothing to resend"):
        list(publisher.resend())


def test_resending_quantizes_nothing_and_sends_the_same_whole(model, monkeypatch):
    publisher = Publisher(names_of(model), bucket_bytes=100_000)
    drawn(publisher, model, unquantized="bfloat16")
    move(model)
    delta = drawn(publisher, model, version=2, base_version=1, unquantized="bfloat16")
    fresh = drawn(Publisher(names_of(model), bucket_bytes=100_000), model, version=2, unquantized="bfloat16")
    with monkeypatch.context() as patch:
        patch.setattr("qurl_ray.weights.stream.quantize", lambda *_: pytest.fail("quantized again"))
        for again in (list(publisher.resend()), list(publisher.resend())):
            assert [r.bytes for r in records_of(again)] == [r.bytes for r in records_of(fresh)]
            assert [r.changed for r in records_of(again)] == [r.changed for r in records_of(delta)]
            assert [r.fingerprint for r in records_of(again)] == [r.fingerprint for r in records_of(fresh)]
            assert [len(b.records) for b in again] == [len(b.records) for b in fresh]
            for name, payload in payloads_of(again).items():
                assert payload.base_version is None
                assert all(map(np.array_equal, payload.parts, payloads_of(fresh)[name].parts))
    move(model)
    assert {r.base_version for r in records_of(drawn(publisher, model, version=3, base_version=2))} == {None}  # float32


def test_deltas_to_different_versions_make_no_manifest(model):
    publisher = Publisher(names_of(model))
    drawn(publisher, model)
    records = records_of(drawn(publisher, model, version=2, base_version=1))
    assert assemble_manifest(2, INT8, [records]).base_version == 1
    assert assemble_manifest(1, INT8, [records_of(drawn(Publisher(names_of(model)), model))]).base_version is None
    publisher = Publisher(names_of(model))
    drawn(publisher, model, version=5)
    others = records_of(drawn(publisher, model, version=2, base_version=5))
    with pytest.raises(SyncError, match="different versions"):
        assemble_manifest(2, INT8, [records[:3], others[3:]])


@pytest.mark.parametrize("ranks", [1, 2])
def test_codes_of_a_tied_embedding_are_sent_beside_it_by_its_rank(ranks):
    embedding = torch.randn(40, 32)
    parameters = [("a", torch.randn(3)), ("model.embed_tokens.weight", embedding), ("b", torch.randn(5))]
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    parts = [
        records_of(Publisher({"lm_head.weight"}, rank=r, ranks=ranks, tied=tied).prepare(parameters, INT8, version=1))
        for r in range(ranks)
    ]
    assert [[r.name for r in part] for part in parts] == (
        [["a", *reversed(tied.popitem()), "b"]] if ranks == 1 else [["a", "b"], [*reversed(tied.popitem())]]
    )
    records = {r.name: r for part in parts for r in part}
    assert records["lm_head.weight"].format == "int8"
    assert records["lm_head.weight"].bytes == 40 * 32 + 4 * 40
    assert records["model.embed_tokens.weight"].format == "none"
    assert sum(r.float32_bytes for r in records.values()) == 4 * (3 + 40 * 32 + 5)  # the head is not sent twice there
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    for publisher, fmt in (
        (Publisher(dict.fromkeys(["lm_head.weight"]), tied=tied), None),
        (Publisher({}, tied=tied), INT8),
    ):
        assert len(records_of(publisher.prepare(parameters, fmt, version=1))) == 3
