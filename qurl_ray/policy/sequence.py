"""Sequence parallelism: the ranks of a group share the tokens of a row, and in attention its heads.

    tokens of a rank, all heads ─► exchange ─► all tokens, heads of a rank ─► attention ─► exchange ─► tokens of a rank

As in DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509), but heads and tokens need not divide by the number of ranks.
A head is computed whole, and a token depends on its own sequence alone (policy.attention), so that log-probs have the
same bits as those of one rank. Only the gradients of weights are sums in another order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroup:
    """The ranks that share the tokens of each row."""

    process_group: ProcessGroup
    rank: int
    ranks: int

    def division(self, positions_N: torch.Tensor, before_M: torch.Tensor) -> "Division":
        """Divide a row.

        Args:
            positions_N: position of each token in its sequence.
            before_M: place in the row of the token before each token that is scored.
        """
        tokens = _shares(len(positions_N), self.ranks)
        ends = torch.tensor(tokens, device=before_M.device).cumsum(0)
        owner_M = torch.bucketize(before_M, ends, right=True)
        order_M = owner_M.argsort(stable=True)
        scored = torch.bincount(owner_M, minlength=self.ranks).tolist()
        first, done = sum(tokens[: self.rank]), sum(scored[: self.rank])
        own_m = order_M[done : done + scored[self.rank]]
        return Division(
            group=self,
            positions_1N=positions_N[None],
            tokens=tokens,
            own=slice(first, first + tokens[self.rank]),
            own_m=own_m,
            before_m=before_M[own_m] - first,
            scored=scored,
            place_M=order_M.argsort(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A row of N tokens, of which M are scored, as a group divides it; this rank has n and m of them."""

    group: SequenceGroup
    positions_1N: torch.Tensor
    """Positions of all tokens in their sequences."""
    tokens: list[int]
    """Number of tokens of each rank."""
    own: slice
    """Places of this rank's tokens in the row."""
    own_m: torch.Tensor
    """Places, among the scored tokens, of those that this rank scores."""
    before_m: torch.Tensor
    """Place among this rank's tokens of the one before each of them."""
    scored: list[int]
    """Number of tokens that each rank scores."""
    place_M: torch.Tensor
    """Place of each scored token among those of the ranks, one rank after the other."""

    def to_heads(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value of all tokens, for this rank's heads. Collective.

        A key head that belongs to query heads of several ranks is sent to each. Where it has not the same number of
        query heads as the others, it is repeated.

        Args:
            query: [1, H, n, d].
            key, value: [1, KV, n, d].

        Returns:
            [1, h, N, d], and twice [1, kv, N, d], h a multiple of kv.

        Raises:
            ValueError: there are more ranks than heads.
        """
        H, _, d = query.shape[1:]
        groups = H // key.shape[1]
        spans = _spans(H, self.group.ranks)
        keys = [(first // groups, (end - 1) // groups + 1) for first, end in spans]
        parts = [
            torch.cat([query[0, first:end], key[0, k:e], value[0, k:e]])
            for (first, end), (k, e) in zip(spans, keys, strict=True)
        ]
        (first, end), (k, e) = spans[self.group.rank], keys[self.group.rank]
        heads = (end - first) + 2 * (e - k)
        received = self._exchange(parts, [(heads, tokens, d) for tokens in self.tokens])
        query, key, value = torch.cat(received, dim=1)[None].split([end - first, e - k, e - k], dim=1)
        if e - k > 1 and (first % groups or end % groups):
            of_heads = torch.arange(first, end, device=query.device) // groups - k
            key, value = key[:, of_heads], value[:, of_heads]
        return query, key, value

    def heads(self, count: int) -> slice:
        """Return this rank's heads, of so many."""
        return slice(*_spans(count, self.group.ranks)[self.group.rank])

    def to_tokens(self, out: torch.Tensor, heads: int) -> torch.Tensor:
        """Return the attention of this rank's tokens, [1, n, heads, d], from that of its heads, [1, N, h, d].
        Collective."""
        spans = _spans(heads, self.group.ranks)
        n, d = self.tokens[self.group.rank], out.shape[-1]
        received = self._exchange(out[0].split(self.tokens), [(n, end - first, d) for first, end in spans])
        return torch.cat(received, dim=1)[None]

    def gather(self, values_m: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks for the tokens that they scored, [M], in the row's order. Collective.

        All ranks get the same values; the gradient of each value is that of the rank that scored the token.
        """
        return _Gather.apply(values_m, self.scored, self.group)[self.place_M]

    def _exchange(self, parts: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Send one part to each rank, and return the part from each, of these shapes."""
        sent = [part.numel() for part in parts]
        received = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.cat([part.reshape(-1) for part in parts])
        values = _AllToAll.apply(flat, sent, received, self.group.process_group)
        return [part.view(shape) for part, shape in zip(values.split(received), shapes, strict=True)]


def _shares(count: int, ranks: int) -> list[int]:
    """Return `count` as so many numbers that differ by at most 1."""
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]


def _spans(heads: int, ranks: int) -> list[tuple[int, int]]:
    """Return the first of each rank's heads, and the one after its last."""
    if ranks > heads:
        raise ValueError(f"{ranks} ranks cannot share {heads} heads of attention")
    return list(pairwise(accumulate(_shares(heads, ranks), initial=0)))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, flat: torch.Tensor, sent: list[int], received: list[int], group: ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        return _all_to_all(flat, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _all_to_all(grad.contiguous(), received, sent, ctx.group), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_m: torch.Tensor, scored: list[int], group: SequenceGroup) -> torch.Tensor:
        first = sum(scored[: group.rank])
        ctx.own = slice(first, first + scored[group.rank])
        return _all_to_all(values_m.repeat(group.ranks), [len(values_m)] * group.ranks, scored, group.process_group)

    @staticmethod
    def backward(ctx: Any, grad_M: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad_M[ctx.own], None, None


def _all_to_all(flat: torch.Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> torch.Tensor:
    values = flat.new_empty(sum(received))
    distributed.all_to_all_single(values, flat, received, sent, group=group)
    return values
