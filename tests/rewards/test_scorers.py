"""The reward functions that come with the package."""

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurl_ray.rewards.entries import pack, unpack
from qurl_ray.rewards.scorers import exact, last_boxed, math_verify, reasoning_gym, reasoning_gym_boxed
from qurl_ray.types import Problem


def expecting(answer, meta=None):
    return Problem(uid="train-0", prompt="?", answer=answer, meta=meta or {})


def test_exact_ignores_white_space_around_the_answer_and_nothing_else():
    assert exact(" 42\n", expecting("42 ")) == 1.0
    assert exact("4 2", expecting("42")) == 0.0
    assert exact("", expecting("42")) == 0.0


@pytest.mark.parametrize("answer", ["4<pad>2", "<s>42", "42<|im_end|>"])
def test_an_answer_with_a_special_token_inside_is_not_exact(answer):
    assert exact(answer, expecting("42")) == 0.0


@pytest.mark.parametrize(("score", "boxed"), [(exact, 0.0), (math_verify, 1.0)])
def test_a_truncated_answer_is_right_only_in_a_closed_box_and_never_exact(score, boxed):
    cut = {"truncated": True}
    assert score("4", expecting("4")) == 1.0
    assert score("4", expecting("4", cut)) == 0.0  # it may have become 42
    assert score(r"\boxed{4} or \boxed{4", expecting("4", cut)) == 0.0
    assert score(r"So \boxed{4}, becau", expecting("4", cut)) == boxed


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("42", "The answer is 42."),
        ("42", r"So \boxed{42}"),
        ("She sold 40 + 2 = 42.\n#### 42", "#### 42"),
        ("1/2", r"\boxed{0.5}"),
        (r"\frac{1}{2}", r"$\frac{2}{4}$"),
        ("1,234", "It costs $1,234."),
        ("$18", "18"),
        (r"The root is $\boxed{x^2+1}$", r"\boxed{1+x^2}"),
        ("x^2+1", r"\boxed{1+x^2}"),
        ("Paris", "Paris"),
    ],
)
def test_math_verify_accepts_equal_answers(expected, answer):
    assert math_verify(answer, expecting(expected)) == 1.0


@pytest.mark.parametrize(
    ("expected", "answer"),
    [
        ("42", "41"),
        ("42", ""),
        ("1/2", r"\boxed{2}"),
        ("40 + 2\n#### 42", "40"),
        ("Paris", "Rome"),
        ("42", "}{$\\frac{"),
    ],
)
def test_math_verify_gives_nothing_for_other_answers(expected, answer):
    assert math_verify(answer, expecting(expected)) == 0.0


def test_math_verify_says_so_if_the_expected_answer_cannot_be_parsed():
    with pytest.raises(ValueError, match="cannot parse the expected answer"):
        math_verify("42", expecting("#### "))


def test_math_verify_works_outside_the_main_thread():
    """Its own signal-based time-outs do not; they used to turn every reward into 0."""
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(math_verify("42", expecting("42.0"))))
    thread.start()
    thread.join()
    assert rewards == [1.0]


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{}", ""),
        (r"\boxed{1", None),
        ("no box", None),
    ],
)
def test_the_last_box_is_read_with_its_braces_balanced(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize("dataset", ["chain_sum", "leg_counting", "countdown", "rearc", "word_ladder"])
def test_reasoning_gym_gives_full_marks_to_the_data_sets_own_answer_after_a_trip_through_json(dataset):
    import reasoning_gym as gym

    params = {"seed": 7, "size": 3}
    for entry in gym.create_dataset(dataset, **params):
        meta = json.loads(json.dumps({"dataset": dataset, "params": params, "entry": pack(entry)}))
        answer = str(entry["answer"])
        assert reasoning_gym(f" {answer}\n", expecting(answer, meta)) == 1.0
        assert reasoning_gym(rf"I think \boxed{{{answer}}}.", expecting(answer, meta)) == 1.0
        assert reasoning_gym("no idea", expecting(answer, meta)) < 1.0
        assert reasoning_gym_boxed(rf"I think \boxed{{{answer}}}.", expecting(answer, meta)) == 1.0
        assert reasoning_gym_boxed(f"{answer}", expecting(answer, meta)) == 0.0
        cut = meta | {"truncated": True}
        assert reasoning_gym(answer, expecting(answer, cut)) == 0.0
        assert reasoning_gym(rf"\boxed{{{answer}}}, and", expecting(answer, cut)) == 1.0
        assert reasoning_gym_boxed(rf"\boxed{{{answer}}}, and", expecting(answer, cut)) == 1.0


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(
            st.text() | st.integers() | st.tuples(st.integers()) | st.sampled_from(["__tuple__", "__items__"]), inner
        )
    ),
)


@given(plain)
def test_packed_values_come_back_the_same_through_json(value):
    back = unpack(json.loads(json.dumps(pack(value))))
    assert back == value
    assert repr(back) == repr(value)  # == holds between True and 1
