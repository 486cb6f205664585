"""Tasks: what is trained on, what is held out, and what bad input says."""

import hashlib
import json
import math
import re
import sys
import time
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qurl_ray.config.task import ArithmeticTask, CustomTask, DatasetTask, ReasoningGymTask
from qurl_ray.data.tasks import Task, load_task
from qurl_ray.errors import DataError
from qurl_ray.tables import REWARDS
from qurl_ray.types import Problem

QUICKSTART = "95c2d0d82b27dc4972c6a1bef9ea6632a4b43923b7799505bd8e145b3a5aa8ae"
"""Digest of prompts and answers of the default settings, from a version that had problems of two operands alone."""


def prompts(problems):
    return {problem.prompt for problem in problems}


def uids(task):
    return [problem.uid for problem in (*task.train, *task.held_out)]


# --- arithmetic ----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    operators=st.sampled_from(["+", "-", "*", "+-", "*-+", "++"]),
    low=st.integers(0, 5),
    more=st.integers(1, 12),
    share=st.floats(0.01, 0.99),
    seed=st.integers(-5, 2**63),
)
def test_arithmetic_splits_all_problems_into_two_parts_that_never_meet(operators, low, more, share, seed):
    section = ArithmeticTask(
        operators=operators, min_operand=low, max_operand=low + more, held_out_share=share, seed=seed
    )
    task = load_task(section, eval_problems=10**6)
    operands = range(low, low + more + 1)
    assert prompts(task.train) | prompts(task.held_out) == {
        f"{a}{op}{b}=" for op in operators for a in operands for b in operands
    }
    assert not prompts(task.train) & prompts(task.held_out)
    assert len(set(uids(task))) == len(uids(task)) == len(set(operators)) * len(operands) ** 2
    assert all(eval(p.prompt[:-1]) == int(p.answer) for p in (*task.train, *task.held_out))


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    operators=st.sampled_from(["+", "-", "+-"]),
    terms=st.integers(2, 6),
    digits=st.integers(1, 4),
    worked=st.booleans(),
    largest=st.integers(3, 2000),
    seed=st.integers(0, 99),
)
def test_long_and_worked_problems_are_what_python_says(operators, terms, digits, worked, largest, seed):
    """Python evaluates each beginning of the sum; `format` pads to the digits, after a minus sign, too."""
    section = ArithmeticTask(
        operators=operators, terms=terms, digits=digits, worked=worked, max_operand=largest, seed=seed
    )
    task = load_task(section, eval_problems=200)
    assert not prompts(task.train) & prompts(task.held_out)
    for problem in [*task.held_out, *task.train[:200]]:
        assert problem.prompt[-1] == "="
        operands, signs = re.findall(r"\d+", problem.prompt), re.findall(r"[-+]", problem.prompt)
        assert len(operands) == terms
        assert set(signs) <= set(operators)
        assert all(operand == str(int(operand)).zfill(digits) for operand in operands)
        values = [int(operand) for operand in operands]
        running = [
            sum(value if sign == "+" else -value for sign, value in zip(["+", *signs[:n]], values, strict=False))
            for n in range(1, terms)
        ]
        written = [("-" if value < 0 else "") + str(abs(value)).rjust(digits - (value < 0), "0") for value in running]
        assert problem.answer == written[-1]
        assert problem.meta == ({"worked": " ".join(written)} if worked else {})
        said = problem.meta.get("worked", problem.answer)
        assert REWARDS.load(task.reward)(said, problem) == 1.0
    assert task.reward == ("last_number" if worked else "exact")


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 30), st.sampled_from(["+", "*-"]), st.integers(2, 5))
def test_zeros_and_work_change_only_the_text_of_problems_of_two_operands(seed, operators, digits):
    shape = {"operators": operators, "max_operand": 9, "seed": seed}
    plain = load_task(ArithmeticTask(**shape), eval_problems=500)
    padded = load_task(ArithmeticTask(**shape, digits=digits, worked=True), eval_problems=500)
    for before, after in zip([*plain.train, *plain.held_out], [*padded.train, *padded.held_out], strict=True):
        assert re.sub(r"0*(\d)", r"\1", after.prompt) == re.sub(r"0*(\d)", r"\1", before.prompt)
        assert (int(after.answer), after.uid) == (int(before.answer), before.uid)
        assert before.meta == {}


