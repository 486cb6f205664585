"""Prompt sharing: samples with the same prompt compute its tokens once, in one row that holds each token once.

The result of a token depends on its own sequence alone (policy.attention). Log-probs are therefore bit-identical to
log-probs without sharing, and gradients are equal up to rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Queries, in R rows of T, and the keys that they may see. Both are int64 places of tokens in the shared row."""

    queries_RT: torch.Tensor
    positions_RT: torch.Tensor
    """Positions of the queries in their sequences, int64."""
    keys_RS: torch.Tensor
    """Tokens at positions 0, 1, … of the sequence; arbitrary tokens beyond its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Layout of sequences in one row of N tokens: prompts first, then the tokens that belong to one sequence alone."""

    row_N: torch.Tensor
    """Index of each token in the padded batch, counted row by row, int64."""
    positions_N: torch.Tensor
    """Position of each token in its sequence, int64."""
    before_M: torch.Tensor
    """Place of the token before each masked token, int64."""
    blocks: tuple[Block, ...]
    """The block of prompts and the block of answers, without empty ones."""
    found_N: torch.Tensor
    """Index of each token among the queries of all blocks, int64."""

    def attend(
        self,
        attention: Callable[..., torch.Tensor],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Return the attention [1, N, heads, d] of query [1, heads, N, d] to key and value [1, key heads, N, d].

        Args:
            attention: function of (query [R, heads, T, d], key and value [R, key heads, S, d], positions [R, T]) that
                returns [R, T, heads, d].
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
    """Gather [R, heads, T, d] from [1, heads, N, d]. `embedding` has a much faster backward pass than indexing."""
    _, heads, N, d = part.shape
    rows_Nd = part[0].transpose(0, 1).reshape(N, heads * d)
    return embedding(places_RT, rows_Nd).unflatten(2, (heads, d)).transpose(1, 2)


def share(token_ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> Sharing | None:
    """Return the layout of the tokens that scoring the masked ones needs; None if that is fewer than two tokens.

    Args:
        token_ids_BT: int64, prompt and answer, padded on the right.
        mask_BT: bool, True on the tokens to score; the tokens before the first True of a row are its prompt.
    """
    B, T = token_ids_BT.shape
    columns_T = torch.arange(T)
    ends_B = (mask_BT * columns_T).amax(dim=1)  # nothing scored depends on later tokens
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
    blocks = [(block, real_RT) for block, real_RT in (of_prompts, of_answers) if real_RT.any()]
    real = torch.cat([real_RT.flatten() for _, real_RT in blocks])
    rows_BT = torch.arange(B * T).view(B, T)
    row_N = torch.cat([rows_BT[first_P][shared_PT], rows_BT[own_BT]])
    return Sharing(
        row_N=row_N,
        positions_N=row_N % T,
        before_M=place_BT[:, :-1][mask_BT[:, 1:]],
        blocks=tuple(block for block, _ in blocks),
        found_N=real.nonzero()[:, 0],
    )


def _prompts(token_ids_BT: torch.Tensor, starts_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (first row of each distinct prompt [P], number of the prompt of each row [B])."""
    rows = zip(token_ids_BT.numpy(), starts_B.tolist(), strict=True)
    prompts = [ids[:start].tobytes() for ids, start in rows]
    firsts: dict[bytes, int] = {}
    for row, prompt in enumerate(prompts):
        firsts.setdefault(prompt, row)
    numbers = {prompt: number for number, prompt in enumerate(firsts)}
    return torch.tensor(list(firsts.values())), torch.tensor([numbers[prompt] for prompt in prompts])


def _block(place_RT: torch.Tensor, from_R: torch.Tensor, counts_R: torch.Tensor) -> tuple[Block, torch.Tensor]:
    """Return queries of each row from a position on, and bool [R, width]: False for the padding of shorter rows."""
    steps = torch.arange(int(counts_R.max()))
    positions_RT = (from_R[:, None] + steps).clamp(max=place_RT.shape[1] - 1)
    seen = int((from_R + counts_R).max())
    block = Block(queries_RT=place_RT.gather(1, positions_RT), positions_RT=positions_RT, keys_RS=place_RT[:, :seen])
    return block, steps < counts_R[:, None]
