"""Sums over micro-batches, updates and ranks: merged first, divided once."""

from collections.abc import Iterable, Mapping

import torch


def merge(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Key by key: the sum, or the maximum for keys that begin with "max_". Missing keys count as absent, not as 0."""
    merged: dict[str, float] = {}
    for part in parts:
        for key, value in part.items():
            if key not in merged:
                merged[key] = value
            elif key.startswith("max_"):
                merged[key] = max(merged[key], value)
            else:
                merged[key] += value
    return merged


def as_floats(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """All at once: on a GPU every single one would wait for the device."""
    return dict(zip(sums, torch.stack([value.detach().double() for value in sums.values()]).tolist(), strict=True))


def moments(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """float64 [3], on the CPU: count, sum and sum of squares where `mask_BT`; they add up over batches and ranks."""
    chosen = values_BT[mask_BT].double()
    return torch.stack([torch.ones_like(chosen).sum(), chosen.sum(), chosen.square().sum()]).cpu()
