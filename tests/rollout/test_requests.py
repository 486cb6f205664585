"""What comes back from an engine is looked at before anything is learned from it."""

import numpy as np
import pytest

from qurl_ray.errors import EngineError
from qurl_ray.rollout.requests import check_logprobs
from qurl_ray.types import Completion


def completion(uid: str, *logprobs: float) -> Completion:
    ids = np.zeros(len(logprobs), dtype=np.int32)
    return Completion(uid=uid, token_ids=ids, logprobs=np.array(logprobs, dtype=np.float32), version=1, finish="stop")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logprob_that_is_not_finite_is_an_error_that_names_the_answer(bad):
    with pytest.raises(EngineError, match=r"1 of 3 answers .* 7/1 first"):
        check_logprobs([completion("7/0", -1.0), completion("7/1", -0.5, bad), completion("8/0")])


def test_finite_logprobs_and_empty_answers_pass():
    check_logprobs([completion("7/0", -1.0, -30.0), completion("7/1")])
    check_logprobs([])
