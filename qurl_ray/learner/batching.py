"""Division of judged samples into mini-batches, shares of ranks and micro-batches, decided once for all ranks.

A trajectory of several rows is divided into them here: for the learner, each is a sample of its own. All lengths are
known where this runs, so ranks agree on the number of micro-batches without communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from heapq import heapreplace
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch

from qurl_ray.rl.objective import Denominators
from qurl_ray.types import RowPlace, Trajectory, TurnCredit


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    """One rank's part of one update."""

    micro_batches: list[list[Trajectory]]
    """Micro-batches, the same number on every rank; some may be empty."""
    denominators: Denominators
    """Denominators of the whole update, over all ranks."""

    def __reduce__(self) -> tuple:
        """Pickle the samples as a few long arrays, because Ray handles every array separately."""
        samples = [sample for batch in self.micro_batches for sample in batch]
        ids = [part for s in samples for part in (s.prompt_ids, s.token_ids, s.versions)]
        masks = [s.mask for s in samples if s.mask is not None]
        rest = [
            (
                *(len(s.prompt_ids), s.length, s.mask is not None, 0 if s.routes is None else len(s.routes)),
                *(s.uid, s.reward, s.advantage, s.group, s.watched),
            )
            for s in samples
        ]
        return _arrived, (
            [len(batch) for batch in self.micro_batches],
            self.denominators,
            np.concatenate([np.zeros(0, np.int32), *ids]),
            np.concatenate([np.zeros(0, np.float32), *(s.logprobs for s in samples)]),
            np.concatenate([np.zeros(0, bool), *masks]),
            rest,
            np.concatenate(routes) if (routes := [s.routes for s in samples if s.routes is not None]) else None,
            *_sent_turns(samples),
        )


def _arrived(
    counts: list[int],
    denominators: Denominators,
    ids: np.ndarray,
    logprobs: np.ndarray,
    masks: np.ndarray,
    rest: list[tuple],
    routes: np.ndarray | None,
    *turns: Any,
) -> MiniBatch:
    """Rebuild the mini-batch that MiniBatch.__reduce__ pickled; `turns` is the result of _sent_turns."""
    samples: list[Trajectory] = []
    at = scored = masked = routed = 0
    for prompt, length, has_mask, recorded, uid, reward, advantage, group, watched in rest:
        tokens = length - prompt
        samples.append(
            Trajectory(
                uid=uid,
                prompt_ids=ids[at : at + prompt],
                token_ids=ids[at + prompt : at + length],
                versions=ids[at + length : at + length + tokens],
                logprobs=logprobs[scored : scored + tokens],
                mask=masks[masked : masked + tokens] if has_mask else None,
                routes=routes[routed : routed + recorded] if routes is not None and recorded else None,
                reward=reward,
                advantage=advantage,
                group=group,
                watched=watched,
            )
        )
        at, scored, masked = at + length + tokens, scored + tokens, masked + tokens * has_mask
        routed += recorded
    if turns:
        sizes, ends, values = turns
        for place, count, compared, row in sizes:
            advantages = values[count : 2 * count] if compared else None
            credit = TurnCredit(ends=ends[:count], rewards=values[:count], advantages=advantages)
            samples[place] = replace(samples[place], turns=credit, row=row)
            ends, values = ends[count:], values[count * (1 + compared) :]
    taken = iter(samples)
    return MiniBatch(micro_batches=[list(islice(taken, count)) for count in counts], denominators=denominators)


