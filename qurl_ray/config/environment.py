"""Settings of environments: rollouts of several turns."""

from typing import Any, Literal

from pydantic import Field, field_validator

from qurl_ray.config.section import Section
from qurl_ray.tables import ENVIRONMENTS


class EnvironmentConfig(Section):
    """Rollouts of several turns. After each turn of the policy an environment, such as a tool or a game, says
    something, and the policy continues. Only what the policy drew is trained (docs/agents.md)."""

    type: str | None = Field(
        None,
        description=f"Environment of each trajectory: {ENVIRONMENTS.help()}. null is none: answers have one turn.",
    )
    params: dict[str, Any] = {}
    """Keyword arguments of the environment, by name."""
    max_turns: int = Field(8, ge=1)
    """Largest number of turns of the policy in a trajectory. `rollout.max_new_tokens` bounds the tokens of all turns
    together, and `model.max_length` those of the whole row, with what the environment says."""
    turn_tokens: int | None = Field(None, ge=1)
    """Largest number of tokens of one turn; null is what is left of rollout.max_new_tokens."""
    cut_turns: Literal["end", "close"] = "end"
    """Treatment of a turn that a limit cuts off: `end` ends the trajectory; `close` gives the turn to the environment
    as if it had ended, and, if the trajectory has tokens left, an end token, which is not trained."""
    rewritten_history: Literal["refuse", "keep", "new_row"] = "refuse"
    """For chat templates that rewrite earlier turns, such as Qwen3's, which removes their thoughts: `refuse` ends the
    run before its start; `keep` leaves earlier turns as they were drawn; `new_row` continues after the conversation as
    the template writes it, in a new row of tokens, where that is not what the row holds."""
    concurrency: int = Field(256, ge=1)
    """Number of trajectories with an environment at a time; others wait for their first turn. An environment that does
    not say that it is deterministic has a process of its own."""
    hosts: int = Field(1, ge=1)
    """Number of Ray actors that hold the processes of the environments."""
    timeout_s: float = Field(30.0, gt=0)
    """Deadline of one call of an environment, in seconds. Its process is killed then, and the trajectory is counted and
    left out."""
    memory_gb: float = Field(4.0, gt=0)
    """Memory of an environment's process and all that it starts, in GiB (2^30 bytes), bounded as task.reward_memory_gb
    is."""

    @field_validator("type")
    @classmethod
    def _is_known(cls, name: str | None) -> str | None:
        return name if name is None else ENVIRONMENTS.check(name)
