"""Log-probs of tokens, one definition for engine and learner.

The memory for long answers is bounded: logits exist for a few tokens at a time, rows need no padding if their lengths
are given, and a model's blocks can be recomputed instead of kept. None of this changes a bit of a log-prob.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, pad
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from qurl_ray.policy.attention import Packing
from qurl_ray.policy.experts import replay_routes
from qurl_ray.policy.forward import computing_with
from qurl_ray.policy.sequence import Division, SequenceGroup
from qurl_ray.policy.sharing import Sharing, share

HEAD_BYTES = 128 * 2**20  # bytes of float32 logits that exist at a time
KEPT_BYTES = 2**30
"""Bytes of float32 log-probs that are kept for the backward pass on a CPU; more of them are computed again."""

_NEVER = -1e30  # a probability of 0, and finite: an entropy has 0 · log 0

Entropy = Literal["none", "value", "gradient"]
"""Mode of the entropy: not computed, computed without a gradient, or computed with a gradient."""


def without_text(logits: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """Return the logits, changed in place so that ids without text (`textless`) are never drawn."""
    return logits if ids is None else logits.index_fill_(-1, ids.to(logits.device), _NEVER)


def textless(model: torch.nn.Module) -> torch.Tensor | None:
    """Return the ids for which the policy's tokenizer has no text, as policy.load has set them; None without any."""
    return getattr(model, "textless", None)


def log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return float32 log-probs over the last axis of logits / temperature; float64 for float64 logits."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Keep only the inputs of the model's blocks for the backward pass, which recomputes the blocks.

    transformers does so only in training mode, so `model.eval()` switches it off again. The policies of this package
    have no dropout: training mode changes nothing else.

    Raises:
        ValueError: the architecture does not support it.
    """
    model.train()
    # Without dropout there is no random state to restore.
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})


def token_logprobs(
    model: PreTrainedModel,
    token_ids_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    temperature: float,
    *,
    lengths_B: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return log p(token t | tokens before it) where `mask_BT` is True, 0 elsewhere.

    Args:
        token_ids_BT: int64, prompt and answer, padded on the right with any valid id.
        mask_BT: bool, True on the tokens to score; never on the first of a sequence.
        lengths_B: int64, number of tokens of each row that are not padding, at least 1. If given, the model computes
            only these tokens, packed into one row; its attention must be one of policy.attention. The result is the
            same.

    Returns:
        float32 [B, T]. Logits are computed for the masked tokens only, and at most HEAD_BYTES of them at a time.

    Raises:
        ValueError: `mask_BT` is True on padding.
    """
    states_Nd = answer_states(model, token_ids_BT, mask_BT, lengths_B)
    logprobs_N, _ = score_states(model, states_Nd, token_ids_BT[mask_BT], temperature)
    return scatter(logprobs_N, mask_BT)


def scatter(values_N: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return [B, T] with the values, row by row, where `mask_BT` is True, and 0 elsewhere."""
    out_BT = torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=mask_BT.device)
    out_BT[mask_BT] = values_N
    return out_BT


def answer_states(
    model: PreTrainedModel,
    token_ids_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    lengths_B: torch.Tensor | None,
    *,
    share_prompts: bool = False,
    routes_BTLk: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the final state before each of the M masked tokens, row by row, [M, d]. Arguments as in token_logprobs.

    Args:
        share_prompts: compute equal prompts once (policy.sharing). This needs a CPU, attention.NAME as the model's
            attention, and `lengths_B` None. The result is the same.
        routes_BTLk: experts to take in each layer that has some (experts.replay_routes); None for the model's own.
    """
    row = None
    if lengths_B is not None:
        row = _packed(token_ids_BT, mask_BT, lengths_B)
    elif share_prompts:
        row = _shared(token_ids_BT, mask_BT)
    if row:
        return _states(model, row, routes_BTLk)
    counted_N = mask_BT[:, 1:].flatten().float()
    replay_routes(model, None if routes_BTLk is None else routes_BTLk[:, :-1].flatten(0, 1), counted_N)
    inputs_BT = token_ids_BT[:, :-1]
    positions = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)[None]
    states_BTd = model.base_model(input_ids=inputs_BT, position_ids=positions, use_cache=False).last_hidden_state
    return states_BTd[mask_BT[:, 1:]]


def own_answer_states(
    model: PreTrainedModel,
    token_ids_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    lengths_B: torch.Tensor,
    group: SequenceGroup,
    *,
    share_prompts: bool = False,
    routes_BTLk: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Division]:
    """Return the states of answer_states that this rank of a sequence group computes, [m, d], and how the group divides
    them. Collective. Padding is never computed."""
    row = _shared(token_ids_BT, mask_BT) if share_prompts else None
    if row is None or len(row.ids_N) < group.ranks:
        row = _packed(token_ids_BT, mask_BT, lengths_B, at_least=group.ranks)
    division = group.division(row.positions_N, row.before_M)
    return _states(model, row, routes_BTLk, division), division


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """Tokens that a pass computes, as one row."""

    places_N: torch.Tensor
    """Index of each token in the padded batch, counted row by row, int64."""
    ids_N: torch.Tensor
    positions_N: torch.Tensor
    before_M: torch.Tensor
    """Place of the token before each masked one, int64."""
    layout: dict[str, Packing | Sharing]
    """Option by which the attention knows the sequences."""


def _states(
    model: PreTrainedModel, row: _Row, routes_BTLk: torch.Tensor | None, division: Division | None = None
) -> torch.Tensor:
    own = division.own if division else slice(None)
    counted_N = torch.bincount(row.before_M, minlength=len(row.ids_N)).float()[own]
    replay_routes(model, None if routes_BTLk is None else routes_BTLk.flatten(0, 1)[row.places_N[own]], counted_N)
    states_1nd = model.base_model(
        input_ids=row.ids_N[own][None],
        position_ids=row.positions_N[own][None],
        use_cache=False,
        **row.layout,
        **({"division": division} if division else {}),
    ).last_hidden_state
    return embedding(division.before_m if division else row.before_M, states_1nd[0])


