"""Cutting codes and scales over ranks and fused layers, and putting them together again: no bit lost, none twice."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.engines.vllm.shards import (
    Partition,
    TensorShard,
    cut,
    fingerprint_pieces,
    fuse,
    join_fingerprints,
    join_shards,
    local_shards,
    read,
)
from qurl_ray.errors import QuantizationError, SyncError
from qurl_ray.quant.fingerprint import fingerprint
from qurl_ray.quant.formats import FORMATS, get_format
from qurl_ray.quant.quantize import dequantize, quantize
from tests.conftest import arrays_of


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_shards_of_attention_with_copied_heads_by_hand():
    # 4 query heads and 2 key heads of 8 rows on 4 ranks: rank 3 has query head 3, and the copy of key head 1.
    partitions = [Partition.share(8, 3, 4), Partition.share(8, 1, 2), Partition.share(8, 1, 2)]
    assert local_shards(partitions, 0) == [TensorShard(start=24, stop=32, at=0)]
    assert local_shards(partitions, 1) == [TensorShard(start=8, stop=16, at=8)]
    assert local_shards(partitions, 2) == [TensorShard(start=8, stop=16, at=16)]
    # As one tensor on disk, q | k | v lie at rows 0, 32 and 48 of 64.
    assert [(p.start, p.stop, p.at) for p in local_shards(partitions, None)] == [(24, 32, 0), (40, 48, 8), (56, 64, 16)]
    assert local_shards([Partition.share(8), Partition.share(4)], None) == [TensorShard(start=0, stop=12, at=0)]


@settings(deadline=None, max_examples=25)
@given(
    name=st.sampled_from(sorted(FORMATS)),
    ranks=st.sampled_from([1, 2, 4]),
    copies=st.sampled_from([1, 2, 4]),
    blocks=st.tuples(st.integers(1, 3), st.integers(1, 2)),
)
def test_column_parallel_shards_of_a_fused_layer_give_back_every_tensor(name, ranks, copies, blocks):
    fmt, copies = get_format(name), min(copies, ranks)
    parts = [quantize(weight(ranks * 128 * blocks[0], 256), fmt)]
    parts += [quantize(weight(ranks // copies * 128 * blocks[1], 256, seed), fmt) for seed in (1, 2)]
    found = {0: [], 1: [], 2: []}
    for rank in range(ranks):
        partitions = [Partition.share(128 * blocks[0], rank, ranks)]
        partitions += [Partition.share(128 * blocks[1], rank // copies, ranks // copies)] * 2
        own = [local_shards(partitions, index)[0] for index in range(3)]
        held = fuse([cut(part, shard) for part, shard in zip(parts, own, strict=True)])
        assert len(held) == 1
        for index, shard in enumerate(own):
            found[index].append((shard, tuple(array.numpy() for array in read(held, shard))))
    for index, part in enumerate(parts):
        for whole, sent in zip(join_shards("w", part.shape, fmt, found[index]), arrays_of(part), strict=True):
            np.testing.assert_array_equal(whole, sent)
        assert joined(part, found[index]) == fingerprint(*part.parts)


def joined(q, found) -> int:
    """The fingerprint from those of all ranks' shards."""
    shares = [fingerprint_pieces([*map(torch.tensor, arrays)], q.shape, shard, q.fmt) for shard, arrays in found]
    return join_fingerprints("w", q.shape, q.fmt, [piece for pieces in shares for piece in pieces])


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_row_parallel_shards_multiply_to_the_whole(name, ranks):
    fmt = get_format(name)
    q = quantize(weight(96, 512), fmt)
    width = 512 // ranks
    own = [TensorShard(start=0, stop=96, at=0, columns=(rank * width, (rank + 1) * width)) for rank in range(ranks)]
    shards = [cut(q, shard) for shard in own]
    torch.testing.assert_close(torch.cat([dequantize(s) for s in shards], dim=1), dequantize(q), rtol=0, atol=0)
    found = [(shard, arrays_of(s)) for shard, s in zip(own, shards, strict=True)]
    for whole, sent in zip(join_shards("w", q.shape, fmt, found), arrays_of(q), strict=True):
        np.testing.assert_array_equal(whole, sent)
    assert joined(q, found) == fingerprint(*q.parts)


