"""Settings of tasks: problems, and how answers are judged."""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, field_validator, model_validator

from qurl_ray.config.section import Section
from qurl_ray.tables import PROBLEMS, REWARDS

PROMPT_COLUMNS = ("prompt", "messages", "question", "problem")
"""Usual names of columns of prompts; the first is the default, and the others are looked for where it is missing."""
ANSWER_COLUMNS = ("answer", "reward_model.ground_truth", "ground_truth", "solution")
"""Usual names of columns of answers, used in the same way."""

SetName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
"""Name of a set of held-out problems, which is part of its metrics' names."""


class TaskBase(Section):
    """Settings of all types of task."""

    reward: str | None = Field(
        None,
        description=f"Function that judges answers, (answer: str, problem: Problem) -> float: {REWARDS.help()}. null "
        "takes the one of the task's type.",
    )
    reward_timeout_s: float = Field(5.0, gt=0)
    """Deadline for judging one answer, in seconds. The process that judges it is killed at the deadline, and the reward
    has failed: the sample is counted in `reward/failed` and left out of the update. In an evaluation a failed reward
    counts as 0."""
    reward_memory_gb: float = Field(4.0, gt=0)
    """Largest amount of memory and temporary files that the process that judges, and all processes that it starts, may
    hold together, in GiB (2^30 bytes). Beyond it an allocation fails or the process is killed, and the reward has
    failed, as at the deadline. docs/failure.md says what is guaranteed where."""
    verifiers: int = Field(1, ge=1)
    """Number of verifiers, which judge answers at the same time."""
    template: str = "{prompt}"
    """Text around a problem's prompt, which replaces {prompt} in it. It is used if `chat` is off; the tiny policy takes
    only the default."""
    chat: bool = False
    """Wrap the prompt with the tokenizer's chat template, which must be there, as one user message. Prompts that are
    lists of messages are wrapped anyway."""
    system_prompt: str | None = None
    """System message before a prompt that goes through the chat template, unless its messages begin with one. It is
    saved with the policy, and so are `chat_template_args`: `qurl serve` uses them as well."""
    chat_template_args: dict[str, Any] = {}
    """Variables of the chat template, by name, such as `{enable_thinking: false}` for Qwen3. The column
    `chat_template_kwargs` of a row comes before them."""
    reasoning: bool | None = None
    """Require that an answer ends its reasoning with `</think>`: without it, the package's rewards give 0, as boxes in
    an unfinished reasoning do not count. null requires it if the prompt ends with `<think>`, as some chat templates
    write it, or if the answer itself has a `<think>`; true always, false never."""

    @field_validator("template")
    @classmethod
    def _prompt_has_a_place(cls, template: str) -> str:
        if "{prompt}" not in template:
            raise ValueError("must contain {prompt}")
        return template


class ArithmeticTask(TaskBase):
    """Sums (or differences, products) generated from a seed; no problem is both trained on and held out."""

    type: Literal["arithmetic"] = "arithmetic"
    operators: str = "+"
    """Operators of the problems: one or more of + - *, each equally frequent."""
    min_operand: int = Field(0, ge=0)
    """Smallest operand."""
    max_operand: int = Field(99, ge=1)
    """Largest operand."""
    terms: int = Field(2, ge=2)
    """Number of operands of a problem. With more than 2, `operators` are + and -, and a sample of the problems is
    drawn."""
    digits: int = Field(1, ge=1)
    """Least number of digits of each number, filled with zeros on the left: 3 writes 007+045=."""
    worked: bool = False
    """Answers have the result of every operator, `1+2+3=` is answered with `3 6`, and the last number counts. For
    answers of many tokens: the tiny policy is taught them so."""
    held_out_share: float = Field(0.2, gt=0, lt=1)
    """Share of all problems that is held out for evaluation."""
    seed: int = 0
    """Seed that shuffles the problems, and so decides which are held out."""

    @model_validator(mode="after")
    def _long_problems_are_sums(self) -> "ArithmeticTask":
        if self.terms > 2 and "*" in self.operators:
            raise ValueError(f"terms={self.terms} takes the operators + and -, not {self.operators}")
        return self


