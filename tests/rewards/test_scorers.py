"""The reward functions that come with the package."""

import json
import threading
from fractions import Fraction

import math_verify as math_verify_package
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qurl_ray.rewards.comparable import plain_number, quickly_compared
from qurl_ray.rewards.entries import pack, unpack
from qurl_ray.rewards.final import final_answer, last_boxed
from qurl_ray.rewards.scorers import (
    compared_as_text,
    exact,
    last_number,
    math_verify,
    reasoning_gym,
    reasoning_gym_boxed,
)
from qurl_ray.tables import REWARDS
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


# --- the final answer ----------------------------------------------------------------------------

CUT = {"truncated": True}
SCORERS = [math_verify, last_number]


@pytest.mark.parametrize(
    ("answer", "boxed"),
    [
        (r"<think> first \boxed{3}, hence </think> so \boxed{2}", "2"),
        (r"first \boxed{4} no wait \boxed{5}", "5"),
        (r"therefore \boxed{840}.,but let me explain. **Final Answer** \boxed{840}", "840"),  # Math-Verify 44
        (r"\boxed{35 cm} ++++++ \boxed{4}", "4"),  # Math-Verify 57
        (r"\fbox{7} and more text after it", "7"),
        (r"\boxed {\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{[0, 1\}}", r"[0, 1\}"),
        (r"\boxed{4} or \boxed{5", "4"),
        (r"\boxed{4 or \boxed{5}", "5"),
        (r"\boxed{x = \boxed{6}}", "6"),
        (r"a } stray brace, \boxed{8}", "8"),
        (r"\begin{aligned}1\\\boxed{9}\end{aligned}", "9"),
        (r"</think> \boxed{1} </think> \boxed{2}", "2"),
    ],
)
def test_the_last_closed_box_after_the_reasoning_is_the_final_answer(answer, boxed):
    final = final_answer(answer, expecting(""))
    assert (final.text, final.boxed) == (boxed, True)


@pytest.mark.parametrize("score", SCORERS)
def test_only_the_last_of_several_boxes_counts_at_any_distance(score):
    for between in (" ", " no wait ", ", ", " and ", " word" * 40):
        answer = rf"first \boxed{{4}}{between}\boxed{{5}}"
        assert (score(answer, expecting("5")), score(answer, expecting("4"))) == (1.0, 0.0)


balanced = st.recursive(
    st.text(alphabet="19x+ ", max_size=4) | st.sampled_from([r"\{", r"\}", r"\\", r"\frac"]),
    lambda inner: st.lists(inner, max_size=3).map("".join) | inner.map(lambda text: "{" + text + "}"),
    max_leaves=8,
)


@given(
    thoughts=st.lists(balanced, max_size=3), content=balanced, after=balanced, name=st.sampled_from(["boxed", "fbox"])
)
def test_whatever_stands_around_it_the_last_box_is_read_whole(thoughts, content, after, name):
    boxes = "".join(rf" \boxed{{{thought}}} so " for thought in thoughts)
    assert last_boxed(rf"{boxes} \{name}{{{content}}} {after}") == content
    final = final_answer(rf"{boxes}</think>{after}", expecting(""))
    assert (final.text, final.boxed) == (after.strip(), False)


@pytest.mark.parametrize(
    ("answer", "meta", "reward"),
    [
        (r"<think>\boxed{2}", {}, 0.0),
        (r"<think>\boxed{3}</think> <think> \boxed{2}", {}, 0.0),
        (r"<think>\boxed{3}</think>\boxed{2}", {}, 1.0),
        (r"\boxed{2}", {}, 1.0),
        (r"\boxed{2}", {"reasoning_required": True}, 0.0),  # the prompt ends with <think>
        (r"\boxed{3}</think>\boxed{2}", {"reasoning_required": True}, 1.0),
        (r"<think>\boxed{2}", {"reasoning_required": False}, 1.0),
        (r"<think>\boxed{2} and then", CUT, 0.0),
    ],
)
@pytest.mark.parametrize("score", SCORERS)
def test_boxes_in_an_unfinished_reasoning_do_not_count(score, answer, meta, reward):
    assert score(answer, expecting("2", meta)) == reward