def _shared(token_ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> _Row | None:
    sharing = share(token_ids_BT, mask_BT)
    if sharing is None:
        return None
    return _Row(
        places_N=sharing.row_N,
        ids_N=token_ids_BT.flatten()[sharing.row_N],
        positions_N=sharing.positions_N,
        before_M=sharing.before_M,
        layout={"sharing": sharing},
    )


def _packed(token_ids_BT: torch.Tensor, mask_BT: torch.Tensor, lengths_B: torch.Tensor, *, at_least: int = 0) -> _Row:
    """Return a row without padding and without the last token of each sequence, which predicts none; positions restart
    with each sequence. If it is too short, the first token is added to it, as sequences of one token: as it computes
    the same again, nothing that is measured in a pass differs."""
    positions_BT = torch.arange(token_ids_BT.shape[1], device=token_ids_BT.device).expand_as(token_ids_BT)
    if (mask_BT & (positions_BT >= lengths_B[:, None])).any():
        raise ValueError(f"mask_BT is True beyond lengths_B = {lengths_B.tolist()}")
    lengths_B = (lengths_B - 1).clamp(min=1)
    real_BT = positions_BT < lengths_B[:, None]
    places_N = real_BT.flatten().nonzero()[:, 0]
    more = max(0, at_least - len(places_N))
    places_N = torch.cat([places_N, places_N[:1].expand(more)])
    lengths_S = pad(lengths_B, (0, more), value=1)
    before_BT = pad(mask_BT[:, 1:], (0, 1))  # True where the next token is masked
    return _Row(
        places_N=places_N,
        ids_N=token_ids_BT.flatten()[places_N],
        positions_N=pad(positions_BT[real_BT], (0, more)),
        before_M=before_BT[real_BT].nonzero()[:, 0],
        layout={"packing": Packing(lengths=tuple(lengths_S.tolist()), bounds=pad(lengths_S.cumsum(0), (1, 0)).int())},
    )


def score_states(
    model: PreTrainedModel,
    states_Nd: torch.Tensor,
    ids_N: torch.Tensor,
    temperature: float,
    *,
    entropy: Entropy = "none",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probs [N] of `ids_N` after the states, and entropies [N] of their distributions, in nats.

    Logits exist for one chunk at a time. The backward pass computes them again where there are several chunks and
    memory is short: on a GPU, with gradient checkpointing, and where they take more than KEPT_BYTES.

    Args:
        entropy: "none" returns None; "value" costs one more pass over the logits, and has no gradient.
    """
    row_bytes = 4 * model.config.vocab_size
    rows = max(1, HEAD_BYTES // row_bytes)
    head, hidden = model.get_output_embeddings(), textless(model)
    if len(ids_N) <= rows:
        return _score(head, hidden, temperature, entropy, states_Nd, ids_N)
    fits = states_Nd.device.type == "cpu" and len(ids_N) * row_bytes <= KEPT_BYTES
    keep = fits and not model.is_gradient_checkpointing
    score = partial(_score, head.forward, hidden, temperature, entropy)
    if torch.is_grad_enabled() and not keep:
        score = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)

    def score_chunks(
        _: torch.nn.Module, states_Nd: torch.Tensor, ids_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        chunks = zip(states_Nd.split(rows), ids_N.split(rows), strict=True)
        logprobs, entropies = zip(*(score(states, ids) for states, ids in chunks), strict=True)
        return torch.cat(logprobs), None if entropy == "none" else torch.cat(entropies)

    # All chunks in one call of the head: a sharded weight is gathered around each call, and would be for each chunk.
    with computing_with([(head, score_chunks)]):
        return head(states_Nd, ids_N)


def _score(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor | None,
    temperature: float,
    entropy: str,
    states_Nd: torch.Tensor,
    ids_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits_NV = without_text(head(states_Nd), hidden)
    if entropy == "gradient":
        logprobs_NV = log_softmax(logits_NV, temperature)
        return logprobs_NV.gather(1, ids_N[:, None])[:, 0], -(logprobs_NV.exp() * logprobs_NV).sum(dim=1)
    taken_N, logprobs_NV = _Taken.apply(logits_NV, ids_N, temperature)
    if entropy == "none":
        return taken_N, None
    # A mere value comes after the taken tokens: where chunks are recomputed for their gradient, it is not recomputed.
    with torch.no_grad():
        return taken_N, -logprobs_NV.exp().mul_(logprobs_NV).sum(dim=1)


class _Taken(torch.autograd.Function):
    """Log-probs [N] of the taken tokens, and all of them [N, V], which have no gradient. The gradient of the logits,
    (1[v = taken] - p_v) / temperature, is written over the log-probs: autograd's own would fill one tensor more of that
    size with zeros, and another with the gradient."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, ids_N: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_NV = log_softmax(logits_NV, temperature)
        ctx.save_for_backward(logprobs_NV, ids_N)
        ctx.mark_non_differentiable(logprobs_NV)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.dtype = temperature, logits_NV.dtype
        return logprobs_NV.gather(1, ids_N[:, None])[:, 0], logprobs_NV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: torch.Tensor, _: None) -> tuple[torch.Tensor, None, None]:
        logprobs_NV, ids_N = ctx.saved_tensors
        grad_N1 = (grad_N / ctx.temperature)[:, None]
        grad_NV = logprobs_NV.exp_().mul_(-grad_N1).scatter_add_(1, ids_N[:, None], grad_N1)
        return grad_NV.to(ctx.dtype), None, None