class ReasoningGymTask(TaskBase):
    """Any data set of reasoning-gym, chosen by name and judged by its own scorer."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    """Name of the data set, such as chain_sum or leg_counting."""
    params: dict[str, Any] = {}
    """Parameters of the data set, by name, except its seed and size."""
    train_size: int = Field(10_000, ge=1)
    """Number of problems generated for training."""
    held_out_size: int = Field(500, ge=1)
    """Number of problems generated for evaluation; repeated prompts are left out."""
    seed: int = 0
    """Seed of the first training problem. Each further problem has the next seed; those of held-out problems follow
    those of training problems."""


class RowsTask(TaskBase):
    """Settings of tasks whose prompts may be conversations."""

    last_turn: Literal["refuse", "continue", "answer"] = "refuse"
    """Meaning of messages that end with a turn of the assistant, as those of data sets for supervised training do.
    `answer` leaves this turn out of the prompt, and takes it as the expected answer if there is no other; `continue`
    lets the policy continue it; `refuse` ends the run before it starts."""


class DatasetTask(RowsTask):
    """Prompts and answers from a local file or a Hugging Face data set, judged by math-verify."""

    type: Literal["dataset"] = "dataset"
    path: str
    """Local .jsonl, .json or .parquet file, or hub id of a data set."""
    name: str | None = None
    """Configuration of a hub data set, such as `main` for openai/gsm8k; null means its default."""
    split: str = "train"
    """Split of a hub data set that is trained on."""
    held_out_path: str | dict[SetName, str] | None = None
    """Local file or hub id of the held-out problems, or several of them by names, `{aime24: aime24.parquet, ...}`: each
    has curves of its own, `eval/<name>/...`, and `eval/...` is of all together. null holds out the last
    `held_out_share` of `path`."""
    held_out_split: str = "test"
    """Split of `held_out_path`, if that is a hub data set."""
    held_out_share: float = Field(0.1, gt=0, lt=1)
    """Share of the problems of `path`, the last ones, that is held out if `held_out_path` is null."""
    prompt_column: str = Field(
        PROMPT_COLUMNS[0],
        description="Name of the column of prompts, text or lists of messages; a field within a column is "
        f"`column.field`. Where there is no `{PROMPT_COLUMNS[0]}`, the first of {', '.join(PROMPT_COLUMNS[1:])} is "
        "taken, and the run says so.",
    )
    answer_column: str | None = Field(
        ANSWER_COLUMNS[0],
        description=f"Name of the column of answers, likewise; instead of `{ANSWER_COLUMNS[0]}`, "
        f"{', '.join(ANSWER_COLUMNS[1:])} are looked for. A reward of your own needs no answers; null says that there "
        "are none. All columns but the prompt are in the reward's `problem.meta`.",
    )
    held_out_prompt_column: str | None = None
    """Name of the column of prompts in `held_out_path`; null means `prompt_column`."""
    held_out_answer_column: str | None = None
    """Name of the column of answers in `held_out_path`; null means `answer_column`."""

    @field_validator("held_out_path", mode="before")
    @classmethod
    def _sets_are_some(cls, held_out_path: Any) -> Any:
        sources = held_out_path.values() if isinstance(held_out_path, dict) else [held_out_path or ""]
        if not all(isinstance(source, str) for source in sources):
            raise ValueError("expected a file or hub id, or several of them by names")
        if isinstance(held_out_path, dict) and (not held_out_path or {"train"} & held_out_path.keys()):
            raise ValueError("names no set of problems" if not held_out_path else "a set cannot be called train")
        return held_out_path

    @model_validator(mode="after")
    def _answers_are_there(self) -> "DatasetTask":
        compares = (self.reward or "math_verify") in REWARDS.entries
        if self.answer_column is None and compares and self.last_turn != "answer":
            raise ValueError(
                f"answer_column=null leaves nothing that reward {self.reward or 'math_verify'} could compare with: "
                "set reward to a function of yours"
            )
        return self

    def held_out_sets(self) -> dict[str, str]:
        """Return the sources of held-out problems by the names of their sets; a single one has the name ""."""
        if self.held_out_path is None:
            return {}
        return self.held_out_path if isinstance(self.held_out_path, dict) else {"": self.held_out_path}


class CustomTask(RowsTask):
    """Problems that a function of your own makes or reads; docs/extending.md has an example."""

    type: Literal["custom"] = "custom"
    problems: str
    """Function that makes or reads the problems: `package.module:function`, or an entry point of the group
    qurl_ray.problems. It is called with `params` as keywords, and returns or yields problems: mappings with a prompt,
    an answer and, for the reward, meta. It may also return {"train": problems, "held_out": problems}."""
    params: dict[str, Any] = {}
    """Keyword arguments of the function, by name."""
    held_out_share: float = Field(0.1, gt=0, lt=1)
    """Share of the problems, the last ones, that is held out if the function does not return held-out problems."""

    @field_validator("problems")
    @classmethod
    def _is_known(cls, problems: str) -> str:
        return PROBLEMS.check(problems)


TaskConfig = Annotated[ArithmeticTask | ReasoningGymTask | DatasetTask | CustomTask, Field(discriminator="type")]