def test_blocks_are_not_cut():
    block, int4 = quantize(weight(256, 256), get_format("fp8_block")), quantize(weight(256, 256), get_format("int4"))
    with pytest.raises(QuantizationError, match="fp8_block: rows 0 … 63 of 256 cut through blocks of 128"):
        cut(block, TensorShard(start=0, stop=64, at=0))
    for q in (block, int4):
        with pytest.raises(QuantizationError, match=r"columns 64 … 127 of 256 cut through blocks of 128.*lower tensor"):
            cut(q, TensorShard(start=0, stop=256, at=0, columns=(64, 128)))
    assert cut(int4, TensorShard(start=3, stop=64, at=0)).shape == (61, 256)


def test_tensors_whose_blocks_would_reach_over_a_border_stay_apart_in_a_layer():
    fmt = get_format("fp8_block")
    q, k, v = (quantize(weight(rows, 128, rows), fmt) for rows in (128, 64, 64))
    assert [len(part.codes) for part in fuse([q, k, v])] == [128, 64, 64]
    assert [len(part.codes) for part in fuse([q, k])] == [192]
    codes, scale = read([q, k, v], TensorShard(start=0, stop=64, at=192))
    assert torch.equal(codes.view(torch.uint8), v.codes.view(torch.uint8))
    assert torch.equal(scale, v.scale)
    with pytest.raises(QuantizationError, match="not in a layer of 256 rows"):
        read([q, k, v], TensorShard(start=0, stop=1, at=256))


def test_ranks_that_differ_or_lack_rows_are_noticed():
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    top, bottom = TensorShard(start=0, stop=2, at=0), TensorShard(start=2, stop=4, at=0)
    found = [(top, (values[:2],)), (bottom, (values[2:],)), (bottom, (values[2:],))]
    np.testing.assert_array_equal(join_shards("w", (4, 3), None, found)[0], values)
    with pytest.raises(SyncError, match="w: no rank holds some of its rows"):
        join_shards("w", (4, 3), None, found[1:])
    other = values.copy()
    other[3, 1] += 1
    with pytest.raises(SyncError, match=r"w: ranks hold different copies of rows 2 … 3"):
        join_shards("w", (4, 3), None, [*found, (bottom, (other[2:],))])
    bias = [(TensorShard(start=0, stop=3, at=0), (values[0],))]
    np.testing.assert_array_equal(join_shards("b", (3,), None, bias)[0], values[0])


def test_fingerprints_of_ranks_that_differ_or_lack_rows_are_noticed():
    values = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    top, bottom = TensorShard(start=0, stop=2, at=0), TensorShard(start=2, stop=4, at=0)
    pieces = [
        *fingerprint_pieces([values[:2]], (4, 3), top, None),
        *fingerprint_pieces([values[2:]], (4, 3), bottom, None),
    ]
    nothing = fingerprint_pieces([values[:0]], (4, 3), TensorShard(start=4, stop=4, at=0), None)  # small vocabularies
    assert join_fingerprints("w", (4, 3), None, [*pieces, pieces[1], *nothing]) == fingerprint(values)
    with pytest.raises(SyncError, match="w: no rank holds some of its rows"):
        join_fingerprints("w", (4, 3), None, pieces[1:])
    with pytest.raises(SyncError, match=r"w: ranks hold different copies of rows 2 … 3"):
        join_fingerprints("w", (4, 3), None, [*pieces, *fingerprint_pieces([values[:2]], (4, 3), bottom, None)])
    (bias,) = fingerprint_pieces([values[0]], (3,), TensorShard(start=0, stop=3, at=0), None)
    assert join_fingerprints("b", (3,), None, [bias]) == fingerprint(values[0])