def test_the_quickstarts_problems_are_those_of_before_there_were_longer_ones():
    task = load_task(ArithmeticTask(), eval_problems=500)
    digest = hashlib.sha256("".join(p.prompt + p.answer for p in (*task.train, *task.held_out)).encode()).hexdigest()
    assert digest == QUICKSTART


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"terms": 3, "operators": "+*"}, r"terms=3 takes the operators \+ and -, not \+\*"),
        ({"terms": 1}, "greater than or equal to 2"),
        ({"digits": 0}, "greater than or equal to 1"),
    ],
)
def test_impossible_long_problems_are_refused_as_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        ArithmeticTask(**fields)


def test_arithmetic_prompts_and_answers_look_like_this():
    task = load_task(ArithmeticTask(operators="-", min_operand=3, max_operand=4), eval_problems=9)
    assert {p.prompt: p.answer for p in (*task.train, *task.held_out)} == {
        "3-3=": "0",
        "3-4=": "-1",
        "4-3=": "1",
        "4-4=": "0",
    }


def test_arithmetic_depends_on_the_seed_alone():
    first, again, other = (load_task(ArithmeticTask(seed=seed), eval_problems=500) for seed in (1, 1, 2))
    assert list(first.train) == list(again.train)
    assert list(first.held_out) == list(again.held_out)
    assert list(first.held_out) != list(other.held_out)


def test_at_most_the_problems_asked_for_are_held_out_and_training_does_not_get_the_others():
    few, many = (load_task(ArithmeticTask(), eval_problems=n) for n in (500, 10**6))
    assert (len(few.held_out), len(many.held_out), len(few.train)) == (500, 2000, 8000)
    assert list(many.held_out)[:500] == list(few.held_out)
    assert list(few.train) == list(many.train)


def test_arithmetic_problems_can_be_indexed_and_sliced_like_a_list():
    train = load_task(ArithmeticTask(), eval_problems=1).train
    assert train[-1] == list(train)[-1]
    assert list(train[3:5]) == [train[3], train[4]]
    with pytest.raises(IndexError):
        train[len(train)]


@pytest.mark.slow
@pytest.mark.parametrize("largest", [1_500, 10**12])
def test_arithmetic_too_large_to_list_is_sampled(largest):
    task = load_task(ArithmeticTask(operators="+*", max_operand=largest, held_out_share=0.1), eval_problems=1000)
    assert (len(task.train), len(task.held_out)) == (900_000, 1000)
    sample = [task.train[index] for index in range(0, 900_000, 900)]
    assert len(prompts(sample)) == 1000
    assert not prompts(sample) & prompts(task.held_out)
    assert all(eval(problem.prompt[:-1]) == int(problem.answer) for problem in sample)
    assert 350 < sum("+" in problem.prompt for problem in sample) < 650


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"operators": "+/"}, r"operators is '\+/'; it takes one or more of \+ - \*"),
        ({"operators": ""}, "operators is ''"),
        ({"min_operand": 9, "max_operand": 3}, r"min_operand \(9\) exceeds task.max_operand \(3\)"),
        ({"min_operand": 3, "max_operand": 3}, "one problem only"),
        ({"max_operand": 2**62}, "must be below"),
        ({"max_operand": 2**61, "terms": 4}, r"must be below 2\*\*62 / task.terms"),
    ],
)
def test_impossible_arithmetic_is_an_error(fields, message):
    with pytest.raises(DataError, match=message):
        load_task(ArithmeticTask(**fields), eval_problems=5)


def test_the_digest_tells_apart_all_that_a_run_is_about():
    """Answers, order and meta of both parts; a problem without meta counts as before there was meta in it."""
    one, two = Problem(uid="a", prompt="p", answer="1"), Problem(uid="b", prompt="q", answer="2")
    changed = [replace(two, answer="3"), replace(two, meta={"tests": [1]}), replace(two, meta={"tests": [2]})]
    tasks = [([one], [two]), ([two], [one]), ([one, two], []), ([one], []), *(([one], [other]) for other in changed)]
    digests = [Task(train=train, held_out=held_out, reward="exact").digest() for train, held_out in tasks]
    assert len(set(digests)) == len(tasks)
    orders = [replace(two, meta=meta) for meta in ({"m": 1, "n": 2}, {"n": 2, "m": 1})]
    assert len({Task(train=[one], held_out=[other], reward="exact").digest() for other in orders}) == 1
    known = hashlib.blake2b(b'1 1\n["a", "p", "1"]\n["b", "q", "2"]\n', digest_size=16)
    assert digests[0] == known.hexdigest()