def _sent_turns(samples: Sequence[Trajectory]) -> tuple:
    """Return the turns of samples, and the rows that they are, as a list and two arrays; () if no sample has any."""
    turns = [(place, s.turns, s.row) for place, s in enumerate(samples) if s.turns is not None]
    if not turns:
        return ()
    sizes = [(place, len(t.ends), t.advantages is not None, row) for place, t, row in turns]
    values = [part for _, t, _ in turns for part in (t.rewards, t.advantages) if part is not None]
    return sizes, np.concatenate([t.ends for _, t, _ in turns]), np.concatenate(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """A micro-batch as padded tensors; B may be 0."""

    token_ids_BT: torch.Tensor  # int64
    mask_BT: torch.Tensor  # bool, True on tokens that the policy drew
    starts_BT: torch.Tensor  # bool, True on the first of these in each turn
    behavior_BT: torch.Tensor  # float32, 0 where masked
    rewards_BT: torch.Tensor  # float32, the reward of a turn at its last token that the policy drew, 0 elsewhere
    advantages: torch.Tensor  # float32 [B], or [B, T] if turns have their own
    lengths_B: torch.Tensor  # int64, tokens that are not padding
    drawn_B: torch.Tensor  # int64, tokens that the policy drew in all rows of the trajectory
    routes_BTLk: torch.Tensor | None = None  # see experts.replay_routes; None if no sample has any

    def to(self, device: str) -> "Tensors":
        """Return these tensors on `device`."""
        held: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: part if part is None else part.to(device) for name, part in held.items()}
        return Tensors(**moved)


def plan(
    groups: Sequence[Sequence[Trajectory]],
    *,
    updates: int,
    ranks: int,
    token_budget: int,
    seed: int,
    packed: bool = False,
) -> list[list[MiniBatch]]:
    """Return mini-batches as [rank][update]: whole groups, shuffled into `updates` mini-batches, shared by tokens.

    Trajectories are divided into their rows; denominators count each trajectory once.

    Args:
        groups: at least one group; each holds the samples of one prompt.
        token_budget: bound on the tokens of a micro-batch, see micro_batches.
        packed: micro-batches are computed without padding.
    """
    order = np.random.default_rng(seed).permutation(len(groups))
    by_rank: list[list[MiniBatch]] = [[] for _ in range(ranks)]
    for chosen in np.array_split(order, min(updates, len(groups))):
        whole = [sample for index in chosen for sample in groups[index]]
        samples = [row for sample in whole for row in rows_of(sample)]
        denominators = Denominators(
            tokens=sum(s.drawn for s in samples),
            sequences=len(whole),
            turns=sum(1 if s.turns is None else len(s.turns.ends) for s in samples),
        )
        shares = [micro_batches(share, token_budget, packed=packed) for share in balance(samples, ranks)]
        most = max(len(share) for share in shares)
        for rank, share in enumerate(shares):
            padded = share + [[] for _ in range(most - len(share))]
            by_rank[rank].append(MiniBatch(micro_batches=padded, denominators=denominators))
    return by_rank


def rows_of(sample: Trajectory) -> list[Trajectory]:
    """Return the rows of a trajectory, each with its own prompt, tokens and turns, and the trajectory's advantage."""
    if not sample.rows:
        return [sample]
    turns, rows = sample.turns, []
    assert turns is not None
    assert sample.mask is not None
    for number, (begin, end) in enumerate(pairwise((0, *sample.rows, len(sample.token_ids)))):
        first = begin + int(sample.mask[begin:end].argmax()) if number else 0
        here, own = (turns.ends > begin) & (turns.ends <= end), slice(first, end)
        rows.append(
            replace(
                sample,
                prompt_ids=sample.token_ids[begin:first] if number else sample.prompt_ids,
                token_ids=sample.token_ids[own],
                logprobs=sample.logprobs[own],
                versions=sample.versions[own],
                mask=sample.mask[own],
                rows=(),
                routes=None,  # they are those of the whole
                turns=TurnCredit(
                    ends=turns.ends[here] - first,
                    rewards=turns.rewards[here],
                    advantages=None if turns.advantages is None else turns.advantages[here],
                ),
                row=RowPlace(number=number, drawn=sample.drawn, later=float(turns.rewards[turns.ends > end].sum())),
            )
        )
    return rows


def balance(samples: Sequence[Trajectory], ranks: int) -> list[list[Trajectory]]:
    """Share samples among ranks: longest first, each to the rank that has the fewest tokens so far."""
    shares: list[list[Trajectory]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]  # a heap
    for sample in sorted(samples, key=lambda s: -s.length):
        load, rank = loads[0]
        shares[rank].append(sample)
        heapreplace(loads, (load + sample.length, rank))
    return shares