def test_every_scorer_judges_what_follows_the_reasoning():
    import reasoning_gym as gym

    params = {"seed": 7, "size": 1}
    entry = gym.create_dataset("chain_sum", **params)[0]
    meta = {"dataset": "chain_sum", "params": params, "entry": pack(entry)}
    for name in REWARDS.entries:
        right = entry["answer"] if name in ("exact", "last_number") else rf"\boxed{{{entry['answer']}}}"
        problem = expecting(entry["answer"], meta)
        score = REWARDS.load(name)
        assert score(rf"<think> \boxed{{1}} </think> {right}", problem) == 1.0, name
        assert score(rf"<think> {right} </think> \boxed{{1}}", problem) < 1.0, name
        assert score(rf"<think> {right}", problem) < 1.0, name


# --- last_number ---------------------------------------------------------------------------------


@given(st.lists(st.integers(), min_size=1, max_size=5), st.integers(), st.integers(0, 3))
def test_last_number_compares_the_last_integer_whatever_zeros_it_begins_with(numbers, other, zeros):
    *before, last = numbers
    written = f"{'-' if last < 0 else ''}{'0' * zeros}{abs(last)}"
    answer = " ".join([*map(str, before), written])
    assert last_number(answer, expecting(str(last))) == 1.0
    assert last_number(answer, expecting(str(other))) == float(other == last)
    assert last_number(answer, expecting(str(last), CUT)) == 0.0


def test_last_number_takes_answers_without_a_number_and_with_thousands_of_digits():
    for answer in ("", "none", "9" * 10_000, "-"):
        assert last_number(answer, expecting("9")) == 0.0


# --- numbers -------------------------------------------------------------------------------------


@given(st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=3), st.data())
def test_a_number_may_be_written_with_an_exponent_by_the_problem_or_the_policy(number, data):
    exponent = data.draw(st.integers(-5, 5))
    written = f"{number.scaleb(-exponent):f}{data.draw(st.sampled_from('eE'))}{exponent}"
    plain = f"{number:f}"
    assert Fraction(plain_number(written)) == Fraction(number)
    assert math_verify(rf"\boxed{{{plain}}}", expecting(written)) == 1.0
    assert math_verify(rf"\boxed{{{written}}}", expecting(plain)) == 1.0
    assert math_verify(rf"\boxed{{{number + 1:f}}}", expecting(written)) == 0.0


@pytest.mark.parametrize(
    ("expected", "answer", "other"),
    [
        ("1e3", "1000", "1"),
        ("1_000", "1000", "1"),
        ("1 000", "1000", "0"),
        ("1000000", r"1\,000\,000", "1"),
        ("1.", "1", "2"),
        ("１２", "12", "1"),
        ("1 1/2", "3/2", "1"),
        ("-2 1/4", "-2.25", "-2"),
    ],
)
def test_numbers_are_compared_as_numbers_however_they_are_written(expected, answer, other):
    assert math_verify(rf"\boxed{{{answer}}}", expecting(expected)) == 1.0
    assert math_verify(rf"\boxed{{{other}}}", expecting(expected)) == 0.0


@pytest.mark.parametrize("answer", ["Final Answer: **73**", "The answer is 7.3e1.", "It is 73"])
def test_math_verify_reads_numbers_in_text_without_a_box(answer):  # Math-Verify 76
    assert math_verify(answer, expecting("73")) == 1.0


@pytest.mark.parametrize("expected", ["0x10", "0b11", "1.2.3", "nan", "1e999", r"2^{2^{100}}", "9" * 600])
def test_expected_answers_that_are_read_otherwise_or_take_long_count_as_text_alone(expected):
    assert compared_as_text(expected)
    assert math_verify(rf"So \boxed{{{expected}}}.", expecting(expected)) == 1.0
    assert math_verify(r"\boxed{1}", expecting(expected)) == 0.0