# --- reasoning-gym -------------------------------------------------------------------------------


def gym_task(**fields):
    return ReasoningGymTask(**{"dataset": "chain_sum", "train_size": 30, "held_out_size": 10, **fields})


def test_reasoning_gym_problems_are_disjoint_repeatable_and_plain_json():
    task, again = (load_task(gym_task(), eval_problems=500) for _ in range(2))
    assert (len(task.train), len(task.held_out)) == (30, 10)
    assert not prompts(task.train) & prompts(task.held_out)
    assert task == again
    assert len(set(uids(task))) == 40
    problem = task.train[0]
    assert json.loads(json.dumps(problem.meta)) == problem.meta
    assert REWARDS.load(task.reward)(problem.answer, problem) == 1.0


def test_reasoning_gym_passes_parameters_on():
    task = load_task(gym_task(params={"min_terms": 7, "max_terms": 7}), eval_problems=1)
    assert all(problem.prompt.count(" + ") + problem.prompt.count(" - ") == 6 for problem in task.train)
    assert len(task.held_out) == 1


def test_in_a_small_world_training_gives_way_to_the_held_out_problems():
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = load_task(gym_task(params=params, train_size=600, held_out_size=40), eval_problems=500)
    assert not prompts(task.train) & prompts(task.held_out)
    assert 30 < len(prompts(task.held_out)) == len(task.held_out) <= 40
    assert len(task.notes) == 1
    assert "left out because they are held out" in task.notes[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": "chain_sums"}, "no data set 'chain_sums'; did you mean 'chain_sum'"),
        ({"params": {"min_term": 3}}, "no parameter 'min_term'; did you mean 'min_terms'"),
        ({"params": {"seed": 3}}, "use task.seed"),
        ({"params": {"min_terms": 0}}, "cannot make problems with task.params .*min_terms"),
        ({"params": {"min_terms": "two"}}, "cannot make problems"),
    ],
)
def test_an_impossible_reasoning_gym_task_is_an_error(fields, message):
    with pytest.raises(DataError, match=message):
        load_task(gym_task(**fields), eval_problems=5)


# --- files ---------------------------------------------------------------------------------------


