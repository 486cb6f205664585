"""Settings of tasks: problems, and how answers are judged."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from qurl_ray.config.section import Section
from qurl_ray.tables import PROBLEMS, REWARDS


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
    """Largest amount of memory, memfds, /dev/shm and temporary files that the process that judges, and all processes
    that it starts, may hold together, in GiB (2^30 bytes). Beyond it an allocation fails or the process is killed, and
    the reward has failed, as at the deadline. docs/failure.md says what is guaranteed where."""
    verifiers: int = Field(1, ge=1)
    """Number of verifiers, which judge answers at the same time."""
    template: str = "{prompt}"
    """Text around a problem's prompt, which replaces {prompt} in it. It is used if the tokenizer has no chat template
    or `chat` is off; the tiny policy takes only the default."""
    chat: bool = False
    """Wrap the prompt with the tokenizer's chat template, as one user message."""

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
    held_out_share: float = Field(0.2, gt=0, lt=1)
    """Share of all problems that is held out for evaluation."""
    seed: int = 0
    """Seed that shuffles the problems, and so decides which are held out."""


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


class DatasetTask(TaskBase):
    """Prompts and answers from a local .jsonl/.parquet file or a Hugging Face data set, judged by math-verify."""

    type: Literal["dataset"] = "dataset"
    path: str
    """Local .jsonl or .parquet file, or hub id of a data set."""
    name: str | None = None
    """Configuration of a hub data set, such as `main` for openai/gsm8k; null means its default."""
    split: str = "train"
    """Split of a hub data set that is trained on."""
    held_out_path: str | None = None
    """Local file or hub id of the held-out problems; null holds out the last `held_out_share` of `path`."""
    held_out_split: str = "test"
    """Split of `held_out_path`, if that is a hub data set."""
    held_out_share: float = Field(0.1, gt=0, lt=1)
    """Share of the problems of `path`, the last ones, that is held out if `held_out_path` is null."""
    prompt_column: str = "prompt"
    """Name of the column of prompts."""
    answer_column: str = "answer"
    """Name of the column of answers."""
    held_out_prompt_column: str | None = None
    """Name of the column of prompts in `held_out_path`; null means `prompt_column`."""
    held_out_answer_column: str | None = None
    """Name of the column of answers in `held_out_path`; null means `answer_column`."""


class CustomTask(TaskBase):
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
