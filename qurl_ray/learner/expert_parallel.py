"""Expert parallelism: each rank computes some of the experts, for the tokens of all ranks.

At rest, experts are divided by rows over all ranks, as FSDP2 divides other parameters, so that optimizer, checkpoints
and syncs know no difference. In a pass, where FSDP2 gathers a block's experts on every rank, each rank gets its own
alone: rank r of n those from r · E/n on.

    rows of all experts ─► whole own experts      one message from each rank to each, and back for gradients
    tokens, sorted by expert ─► their experts' ranks ─► products ─► back, in the order in which they left

A row's products do not depend on the others (numerics), so results have the bits of one rank.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import distributed, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from qurl_ray.learner.backend import world
from qurl_ray.learner.flow import as_for_a_linear
from qurl_ray.learner.state import own_rows
from qurl_ray.policy.experts import MixtureMlp, each_by_itself


def divide_experts(mixture: MixtureMlp, mesh: DeviceMesh) -> list[nn.Parameter]:
    """Divide a mixture's experts by rows over the ranks, in place, and have it compute in parallel. Returns their
    parameters, which a backend must leave as they are."""
    rank, ranks = world()
    for expert in mixture.experts:
        for part in expert.modules():
            for name, whole in list(part.named_parameters(recurse=False)):
                first, end = own_rows(len(whole), rank, ranks)
                own = DTensor.from_local(
                    whole.detach()[first:end].clone(),
                    mesh,
                    [Shard(0)],
                    run_check=False,
                    shape=whole.shape,
                    stride=whole.stride(),
                )
                setattr(part, name, nn.Parameter(own, requires_grad=whole.requires_grad))
    mixture.compute = ExpertParallel(mixture.experts)
    return list(mixture.experts.parameters())


class ExpertParallel:
    """The products of a mixture's experts, on all ranks together. Collective.

    Args:
        experts: modules of one kind, as many on each rank.
    """

    def __init__(self, experts: nn.ModuleList) -> None:
        self._experts = experts
        self._each = len(experts) // world()[1]

    def __call__(self, rows_Rd: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the results [R, d] of rows that are sorted by expert, of which each has so many."""
        rank, ranks = world()
        mine = range(rank * self._each, (rank + 1) * self._each)
        weights = self._collected(mine)
        own_E = torch.tensor(counts, device=rows_Rd.device)
        of_ranks = [torch.empty_like(own_E) for _ in range(ranks)]
        distributed.all_gather(of_ranks, own_E)
        counts_nE = torch.stack(of_ranks).tolist()
        leaving = [sum(counts[first : first + self._each]) for first in range(0, len(counts), self._each)]
        coming_ne = [row[mine.start : mine.stop] for row in counts_nE]
        coming = [sum(row) for row in coming_ne]
        received_Md = _Exchange.apply(as_for_a_linear(rows_Rd), leaving, coming)
        experts_e = torch.arange(self._each)
        # They come sorted by rank and, of each rank, by expert.
        of_rows_M = torch.cat([experts_e.repeat_interleave(torch.tensor(row)) for row in coming_ne])
        order = of_rows_M.argsort(stable=True).to(rows_Rd.device)
        experts = [self._expert(index, own) for index, own in zip(mine, weights, strict=True)]
        of_experts = [sum(row[place] for row in coming_ne) for place in range(self._each)]
        computed_Md = each_by_itself(received_Md[order], of_experts, experts)
        if not len(order):  # nothing came; but the backward pass, too, must exchange with the others
            computed_Md = torch.cat([computed_Md, received_Md])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return _Exchange.apply(computed_Md[back], coming, leaving)

    def _expert(self, index: int, weights: dict[str, torch.Tensor]) -> Any:
        return lambda x: functional_call(self._experts[index], weights, (x,))

    def _collected(self, mine: range) -> list[dict[str, torch.Tensor]]:
        """Return the whole parameters of this rank's experts, by name."""
        parameters = [dict(expert.named_parameters()) for expert in self._experts]
        local = [cast(DTensor, p).to_local() for of_expert in parameters for p in of_expert.values()]
        shapes = [parameter.shape for parameter in parameters[0].values()]
        whole = iter(_Collected.apply(shapes, self._each, *local))
        return [{name: next(whole) for name in parameters[index]} for index in mine]


def _exchanged(x: torch.Tensor, leaving: Sequence[int], coming: Sequence[int]) -> torch.Tensor:
    """Send the first rows of x to rank 0, the next to rank 1 and so on; return what came, in the order of ranks."""
    out = x.new_empty(sum(coming), *x.shape[1:])
    distributed.all_to_all_single(out, x.contiguous(), list(coming), list(leaving))
    return out


class _Exchange(torch.autograd.Function):
    """`_exchanged`, with gradients that take the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, leaving: Sequence[int], coming: Sequence[int]) -> torch.Tensor:
        ctx.leaving, ctx.coming = leaving, coming
        return _exchanged(x, leaving, coming)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _exchanged(grad, ctx.coming, ctx.leaving), None, None


class _Collected(torch.autograd.Function):
    """Whole parameters of a rank's experts, from the rows of all experts that each rank has; gradients go back to the
    ranks of their rows."""

    @staticmethod
    def forward(ctx: Any, shapes: Sequence[torch.Size], each: int, *local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.shapes, ctx.each = shapes, each
        rank, ranks = world()
        sizes = [shape[1:].numel() for shape in shapes]
        held = [
            [end - first for first, end in (own_rows(shape[0], r, ranks) for r in range(ranks))] for shape in shapes
        ]
        ctx.held, ctx.sizes = held, sizes
        leaving = [each * sum(rows[rank] * size for rows, size in zip(held, sizes, strict=True))] * ranks
        coming = [each * sum(rows[r] * size for rows, size in zip(held, sizes, strict=True)) for r in range(ranks)]
        flat = _exchanged(torch.cat([part.reshape(-1) for part in local]), leaving, coming)
        ctx.leaving, ctx.coming = leaving, coming
        of_ranks = [
            iter(part.split([rows[r] * size for _ in range(each) for rows, size in zip(held, sizes, strict=True)]))
            for r, part in enumerate(flat.split(coming))
        ]
        return tuple(torch.cat([next(part) for part in of_ranks]).view(shape) for _ in range(each) for shape in shapes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        rank, ranks = world()
        parts = [
            grad.reshape(-1).split([rows * size for rows in held])
            for grad, (held, size) in zip(grads, list(zip(ctx.held, ctx.sizes, strict=True)) * ctx.each, strict=True)
        ]
        flat = torch.cat([part[r] for r in range(ranks) for part in parts])
        own = _exchanged(flat, ctx.coming, ctx.leaving)
        sizes = [rows[rank] * size for rows, size in zip(ctx.held, ctx.sizes, strict=True)]
        pieces = own.split(sizes * (ctx.each * ranks))
        shapes = [(rows[rank], *shape[1:]) for rows, shape in zip(ctx.held, ctx.shapes, strict=True)]
        local = [p.view(shape) for p, shape in zip(pieces, shapes * (ctx.each * ranks), strict=True)]
        return None, None, *local