def rows(count, start=0):
    return [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": 1} for n in range(start, start + count)]


def write(path, records):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_last_share_of_a_file_is_held_out(tmp_path, suffix):
    path = write(tmp_path / f"data{suffix}", rows(20))
    task = load_task(DatasetTask(path=path, held_out_share=0.25), eval_problems=500)
    assert [problem.prompt for problem in task.train] == [f"{n}+1=" for n in range(15)]
    assert [problem.answer for problem in task.held_out] == [str(n + 1) for n in range(15, 20)]
    assert len(set(uids(task))) == 20
    assert (task.reward, task.notes) == ("math_verify", ())


def test_held_out_problems_may_have_a_file_of_their_own(tmp_path):
    train = write(tmp_path / "train.jsonl", rows(20))
    held_out = write(tmp_path / "test.parquet", rows(4, start=18))
    task = load_task(DatasetTask(path=train, held_out_path=held_out), eval_problems=3)
    assert [problem.prompt for problem in task.held_out] == ["18+1=", "19+1=", "20+1="]
    assert len(task.train) == 18
    assert "2 training prompts left out" in task.notes[0]


def test_columns_may_have_other_names_and_hold_numbers(tmp_path):
    records = [{"question": f"{n}+1=", "solution": n + 1} for n in range(4)]
    path = write(tmp_path / "data.parquet", records)
    section = DatasetTask(path=path, prompt_column="question", answer_column="solution")
    assert load_task(section, eval_problems=1).train[0].answer == "1"


def test_held_out_columns_may_have_names_of_their_own(tmp_path):
    train = write(tmp_path / "train.jsonl", rows(5))
    held_out = write(tmp_path / "test.jsonl", [{"problem": "7+7=", "solution": 14}])
    section = DatasetTask(
        path=train, held_out_path=held_out, held_out_prompt_column="problem", held_out_answer_column="solution"
    )
    task = load_task(section, eval_problems=1)
    assert (task.held_out[0].prompt, task.held_out[0].answer) == ("7+7=", "14")
    assert len(task.train) == 5


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_without_prompt_or_answer_are_skipped_and_counted(tmp_path, suffix):
    empty = [{"prompt": " ", "answer": "1"}, {"prompt": "1+1=", "answer": None}, {"prompt": "1+1=", "answer": ""}]
    path = write(tmp_path / f"data{suffix}", rows(10) + empty)
    task = load_task(DatasetTask(path=path), eval_problems=500)
    assert len(task.train) + len(task.held_out) == 10
    assert "3 of 13 rows skipped" in task.notes[0]


def test_a_prompt_that_comes_twice_does_not_leak_from_the_held_out_part(tmp_path):
    path = write(tmp_path / "data.jsonl", rows(9) + rows(1))
    task = load_task(DatasetTask(path=path, held_out_share=0.1), eval_problems=500)
    assert prompts(task.held_out) == {"0+1="}
    assert len(task.train) == 8


def games(count: int):
    return [{"prompt": "Guess my number.", "meta": {"secret": n}} for n in range(count)]


def test_problems_that_differ_only_in_meta_are_different_problems():
    """But what is the same in all is left out of training."""
    task = load_task(CustomTask(problems="tests.data.test_tasks:games", params={"count": 20}), eval_problems=9)
    assert (len(task.train), len(task.held_out), task.notes) == (18, 2, ())
    twice = {"problems": "tests.data.test_tasks:games_twice", "reward": "exact"}
    task = load_task(CustomTask(**twice), eval_problems=9)
    assert [problem.meta["secret"] for problem in task.train] == [0, 1]
    assert "1 training prompts left out" in task.notes[0]


def games_twice():
    return {"train": games(3), "held_out": games(4)[2:]}


def test_rows_without_answers_differ_by_their_other_columns(tmp_path):
    rows = [{"prompt": "Guess my number.", "secret": n} for n in range(20)]
    task = load_task(DatasetTask(path=write(tmp_path / "d.jsonl", rows), reward="mine:score"), eval_problems=9)
    assert (len(task.train), len(task.held_out)) == (18, 2)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_missing_column_is_named_with_the_nearest_and_all_that_there_are(tmp_path, suffix):
    path = write(tmp_path / f"data{suffix}", [{"prompts": "1+1=", "answer": "2"}])
    with pytest.raises(
        DataError, match=r"no column 'prompt' \(did you mean 'prompts'\?\); it has (prompts, answer|answer, prompts)"
    ):
        load_task(DatasetTask(path=path), eval_problems=5)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("data.jsonl", "", "is empty"),
        ("data.jsonl", "\n\n", "is empty"),
        ("data.jsonl", '{"prompt": "", "answer": "2"}\n', "each of the 1 rows has an empty prompt or answer"),
        ("data.jsonl", '{"prompt": "1+1=", "answer": "2"}\n', "one usable problem only"),
        ("data.jsonl", '{"prompt": "1+1=", "answer": "2"}\n{"prompt"', "line 2: not JSON"),
        ("data.jsonl", '{"prompt": ' + "1" * 5000 + "}", "line 1: not JSON"),
        ("data.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("data.jsonl", "[1, 2]\n", "line 1: expected an object, got list"),
        ("data.jsonl", '{"prompt": [1], "answer": "2"}\n', "line 1: 'prompt' is list"),
        ("data.json", '{"prompt": "1+1="}', "expected an array of objects, got dict"),
        ("data.json", '[{"prompt": "1+1=", "answer": 2}, 3]', "row 2: expected an object, got int"),
        ("data.parquet", "not parquet", "not a readable parquet file"),
        ("data.txt", "1+1=", r"takes files ending in .jsonl, .json, .parquet"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        load_task(DatasetTask(path=str(path)), eval_problems=5)


def test_byte_order_marks_are_taken(tmp_path):
    """One at the start, and one inside, as of two files that were put together."""
    path = tmp_path / "data.jsonl"
    lines = [json.dumps(row) + "\n" for row in rows(10)]
    path.write_text("\ufeff" + "".join(lines[:5]) + "\ufeff" + "".join(lines[5:]) + "\ufeff\n", encoding="utf-8")
    plain = write(tmp_path / "plain.jsonl", rows(10))
    read, expected = (load_task(DatasetTask(path=str(file)), eval_problems=5) for file in (path, plain))
    assert (read.train, read.held_out, read.notes) == (expected.train, expected.held_out, expected.notes)


def test_a_file_that_may_not_be_read_is_an_error(tmp_path, monkeypatch):
    path = write(tmp_path / "data.jsonl", rows(5))

    def refuse(*_: object, **__: object):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("pathlib.Path.open", refuse)
    with pytest.raises(DataError, match=r"data\.jsonl cannot be read: Permission denied"):
        load_task(DatasetTask(path=path), eval_problems=5)


def test_a_missing_file_is_an_error_and_not_looked_for_on_the_hub(tmp_path):
    with pytest.raises(DataError, match=r"no such file: .*nowhere.jsonl"):
        load_task(DatasetTask(path=str(tmp_path / "nowhere.jsonl")), eval_problems=5)


def test_the_same_file_for_training_and_held_out_leaves_nothing_to_train_on(tmp_path):
    path = write(tmp_path / "data.jsonl", rows(5))
    with pytest.raises(DataError, match="none is left to train on"):
        load_task(DatasetTask(path=path, held_out_path=path), eval_problems=5)


def test_a_hub_data_set_is_read_by_configuration_and_split(monkeypatch):
    import datasets

    asked = []

    def load_dataset(path, name, *, split):
        asked.append((path, name, split))
        return datasets.Dataset.from_list(rows(6) if split == "train" else rows(2, start=90))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    section = DatasetTask(path="openai/gsm8k", name="main", held_out_path="openai/gsm8k")
    task = load_task(section, eval_problems=5)
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert (len(task.train), [problem.prompt for problem in task.held_out]) == (6, ["90+1=", "91+1="])


def test_a_hub_that_does_not_answer_is_a_clear_error(monkeypatch):
    import datasets

    def load_dataset(path, name, *, split):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"openai/gsm8k is no local file, .*Couldn't reach the hub.*Offline, download"):
        load_task(DatasetTask(path="openai/gsm8k"), eval_problems=5)


def test_expected_answers_that_math_verify_cannot_compare_are_announced_once(tmp_path):
    records = rows(6) + [{"prompt": f"{n}?", "answer": answer} for n, answer in enumerate(["1e3", "0x10", "9" * 600])]
    path = write(tmp_path / "d.jsonl", records)
    (note,) = load_task(DatasetTask(path=path), eval_problems=5).notes
    assert "accepts only the same text for 2 expected answers, such as" in note
    assert load_task(DatasetTask(path=path, reward="exact"), eval_problems=5).notes == ()
    assert load_task(DatasetTask(path=write(tmp_path / "e.jsonl", records[:7])), eval_problems=5).notes == ()


# --- layouts of others -----------------------------------------------------------------------------

ROLE = {"role": "user"}
VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [ROLE | {"content": f"What is {n} + 1? Let's think step by step."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"split": "train", "index": n, "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"},
    }
    for n in range(6)
]
"""As verl's examples/data_preprocess/gsm8k.py writes it."""
TRL = [{"prompt": f"The sky of day {n} is"} for n in range(6)]
"""TRL's prompt-only format, standard."""
TRL_TALK = [{"prompt": [ROLE | {"content": f"Colour {n}?"}], "solution": f"{n}", "level": n} for n in range(6)]
"""TRL's prompt-only format, conversational, with further columns, which its reward functions get."""


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_verls_layout_is_read_as_it_is(tmp_path, suffix):
    path = tmp_path / f"train{suffix}"
    path.write_text(json.dumps(VERL)) if suffix == ".json" else write(path, VERL)
    task = load_task(DatasetTask(path=str(path)), eval_problems=9)
    first = task.train[0]
    assert (first.answer, first.messages) == ("1", VERL[0]["prompt"])
    assert first.prompt == "What is 0 + 1? Let's think step by step."
    assert first.meta == {key: VERL[0][key] for key in ("data_source", "ability", "reward_model", "extra_info")}
    assert task.notes == (f"{path}: answers are in the column 'reward_model.ground_truth'",)
    assert REWARDS.load(task.reward)("1", first) == 1


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_trls_layouts_are_read_as_they_are(tmp_path, suffix):
    path = write(tmp_path / f"plain{suffix}", TRL)
    task = load_task(DatasetTask(path=path, reward="mine:score"), eval_problems=9)
    assert (task.train[0].prompt, task.train[0].answer, task.train[0].messages) == ("The sky of day 0 is", "", None)
    assert task.notes == (f"{path}: there is no column of answers; the reward gets none",)
    talk = load_task(DatasetTask(path=write(tmp_path / f"talk{suffix}", TRL_TALK)), eval_problems=9)
    assert (talk.train[1].answer, talk.train[1].prompt) == ("1", "Colour 1?")
    assert talk.train[1].meta == {"solution": "1", "level": 1}


def test_rows_without_an_answer_are_skipped_whatever_says_so(tmp_path):
    """NaN is what tables have where nothing is."""
    records = [{"prompt": f"{n}+1=", "answer": n + 0.5, "level": math.nan} for n in range(4)]
    records += [{"prompt": "9+1=", "answer": math.nan, "level": 1.0}]
    for suffix in (".jsonl", ".parquet"):
        task = load_task(DatasetTask(path=write(tmp_path / f"data{suffix}", records)), eval_problems=1)
        assert len(task.train) + len(task.held_out) == 4
        assert task.train[0].meta["level"] is None


@pytest.mark.parametrize("first", [True, False])
def test_a_null_where_others_hold_their_answer_is_an_empty_answer(tmp_path, first):
    records = [{"prompt": f"{n}+1=", "gold": {"value": str(n + 1)}} for n in range(4)]
    records.insert(0 if first else 4, {"prompt": "9+1=", "gold": None})
    path = write(tmp_path / "data.jsonl", records)
    task = load_task(DatasetTask(path=path, answer_column="gold.value"), eval_problems=1)
    assert [problem.answer for problem in (*task.train, *task.held_out)] == ["1", "2", "3", "4"]
    assert "1 of 5 rows skipped" in task.notes[0]


def test_a_reward_that_compares_needs_answers(tmp_path):
    with pytest.raises(DataError, match=r"no column 'answer'.*answer_column=null is for problems without answers"):
        load_task(DatasetTask(path=write(tmp_path / "data.jsonl", TRL)), eval_problems=9)
    with pytest.raises(ValueError, match="leaves nothing that reward math_verify could compare with"):
        DatasetTask(path="x.jsonl", answer_column=None)


def test_a_column_that_was_named_is_not_replaced_by_another(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"question": "1+1=", "solution": "2"}] * 3)
    for field in ("prompt_column", "answer_column"):
        with pytest.raises(DataError, match="no column 'text'"):
            load_task(DatasetTask(path=path, **{field: "text"}), eval_problems=9)