@pytest.mark.parametrize("expected", ["1000", "1e3", "2x", "12k", "x^2+1", r"\frac{1}{2}", "3+4i", "Paris", "#### 42"])
def test_usual_expected_answers_are_compared_as_mathematics(expected):
    assert not compared_as_text(expected)


# --- hostile answers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        "9^{9^{9^{9}}}",
        "9^{9^{9}}",
        "9**9**9**9",
        "9^{(9^9)}",
        r"9^{9999 \cdot 9999}",
        r"10^{-999999}",
        "(9^{9999})^{9999}",
        "{9^{9999}}^{9999}",
        "(x+1)^{1000}",
        "99999999!",
        "((9!)!)!",
        r"\left(9!\right)!!",
        r"\binom{10000000}{5000000}",
        r"\sum_{k=1}^{1000000} \frac{1}{k}",
        r"\int_0^1 \sin(x^2) e^{x} dx",
        "(" * 3000 + "1" + ")" * 3000,
        "(" * 30 + "1" + ")" * 30,
        "{" * 30 + "1" + "}" * 30,
        r"\sin(" * 10 + "1" + ")" * 10,
        "9" * 100_000,
        "1+" * 10_000 + "1",
    ],
)
def test_an_answer_that_would_take_long_gets_nothing_and_is_never_parsed(answer, monkeypatch):
    monkeypatch.setattr(math_verify_package, "parse", lambda *_, **__: pytest.fail("it was parsed"))
    for text in (rf"\boxed{{{answer}}}", rf"<think>{answer}</think>\boxed{{{answer}}}"):
        assert math_verify(text, expecting("42")) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        r"\left(\frac{2}{3}\right)^{2023}",
        r"2^{2024}",
        r"\frac{n!}{k!(n-k)!}",
        r"\binom{2024}{1012}",
        r"e^{-x^{2}/2}",
        r"2^{2^{n}}",
        r"\sqrt{1+\sqrt{1+\sqrt{2}}}",
        r"(x+1)^{10}",
        r"[0,1)\cup(2,\infty)",
        r"123456 \cdot 10^{6}",
        r"\sum_{k=1}^{n} k^2",
    ],
)
def test_usual_answers_are_compared(answer):
    assert quickly_compared(answer)


@given(st.text(alphabet="9^{}()!*+x\\ ", max_size=60))
def test_no_text_breaks_the_checks(text):
    quickly_compared(text)
    final_answer(text, expecting(""))


@given(st.lists(st.integers(2, 12), min_size=2, max_size=3), st.booleans())
def test_a_tower_of_numbers_passes_only_if_its_exponent_is_small(numbers, braces):
    exponents = numbers[1:]
    tower = "^{".join(map(str, numbers)) + "}" * len(exponents) if braces else "**".join(map(str, numbers))
    if quickly_compared(tower):
        assert len(exponents) == 1 or exponents[0] ** exponents[1] <= 9999


def test_long_text_without_a_box_is_read_at_its_end():
    assert math_verify("$ " * 10_000 + "The answer is 42.", expecting("42")) == 1.0


@pytest.mark.parametrize("answer", ["9**9**9**9", "99999999!", "((9!)!)!"])
def test_scorers_of_reasoning_gym_do_not_compute_what_would_take_long(answer):
    import reasoning_gym as gym

    params = {"seed": 7, "size": 1}
    entry = gym.create_dataset("countdown", **params)[0]
    meta = {"dataset": "countdown", "params": params, "entry": pack(entry)}
    assert reasoning_gym(answer, expecting(str(entry["answer"]), meta)) == 0.0
    assert reasoning_gym(rf"\boxed{{{answer}}}", expecting(str(entry["answer"]), meta)) == 0.0
