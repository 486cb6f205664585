"""Credit per token from a value model: generalised advantage estimation and the value model's own loss.

The value of token t is that of the state before it. The verifier's reward arrives with the last token, and the answer
ends there: nothing is bootstrapped, whether it ended by itself or was cut off.
"""

import torch

Sums = dict[str, torch.Tensor]


def gae(
    rewards_B: torch.Tensor, values_BT: torch.Tensor, mask_BT: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, both [B, T] in the values' dtype and 0 where masked. https://arxiv.org/abs/1506.02438

        delta_t = r_t + gamma·V_{t+1} - V_t        A_t = delta_t + gamma·lam·A_{t+1}        return_t = A_t + V_t

    Args:
        rewards_B: of the whole answer.
        mask_BT: bool, True on the answer's tokens, which are neighbours.
    """
    values_BT = torch.where(mask_BT, values_BT, 0.0)
    later_BT = torch.nn.functional.pad(mask_BT[:, 1:], (0, 1))
    last_BT = mask_BT & ~later_BT
    next_BT = torch.nn.functional.pad(values_BT[:, 1:], (0, 1))
    delta_BT = torch.where(last_BT, rewards_B[:, None].to(values_BT.dtype), 0.0) + gamma * next_BT - values_BT
    advantages_BT = torch.zeros_like(values_BT)
    ahead_B = torch.zeros_like(values_BT[:, 0])
    for t in range(values_BT.shape[1] - 1, -1, -1):
        ahead_B = torch.where(mask_BT[:, t], delta_BT[:, t] + gamma * lam * ahead_B, 0.0)
        advantages_BT[:, t] = ahead_B
    return advantages_BT, torch.where(mask_BT, advantages_BT + values_BT, 0.0)


def moments(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """float64 [3]: count, sum and sum of squares where `mask_BT`; they add up over batches and ranks."""
    chosen = values_BT[mask_BT].double()
    return torch.stack(
        [torch.tensor(float(chosen.numel()), dtype=torch.float64), chosen.sum().cpu(), chosen.square().sum().cpu()]
    )


def whiten(values_BT: torch.Tensor, mask_BT: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """(x - mean) / (std + 1e-8) with the mean and unbiased std that `total`, the merged `moments`, describe."""
    count, first, second = total.tolist()
    mean = first / max(count, 1.0)
    variance = max(second - count * mean**2, 0.0) / max(count - 1, 1.0)
    return torch.where(mask_BT, (values_BT - mean) / (variance**0.5 + 1e-8), 0.0)


def value_loss(
    values_BT: torch.Tensor,
    old_BT: torch.Tensor,
    returns_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    tokens: int,
    clip: float | None,
) -> tuple[torch.Tensor, Sums]:
    """½ · sum_t max((V - G)², (clip(V, V_old ± clip) - G)²) / tokens, and metric sums.

    The clipped form is of PPO's reference implementation (https://arxiv.org/abs/2005.12729).

    Args:
        old_BT: values before the step's first update.
        tokens: of the whole update, all ranks.
        clip: absent is the plain squared error.
    """
    values_BT = torch.where(mask_BT, values_BT, 0.0)
    error_BT = torch.where(mask_BT, values_BT - returns_BT, 0.0).square()
    worse_BT = error_BT
    if clip is not None:
        bounded_BT = torch.maximum(torch.minimum(values_BT, old_BT + clip), old_BT - clip)
        worse_BT = torch.maximum(error_BT, torch.where(mask_BT, bounded_BT - returns_BT, 0.0).square())
    loss = 0.5 * worse_BT.sum() / tokens
    with torch.no_grad():
        sums = {
            "value_error": torch.where(mask_BT, old_BT - returns_BT, 0.0).double().square().sum(),
            "returns": torch.where(mask_BT, returns_BT, 0.0).double().sum(),
            "returns_squared": torch.where(mask_BT, returns_BT, 0.0).double().square().sum(),
            "value_clipped": (worse_BT > error_BT).sum(),
        }
    return loss, sums
