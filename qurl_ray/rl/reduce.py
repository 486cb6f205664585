"""Sums over micro-batches, updates and ranks. Sums are merged first and divided only once, at the end."""

from collections.abc import Iterable, Mapping

import torch


def merge(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Merge by key: sums, and maxima for keys that begin with "max_". A missing key is skipped, not taken as 0."""
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
    """Convert sums to floats, all at once, because on a GPU each conversion would wait for the device."""
    return dict(zip(sums, torch.stack([value.detach().double() for value in sums.values()]).tolist(), strict=True))


def moments(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Count, sum and sum of squares where `mask_BT`, float64 [3] on the CPU; they add up over batches and ranks."""
    chosen = values_BT[mask_BT].double()
    return torch.stack([torch.ones_like(chosen).sum(), chosen.sum(), chosen.square().sum()]).cpu()