def test_fields_within_columns_are_named_with_dots(tmp_path):
    records = [{"a": {"b": {"c": f"{n}+1="}, "x.y": n + 1}, "d.e": n} for n in range(3)]
    path = write(tmp_path / "data.jsonl", records)
    task = load_task(DatasetTask(path=path, prompt_column="a.b.c", answer_column="a.x.y"), eval_problems=1)
    assert (task.train[0].prompt, task.train[0].answer) == ("0+1=", "1")
    assert task.train[0].meta == records[0]
    column = load_task(DatasetTask(path=path, prompt_column="a.b.c", answer_column="d.e"), eval_problems=1)
    assert column.train[1].answer == "1"


def test_columns_reach_the_reward_as_json_or_are_named(tmp_path):
    import datetime
    import decimal

    odd = {"when": datetime.date(2026, 1, 2), "price": decimal.Decimal("1.50"), "image": b"png", "truncated": True}
    path = write(tmp_path / "data.parquet", [row | odd for row in rows(4)])
    task = load_task(DatasetTask(path=path), eval_problems=1)
    assert task.train[0].meta == {"answer": "1", "level": 1, "when": "2026-01-02", "price": "1.50"}
    assert task.notes == (
        f"{path}: columns that the policy does not see: image",
        f"{path}: columns that rewards do not get, as they hold no plain values: image, truncated",
    )
    json.dumps(task.train[0].meta)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user"}], "line 1: message 1 has no content"),
        ([{"content": "x"}], "message 1 has no role"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "message 1 has a part of type 'image'; a prompt is text, and nothing else, here",
        ),
        ([{"role": "user", "content": " "}], "the conversation is empty"),
        ([{"role": "user", "content": "x"}, "y"], "message 2 is str"),
    ],
)
def test_messages_that_are_none_are_an_error(tmp_path, messages, message):
    with pytest.raises(DataError, match=message):
        load_task(DatasetTask(path=write(tmp_path / "d.jsonl", [{"prompt": messages, "answer": "1"}])), eval_problems=1)