def micro_batches(samples: Sequence[Trajectory], token_budget: int, *, packed: bool = False) -> list[list[Trajectory]]:
    """Put each sample, longest first, into the first micro-batch with room; a sample above the budget stays alone.

    Args:
        token_budget: bound on the tokens that are computed: the sum of lengths if `packed`, else count · longest.
            With padding, this puts samples of similar length together.
    """
    batches: list[list[Trajectory]] = []
    sums: list[int] = []
    for sample in sorted(samples, key=lambda s: -s.length):
        for index, batch in enumerate(batches):
            # Samples are sorted, so the first of a batch is its longest.
            tokens = sums[index] + sample.length if packed else (len(batch) + 1) * batch[0].length
            if tokens <= token_budget:
                batch.append(sample)
                sums[index] += sample.length
                break
        else:
            batches.append([sample])
            sums.append(sample.length)
    return batches


def to_tensors(samples: Sequence[Trajectory]) -> Tensors:
    """Return tensors with prompt and answer of a sample in each row, padded on the right with id 0."""
    width = max((s.length for s in samples), default=1)
    shape = len(samples), width
    token_ids_BT = np.zeros(shape, dtype=np.int64)
    mask_BT, starts_BT = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    behavior_BT, rewards_BT = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.float32)
    for row, s in enumerate(samples):
        start = len(s.prompt_ids)
        token_ids_BT[row, :start] = s.prompt_ids
        token_ids_BT[row, start : s.length] = s.token_ids
        mask_BT[row, start : s.length] = drawn = True if s.mask is None else s.mask
        behavior_BT[row, start : s.length] = np.where(drawn, s.logprobs, 0.0)
        if s.drawn:
            places, ends = s.places, s.drawn_ends
            starts_BT[row, places[ends - s.turn_lengths]] = True
            rewards_BT[row, places[ends - 1]] = s.reward if s.turns is None else s.turns.rewards
            if s.row:
                rewards_BT[row, places[-1]] += s.row.later
    return Tensors(
        token_ids_BT=torch.from_numpy(token_ids_BT),
        mask_BT=torch.from_numpy(mask_BT),
        starts_BT=torch.from_numpy(starts_BT),
        behavior_BT=torch.from_numpy(behavior_BT),
        rewards_BT=torch.from_numpy(rewards_BT),
        advantages=advantages_of(samples, width),
        lengths_B=torch.tensor([s.length for s in samples], dtype=torch.int64),
        drawn_B=torch.tensor([s.row.drawn if s.row else s.drawn for s in samples], dtype=torch.int64),
        routes_BTLk=_routes(samples, width),
    )


def _routes(samples: Sequence[Trajectory], width: int) -> torch.Tensor | None:
    recorded = [s.routes for s in samples if s.routes is not None]
    if not recorded:
        return None
    kind = np.float32 if recorded[0].dtype == np.float32 else np.int64
    routes_BTLk = torch.from_numpy(np.full((len(samples), width, *recorded[0].shape[1:]), -1, kind))
    for row, s in enumerate(samples):
        if s.routes is not None:
            routes_BTLk[row, : len(s.routes)] = torch.from_numpy(s.routes.astype(kind))
    return routes_BTLk


def advantages_of(samples: Sequence[Trajectory], width: int) -> torch.Tensor:
    """Return advantages as float32 [B], or as [B, T] with T = `width` if turns have their own."""
    if all(s.turns is None or s.turns.advantages is None for s in samples):
        return torch.tensor([s.advantage for s in samples], dtype=torch.float32)
    advantages_BT = np.zeros((len(samples), width), dtype=np.float32)
    for row, s in enumerate(samples):
        assert s.turns is not None
        assert s.turns.advantages is not None
        advantages_BT[row, s.places] = np.repeat(s.turns.advantages, s.turn_lengths)
    return torch.from_numpy(advantages_BT)
