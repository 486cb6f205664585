"""Prompts that samples share are computed once, and no bit of a log-prob tells."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qurl_ray.policy import attention
from qurl_ray.policy.logprobs import answer_states
from qurl_ray.policy.sharing import share
from tests.policy.test_logprobs import CONFIGS, SHAPE, assert_close, gradient, model_of

PROMPTS = st.lists(
    st.tuples(st.integers(1, 3) | st.integers(1, 60), st.lists(st.integers(0, 2) | st.integers(0, 70), max_size=5)),
    min_size=1,
    max_size=4,
)
"""Of each prompt its length, and the lengths of its answers."""


@pytest.fixture(scope="module", params=CONFIGS)
def model(request):
    return model_of(request.param)


def batch_of(prompts, seed=0):
    """(ids, mask) of answers to prompts, their rows in any order, padded with random ids; None without an answer."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda count: torch.randint(SHAPE["vocab_size"], (count,), generator=generator)  # noqa: E731
    rows = []
    for length, answers in prompts:
        prompt = draw(length)
        rows += [(torch.cat([prompt, draw(answer)]), length) for answer in answers]
    if not any(len(ids) > start for ids, start in rows):
        return None
    width = max(len(ids) for ids, _ in rows)
    order = torch.randperm(len(rows), generator=generator).tolist()
    ids_BT = torch.stack([torch.cat([rows[i][0], draw(width - len(rows[i][0]))]) for i in order])
    mask_BT = torch.zeros(ids_BT.shape, dtype=torch.bool)
    for row, i in enumerate(order):
        mask_BT[row, rows[i][1] : len(rows[i][0])] = True
    return ids_BT, mask_BT


@pytest.mark.equal_bits
@settings(max_examples=40, deadline=None)
@given(prompts=PROMPTS, seed=st.integers(0, 2**31), chunk=st.sampled_from([16, 50, attention.QUERY_CHUNK]))
def test_shared_prompts_change_no_bit(model, prompts, seed, chunk):
    if (batch := batch_of(prompts, seed)) is None:
        return
    expected_Nd = answer_states(model, *batch, None)
    with patch.object(attention, "QUERY_CHUNK", chunk):
        assert torch.equal(answer_states(model, *batch, None, share_prompts=True), expected_Nd)


def test_shared_prompts_have_the_gradient_of_padded_rows(model):
    batch = batch_of([(40, [1, 30, 7, 2]), (3, [9, 9]), (21, [0, 5])])
    expected = gradient(model.base_model, answer_states(model, *batch, None))
    found = gradient(model.base_model, answer_states(model, *batch, None, share_prompts=True))
    assert_close(found, expected, relative=1e-5)


@settings(deadline=None)
@given(prompts=PROMPTS)
@example(prompts=[(1, [7, 70, 70]), (2, [32]), (1, [1])])  # one prompt is the beginning of another
def test_every_token_that_scoring_takes_is_computed_once(prompts):
    if (batch := batch_of(prompts)) is None:
        return
    ids_BT, mask_BT = batch
    needed = set()
    for row, (ids, mask) in enumerate(zip(ids_BT, mask_BT, strict=True)):
        start = int(mask.int().argmax())
        for at in range(int(mask.nonzero().max()) if mask.any() else 0):
            needed.add((tuple(ids[:start].tolist()), at) if at < start else (row, at))
    sharing = share(ids_BT, mask_BT)
    if len(needed) < 2:
        assert sharing is None
    else:
        assert len(sharing.row_N) == len(needed)