def talk_of(n, last):
    return {"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": last}]}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_an_answer_at_the_end_of_a_conversation_is_the_expected_one_or_refused(tmp_path, suffix):
    """The layout of data sets for supervised training: the policy would continue after the answer."""
    path = write(tmp_path / f"talks{suffix}", [talk_of(n, str(n + 1)) for n in range(4)])
    place = "line 1" if suffix == ".jsonl" else "row 1"
    with pytest.raises(DataError, match=rf"{place}: .* turn of the assistant, '1', .*set task.last_turn=answer"):
        load_task(DatasetTask(path=path, answer_column=None, reward="mine:score"), eval_problems=9)
    with pytest.raises(DataError, match=rf"{place}: .* turn of the assistant"):  # and not that a column is missing
        load_task(DatasetTask(path=path), eval_problems=9)
    task = load_task(DatasetTask(path=path, last_turn="answer"), eval_problems=9)
    assert [(p.prompt, p.answer, len(p.messages)) for p in task.train] == [(f"{n}+1=", str(n + 1), 1) for n in range(3)]
    assert f"{path}: there is no column of answers; they are the last turns" in task.notes
    kept = load_task(DatasetTask(path=path, last_turn="continue", reward="mine:score"), eval_problems=9)
    assert kept.train[0].messages == talk_of(0, "1")["messages"]
    both = write(tmp_path / f"both{suffix}", [talk_of(n, "Let me see.") | {"answer": f"{n}"} for n in range(4)])
    found = load_task(DatasetTask(path=both, prompt_column="messages", last_turn="answer"), eval_problems=9)
    assert [(p.answer, len(p.messages)) for p in found.train] == [(f"{n}", 1) for n in range(3)]
    empty = write(tmp_path / f"empty{suffix}", [talk_of(n, "") | {"answer": f"{n}"} for n in range(4)])
    assert load_task(DatasetTask(path=empty), eval_problems=9).train[0].answer == "0"  # it is where the answer goes


