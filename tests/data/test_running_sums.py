"""Running sums: their answers by Python's sum, and a task of them."""

import pytest

from qurl_ray.config.task import CustomTask
from qurl_ray.data.running_sums import running_sums
from qurl_ray.data.tasks import load_task
from qurl_ray.errors import DataError


def test_each_token_of_an_answer_is_the_sum_of_the_digits_up_to_it():
    for problem in running_sums(digits=5, count=50):
        assert problem.prompt[-1] == "="
        assert problem.answer == "".join(str(sum(map(int, problem.prompt[: end + 1])) % 10) for end in range(5))


def test_a_task_of_running_sums_holds_out_problems_that_are_not_trained_on():
    section = CustomTask(problems="running_sums", params={"digits": 3, "count": 1000}, held_out_share=0.1)
    task = load_task(section, eval_problems=1000)
    train, held_out = ({problem.prompt for problem in part} for part in (task.train, task.held_out))
    assert (len(train), len(held_out), len(train | held_out)) == (900, 100, 1000)  # all there are, once each
    assert not task.notes


def test_seeds_are_other_problems_and_too_many_are_an_error():
    first, other = (next(iter(running_sums(seed=seed))).prompt for seed in (0, 1))
    assert first != other
    with pytest.raises(DataError, match=r"task\.problems=running_sums failed"):
        load_task(CustomTask(problems="running_sums", params={"digits": 2, "count": 101}), eval_problems=1)
