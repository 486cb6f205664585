"""Samples of a group begin with the same prompt: its tokens are computed once, in a row that holds each token once.

Every token's result depends on its own sequence alone (policy.attention), so log-probs are the same to the bit, and
gradients to rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Queries, R rows of T, and the keys they may see. All int64; places are those of tokens in the shared row."""

    queries_RT: torch.Tensor
    positions_RT: torch.Tensor
    """Of the queries in their sequences."""
    keys_RS: torch.Tensor
    """The tokens at positions 0, 1, … of the sequence; any beyond its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How sequences lie in a row of N tokens: prompts first, then what is each one's own."""

    row_N: torch.Tensor
    """int64, where each token is in the padded batch, row by row."""
    positions_N: torch.Tensor
    """int64, in its sequence."""
    before_M: torch.Tensor
    """int64, the place of the token before each of the masked ones."""
    blocks: tuple[Block, ...]
    """Prompts, and answers."""
    found_N: torch.Tensor
    """int64, where each token is among the queries of all blocks."""

    def attend(
        self,
        attention: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """[1, N, heads, d] of [1, heads, N, d] and [1, key heads, N, d].

        Args:
            attention: of (query [R, heads, T, d], key and value [R, key heads, S, d], positions [R, T]), to
                [R, T, heads, d].
        """
        rows = [
            attention(
                _take(query, block.queries_RT),
                _take(key, block.keys_RS),
                _take(value, block.keys_RS),
                block.positions_RT,
            ).flatten(0, 1)
            for block in self.blocks
        ]
        heads, d = rows[0].shape[1:]
        return embedding(self.found_N, torch.cat(rows).flatten(1)).view(1, -1, heads, d)


def _take(part: torch.Tensor, places_RT: torch.Tensor) -> torch.Tensor:
    """[R, heads, T, d] of [1, heads, N, d]. As embeddings, whose backward pass is much faster than that of indices."""
    _, heads, N, d = part.shape
    rows_Nd = part[0].transpose(0, 1).reshape(N, heads * d)
    return embedding(places_RT, rows_Nd).unflatten(2, (heads, d)).transpose(1, 2)


def share(token_ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> Sharing | None:
    """How to compute the tokens that scoring the masked ones takes; None where that would be one token.

    Args:
        token_ids_BT: int64, prompt and answer, padded on the right.
        mask_BT: bool, True on the tokens to score; what is before the first of a row is its prompt.
    """
    B, T = token_ids_BT.shape
    columns_T = torch.arange(T)
    ends_B = (mask_BT * columns_T).amax(dim=1)  # nothing depends on what comes after the last scored token's input
    starts_B = mask_BT.int().argmax(dim=1)
    first_P, prompt_of_B = _prompts(token_ids_BT, starts_B)
    shared_PT = columns_T < starts_B[first_P, None]
    own_BT = (columns_T >= starts_B[:, None]) & (columns_T < ends_B[:, None])
    prompts, N = int(shared_PT.sum()), int(shared_PT.sum() + own_BT.sum())
    if N < 2:
        return None
    place_PT = torch.zeros(shared_PT.shape, dtype=torch.int64).masked_scatter(shared_PT, torch.arange(prompts))
    place_BT = place_PT[prompt_of_B].masked_scatter(own_BT, torch.arange(prompts, N))
    of_prompts = _block(place_PT, torch.zeros_like(first_P), starts_B[first_P])
    of_answers = _block(place_BT, starts_B, own_BT.sum(dim=1))
    made = [one for one in (of_prompts, of_answers) if one[1].any()]
    real = torch.cat([real_RT.flatten() for _, real_RT in made])
    rows_BT = torch.arange(B * T).view(B, T)
    row_N = torch.cat([rows_BT[first_P][shared_PT], rows_BT[own_BT]])
    return Sharing(
        row_N=row_N,
        positions_N=row_N % T,
        before_M=place_BT[:, :-1][mask_BT[:, 1:]],
        blocks=tuple(block for block, _ in made),
        found_N=real.nonzero()[:, 0],
    )


def _prompts(token_ids_BT: torch.Tensor, starts_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(first row of each prompt [P], prompt of each row [B])."""
    rows = zip(token_ids_BT.numpy(), starts_B.tolist(), strict=True)
    prompts = [ids[:start].tobytes() for ids, start in rows]
    firsts: dict[bytes, int] = {}
    for row, prompt in enumerate(prompts):
        firsts.setdefault(prompt, row)
    numbers = {prompt: number for number, prompt in enumerate(firsts)}
    return torch.tensor(list(firsts.values())), torch.tensor([numbers[prompt] for prompt in prompts])


def _block(place_RT: torch.Tensor, from_R: torch.Tensor, counts_R: torch.Tensor) -> tuple[Block, torch.Tensor]:
    """Queries of each row from a position on, and bool [R, width]: which are real; the others fill up shorter rows."""
    steps = torch.arange(int(counts_R.max()))
    positions_RT = (from_R[:, None] + steps).clamp(max=place_RT.shape[1] - 1)
    seen = int((from_R + counts_R).max())
    block = Block(queries_RT=place_RT.gather(1, positions_RT), positions_RT=positions_RT, keys_RS=place_RT[:, :seen])
    return block, steps < counts_R[:, None]