def conversations():
    return [{"prompt": talk_of(n, str(n + 1))["messages"]} for n in range(4)]


def leaving():
    sys.exit(9)


def dawdling():
    time.sleep(0.5)
    return conversations()


def test_a_function_that_exits_is_an_error_that_names_it():
    with pytest.raises(
        DataError, match=r"tests.data.test_tasks:leaving failed .*SystemExit: 9 \(.*test_tasks.py, line"
    ):
        load_task(CustomTask(problems="tests.data.test_tasks:leaving", reward="exact"), eval_problems=9)


def test_a_function_that_takes_long_is_announced(monkeypatch, capsys):
    monkeypatch.setattr("qurl_ray.extensions._SLOW_S", 0.1)
    settings = {"problems": "tests.data.test_tasks:dawdling", "reward": "exact", "last_turn": "answer"}
    load_task(CustomTask(**settings), eval_problems=9)
    said = capsys.readouterr().err.splitlines()
    assert len(said) in range(1, 6)
    assert said[0] == "task.problems=tests.data.test_tasks:dawdling has been running for 0 s"


def test_the_same_of_problems_that_a_function_makes():
    settings = {"problems": "tests.data.test_tasks:conversations", "reward": "exact"}
    with pytest.raises(DataError, match=r"problem train-0: the messages end with a turn of the assistant"):
        load_task(CustomTask(**settings), eval_problems=9)
    task = load_task(CustomTask(**settings, last_turn="answer"), eval_problems=9)
    assert [(p.prompt, p.answer) for p in task.train] == [(f"{n}+1=", str(n + 1)) for n in range(3)]
    assert len(load_task(CustomTask(**settings, last_turn="continue"), eval_problems=9).train[0].messages) == 2


HALF = r"\\ud83d is half of a surrogate pair"


