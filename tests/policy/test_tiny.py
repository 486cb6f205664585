"""The tiny policy: its tokenizer, its cold start, its cache."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qurl_ray.config.model import TINY_CHARACTERS, TinyModel
from qurl_ray.config.task import ArithmeticTask
from qurl_ray.data.tasks import load_task
from qurl_ray.errors import ConfigError
from qurl_ray.policy.tiny import cached_tiny_policy, demonstration, make_tokenizer
from qurl_ray.tables import REWARDS
from qurl_ray.types import Problem
from tests.conftest import SUMS

EASY = [Problem(uid=f"{a}", prompt=f"{a}=", answer=str(a)) for a in range(10, 90)]  # copying: learned in seconds
SMALL = {"hidden_size": 64, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate_size": 64}


def test_every_character_is_a_token_and_survives_a_round_trip():
    tokenizer = make_tokenizer()
    ids = tokenizer(TINY_CHARACTERS).input_ids
    assert len(ids) == len(set(ids)) == len(TINY_CHARACTERS)
    assert tokenizer.decode(ids) == TINY_CHARACTERS
    assert tokenizer("x").input_ids == [tokenizer.unk_token_id]


def test_a_cold_start_reaches_its_accuracy_and_is_made_once():
    config = TinyModel(**SMALL, cold_start_accuracy=0.3)
    seen = []
    folder = cached_tiny_policy(config, EASY, lambda step, accuracy: seen.append(accuracy))
    assert seen[-1] >= 0.3 > max([0, *seen[:-1]])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    right = 0
    for problem in EASY:
        ids = tokenizer(problem.prompt, return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
        right += tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == problem.answer
    assert right / len(EASY) > 0.15
    again = cached_tiny_policy(config, EASY, lambda *_: pytest.fail("it was in the cache"))
    assert again == folder


@pytest.mark.slow
def test_the_policy_is_the_mean_whose_accuracy_was_measured():
    """Of the problems, in the order of the seed, the first fifth is held out."""
    config = TinyModel(**SMALL, cold_start_accuracy=0.5, seed=3)
    seen = []
    folder = cached_tiny_policy(config, EASY, lambda step, accuracy: seen.append(accuracy))
    held = [EASY[i] for i in np.random.default_rng(3).permutation(len(EASY))[: len(EASY) // 5]]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    right = 0
    for problem in held:
        ids = tokenizer(problem.prompt + problem.answer, return_tensors="pt").input_ids
        likeliest = model(ids).logits[0].argmax(dim=-1).tolist()
        answer = tokenizer(problem.answer).input_ids
        right += likeliest[-len(answer) - 1 :] == [*answer, tokenizer.eos_token_id]
    assert right / len(held) == pytest.approx(seen[-1])


def test_another_recipe_is_another_policy():
    config = TinyModel(**SMALL, cold_start=False)
    folder = cached_tiny_policy(config, SUMS, lambda *_: None)
    assert cached_tiny_policy(config, EASY, lambda *_: None) == folder  # random weights know no task
    assert cached_tiny_policy(config.model_copy(update={"seed": 1}), SUMS, lambda *_: None) != folder


def test_an_accuracy_that_is_not_reached_is_an_error():
    with pytest.raises(ConfigError, match=r"cold start reached accuracy 0\.\d+ after 3 steps"):
        cached_tiny_policy(TinyModel(**SMALL, cold_start_steps=3), EASY, lambda *_: None)


def worked(count=80):
    """Problems such as 12+34+5=, with answers such as 46 51."""
    task = load_task(ArithmeticTask(terms=3, digits=2, worked=True), eval_problems=1)
    return task, list(task.train[:count])


def test_a_worked_problem_is_demonstrated_with_the_result_of_each_operator():
    task, problems = worked()
    for problem in problems:
        first, second, third = map(int, problem.prompt[:-1].split("+"))
        ((given, said),) = demonstration(problem, calculator=False)
        assert (given, said) == (problem.prompt, f"{first + second:02d} {first + second + third:02d}")
        assert REWARDS.load(task.reward)(said, problem) == 1.0


@pytest.mark.slow
def test_a_cold_start_on_worked_problems_learns_to_write_the_results_between():
    """Copies, written twice: what the policy then says has two numbers, and not the answer alone."""
    twice = [
        Problem(uid=p.uid, prompt=p.prompt, answer=p.answer, meta={"worked": f"{p.answer} {p.answer}"}) for p in EASY
    ]
    folder = cached_tiny_policy(TinyModel(**SMALL, cold_start_accuracy=0.3), twice, lambda *_: None)
    assert folder != cached_tiny_policy(TinyModel(**SMALL, cold_start_accuracy=0.3), EASY, lambda *_: None)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    said = []
    for problem in twice[:20]:
        ids = tokenizer(problem.prompt, return_tensors="pt").input_ids
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        said.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).split())
    assert sum(len(numbers) == 2 for numbers in said) > len(said) / 2
