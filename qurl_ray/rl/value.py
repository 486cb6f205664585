"""Credit from a value model, per token or per turn: generalised advantage estimation, and the loss of the value model.

The value of token t is that of the state before it. The verifier's reward is given at the last token, and the episode
ends there. No value is bootstrapped, whether the answer ended by itself or was cut off. With several turns, the reward
of a turn is given at its last token, and the token after it is the first of the next turn: text of the environment in
between takes no step. In a trajectory of several rows each row is an episode of its own, whose last token also has the
sum of the rewards of later rows.
"""

from collections.abc import Mapping

import torch

from qurl_ray.rl.ratios import Sums


def gae(
    rewards_BT: torch.Tensor, values_BT: torch.Tensor, mask_BT: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, both [B, T] in the values' dtype and 0 where masked. https://arxiv.org/abs/1506.02438

        delta_t = r_t + gamma·V_{t+1} - V_t        A_t = sum_k (gamma·lam)^k delta_{t+k}        return_t = A_t + V_t

    t + 1 is the next drawn token, whatever is between the two.

    Args:
        rewards_BT: reward that comes with each token.
        mask_BT: bool, True on drawn tokens.
    """
    # The column of each drawn token if the drawn tokens of a row followed its first one without gaps; T for others.
    drawn_BT = mask_BT.cumsum(1)
    first_B1 = (drawn_BT == 0).sum(1, keepdim=True)
    place_BT = torch.where(mask_BT, first_B1 + drawn_BT - 1, mask_BT.shape[1])
    values_BT = _moved(torch.where(mask_BT, values_BT, 0.0), place_BT)
    rewards_BT = _moved(torch.where(mask_BT, rewards_BT.to(values_BT.dtype), 0.0), place_BT)
    next_BT = torch.nn.functional.pad(values_BT[:, 1:], (0, 1))
    advantages_BT = _discounted(rewards_BT + gamma * next_BT - values_BT, gamma * lam)
    returns_BT = advantages_BT + values_BT

    def moved_back(x_BT: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_BT, torch.nn.functional.pad(x_BT, (0, 1)).gather(1, place_BT), 0.0)

    return moved_back(advantages_BT), moved_back(returns_BT)


def turn_gae(
    rewards_BT: torch.Tensor,
    values_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    starts_BT: torch.Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns of turns: `gae` with one step for a turn, which is Turn-PPO's
    (https://arxiv.org/abs/2512.17008).

        delta_k = r_k + gamma·V_{k+1} - V_k        A_k = sum_j (gamma·lam)^j delta_{k+j}        return_k = A_k + V_k

    V_k is the value at the first token of turn k: of the state before it. r_k is the sum of the rewards of its tokens.

    Args:
        rewards_BT: reward that comes with each token.
        mask_BT: bool, True on drawn tokens.
        starts_BT: bool, True on the first drawn token of each turn.

    Returns:
        Advantages [B, T], the turn's at each of its tokens; and returns [B, T], each turn's at its first token. Both
        are 0 elsewhere. No return is defined inside a turn, so the value loss takes `starts_BT` as its mask: the states
        there are none of this decision process, nothing reads their values, and long turns would count more.
    """
    turn_BT = (starts_BT.cumsum(1) - 1).clamp(min=0)  # number of the turn of each drawn token

    def by_turn(x_BT: torch.Tensor) -> torch.Tensor:
        """Sums over the tokens of each turn, at each of its tokens."""
        return torch.zeros_like(x_BT).scatter_add(1, turn_BT, x_BT).gather(1, turn_BT)

    rewards_BT = by_turn(torch.where(mask_BT, rewards_BT, 0.0))
    advantages_BT, returns_BT = gae(rewards_BT, values_BT, starts_BT, gamma=gamma, lam=lam)
    return torch.where(mask_BT, by_turn(advantages_BT), 0.0), returns_BT


def _moved(values_BT: torch.Tensor, place_BT: torch.Tensor) -> torch.Tensor:
    """Return [B, T] with the values at their places, 0 elsewhere; values with place T are left out."""
    wide_BT = values_BT.new_zeros(values_BT.shape[0], values_BT.shape[1] + 1)
    return wide_BT.scatter(1, place_BT, values_BT)[:, :-1]


_BLOCK = 256


def _discounted(values_BT: torch.Tensor, factor: float) -> torch.Tensor:
    """y_t = sum_{k>=0} factor^k x_{t+k}: products with a triangular matrix of powers, block by block from the end."""
    width = values_BT.shape[1]
    sums_BT = torch.zeros_like(values_BT)
    steps = torch.arange(_BLOCK + 1, dtype=values_BT.dtype, device=values_BT.device)
    powers = factor**steps
    # triangle[j, t] = factor^(j-t) for j >= t: weight of token j in the sum of token t
    steps_T = torch.arange(_BLOCK, device=values_BT.device)
    gaps = steps_T[:, None] - steps_T[None]
    triangle = torch.where(gaps >= 0, powers[gaps.clamp(min=0)], 0.0)
    ahead_B1 = torch.zeros_like(values_BT[:, :1])
    for start in range((width - 1) // _BLOCK * _BLOCK, -1, -_BLOCK):
        block_BT = values_BT[:, start : start + _BLOCK]
        size = block_BT.shape[1]
        reach = powers[1 : size + 1].flip(0)
        sums_BT[:, start : start + size] = block_BT @ triangle[:size, :size] + ahead_B1 * reach
        ahead_B1 = sums_BT[:, start : start + 1]
    return sums_BT


def whiten(values_BT: torch.Tensor, mask_BT: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """(x - mean) / (std + 1e-8), with mean and unbiased std from `total`, the merged rl.reduce.moments."""
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

    The clipped form is that of PPO's reference implementation (https://arxiv.org/abs/2005.12729).

    Args:
        old_BT: values before the step's first update.
        mask_BT: bool, True on tokens whose values have returns: all drawn ones, or the first of each turn.
        tokens: number of such tokens in the whole update, over all ranks.
        clip: largest change from old_BT; None for the plain squared error.
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
            "values": mask_BT.sum(),
        }
    return loss, sums


def value_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics from merged `value_loss` sums; explained_variance = 1 - E[(V - G)²] / Var[G], with V before the step."""
    n = sums.get("values", 0)
    if not n:
        return {}
    variance = sums["returns_squared"] / n - (sums["returns"] / n) ** 2
    error = sums["value_error"] / n
    metrics = {
        "value/error": error,
        "value/explained_variance": 1 - error / variance if variance > 0 else float("nan"),
        "value/clipped": sums["value_clipped"] / n,
    }
    if "value_skipped" in sums:  # of a separate value model; a shared one skips with the policy
        metrics["value/skipped_updates"] = sums["value_skipped"]
    return metrics