@pytest.mark.parametrize("column", ["prompt", "answer", "level", "messages", "key"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_half_of_a_surrogate_pair_is_an_error_that_names_the_line(tmp_path, suffix, column):
    records = rows(4)
    broken = {"prompt": "a\ud83d", "answer": "\ud83d", "level": ["\ud83d"], "messages": [{"role": "\ud83d"}]}
    records[2] |= {"\ud83d": 1} if column == "key" else {column: broken[column]}
    path = tmp_path / f"data{suffix}"
    path.write_text(json.dumps(records)) if suffix == ".json" else write(path, records)
    with pytest.raises(DataError, match=f"{'row' if suffix == '.json' else 'line'} 3: {HALF}"):
        load_task(DatasetTask(path=str(path)), eval_problems=1)
    records[2] = rows(1)[0] | {"prompt": "\U0001f600"}  # written as a pair of escapes
    path.write_text(json.dumps(records)) if suffix == ".json" else write(path, records)
    assert load_task(DatasetTask(path=str(path)), eval_problems=1).train[2].prompt == "\U0001f600"


def broken(**fields):
    """A function of a user's own that makes problems."""
    return [{"prompt": "1+1=", "answer": "2"} | fields, {"prompt": "2+2=", "answer": "4"}]


@pytest.mark.parametrize("fields", [{"prompt": "\ud83d"}, {"answer": "\ud83d"}, {"meta": {"a": ["\ud83d"]}}])
def test_half_of_a_surrogate_pair_in_a_users_problem_is_an_error(fields):
    with pytest.raises(DataError, match=f"problem train-0: {HALF}"):
        load_task(CustomTask(problems=f"{__name__}:broken", params=fields, reward="exact"), eval_problems=1)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_prompt_that_is_json_text_of_messages_is_read_and_said(tmp_path, suffix):
    talks = [[{"role": "user", "content": f"{n}+1="}] for n in range(4)]
    path = write(tmp_path / f"d{suffix}", [{"prompt": json.dumps(talk), "answer": "1"} for talk in talks])
    task = load_task(DatasetTask(path=path), eval_problems=1)
    assert [problem.messages for problem in task.train] == talks[:3]
    assert task.notes == (f"{path}: 4 prompts are JSON text of messages, and are read as messages",)


@pytest.mark.parametrize("prompt", ["[1, 2]", '[{"a": 1}]', "[{", '[{"role": "user"}, 2]', "[]"])
def test_other_json_is_a_prompt_like_any_text(tmp_path, prompt):
    records = [{"prompt": prompt, "answer": "1"}, {"prompt": "x", "answer": "1"}]
    (problem,) = load_task(DatasetTask(path=write(tmp_path / "d.jsonl", records)), eval_problems=1).train
    assert (problem.prompt, problem.messages) == (prompt, None)


@pytest.mark.parametrize("talk", [False, True])
@pytest.mark.parametrize(("place", "column"), [("<image>", "images"), ("<video>", "video"), ("<audio>", "audios")])
def test_a_prompt_about_an_image_is_refused(tmp_path, place, column, talk):
    asked = f"{place}What is this?"
    record = {"prompt": [ROLE | {"content": asked}] if talk else asked, "answer": "1", column: ["x.png"]}
    with pytest.raises(DataError, match=f"line 1: {place} stands for what is in '{column}'"):
        load_task(DatasetTask(path=write(tmp_path / "d.jsonl", [record] * 3)), eval_problems=1)


def test_columns_that_the_policy_does_not_see_are_named(tmp_path):
    more = {"images": ["x.png"], "system": "Be brief.", "context": "", "videos": []}
    task = load_task(DatasetTask(path=write(tmp_path / "d.jsonl", [row | more for row in rows(4)])), eval_problems=1)
    assert task.notes == (f"{tmp_path / 'd.jsonl'}: columns that the policy does not see: images, system",)


def test_several_sets_of_held_out_problems_each_keep_their_limit_and_name(tmp_path):
    train = write(tmp_path / "train.jsonl", rows(20))
    sets = {name: write(tmp_path / f"{name}.jsonl", rows(5, start=at)) for name, at in (("easy", 15), ("hard", 50))}
    task = load_task(DatasetTask(path=train, held_out_path=sets), eval_problems=3)
    assert [problem.held_out_set for problem in task.held_out] == ["easy"] * 3 + ["hard"] * 3
    assert [problem.uid for problem in task.held_out] == [f"{s}-{n}" for s in ("easy", "hard") for n in range(3)]
    assert len(set(uids(task))) == len(uids(task))
    assert len(task.train) == 15  # those of `easy` beyond the limit are not trained on, either
    assert {problem.held_out_set for problem in task.train} == {""}


@pytest.mark.parametrize("sets", [{}, {"train": "x.jsonl"}, {"a/b": "x.jsonl"}])
def test_sets_without_a_name_are_refused(sets):
    with pytest.raises(ValueError, match="held_out_path"):
        DatasetTask(path="x.jsonl", held_out_path=sets)


# --- rewards -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "used"), [(None, "exact"), ("mine:score", "mine:score")])
def test_a_users_own_reward_takes_the_place_of_the_tasks(own, used):
    assert load_task(ArithmeticTask(reward=own), eval_problems=1).reward == used
