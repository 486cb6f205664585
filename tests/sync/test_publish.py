"""The sender: tensors shared out over ranks, codes counted, damage impossible to assemble."""

import pytest
import torch

from qurl_ray.errors import SyncError
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.quantize import quantize
from qurl_ray.quant.select import quantized_linears
from qurl_ray.sync.publish import Publisher, assemble

INT8 = FORMATS["int8"]


def names_of(model) -> set[str]:
    return {f"{name}.weight" for name in quantized_linears(model, (r"lm_head\.",))}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_together_send_every_tensor_once(model, ranks):
    parts = [
        Publisher(names_of(model), rank=r, ranks=ranks).prepare(model.named_parameters(), INT8) for r in range(ranks)
    ]
    manifest = assemble(4, INT8, [part.records for part in parts])
    assert sorted(r.name for r in manifest.tensors) == sorted(name for name, _ in model.named_parameters())
    assert {r.name for r in manifest.tensors if r.format == "int8"} == names_of(model)
    alone = Publisher(names_of(model)).prepare(model.named_parameters(), INT8)
    assert {r.name: r.fingerprint for r in manifest.tensors} == {r.name: r.fingerprint for r in alone.records}
    if ranks > 1:
        with pytest.raises(SyncError, match="sent twice"):
            assemble(4, INT8, [parts[0].records, parts[0].records])


def test_what_is_sent_is_a_copy(model):
    part = Publisher(names_of(model)).prepare(model.named_parameters(), None)
    before = part.buffers["model.norm.weight"][0].copy()
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    assert (part.buffers["model.norm.weight"][0] == before).all()


def test_int8_sends_a_quarter_of_the_quantized_bytes(model):
    records = Publisher(names_of(model)).prepare(model.named_parameters(), INT8).records
    sent = sum(r.bytes for r in records if r.format == "int8")
    full = sum(p.numel() * 4 for name, p in model.named_parameters() if name in names_of(model))
    assert sent / full < 0.27


def test_changed_codes_are_counted_against_the_version_before(model):
    publisher = Publisher(names_of(model))
    assert publisher.prepare(model.named_parameters(), INT8).codes_changed.total() == 0
    before = {name: quantize(p, INT8).codes for name, p in model.named_parameters() if name in names_of(model)}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 0.01 * torch.randn(p.shape))
    expected = sum(
        int((quantize(p, INT8).codes != before[name]).sum()) for name, p in model.named_parameters() if name in before
    )
    part = publisher.prepare(model.named_parameters(), INT8)
    assert part.codes_changed.total() == expected > 0
    assert part.codes.keys() == {f"{kind}_proj" for kind in ("q", "k", "v", "o", "gate", "up", "down")}
    assert part.codes.total() == sum(codes.numel() for codes in before.values())
