"""Settings of the chat template that a policy was trained with. They travel with the policy, in tokenizer_config.json,
so that serving shows it conversations as training did."""

from dataclasses import asdict, dataclass, field
from typing import Any

from qurl_ray.config.task import TaskConfig

_KEY = "qurl_chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """Settings that a run had and a request may replace.

    Example:
        ChatSettings(system_prompt="Answer with a number.", variables={"enable_thinking": False})
    """

    system_prompt: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, but tools: those are a request's own, whose sender has to run them."""


def keep_settings(tokenizer: Any, task: TaskConfig) -> None:
    """Make the settings of a run part of a tokenizer, which saves them, in the place of those that it had."""
    variables = {name: value for name, value in task.chat_template_args.items() if name != "tools"}
    tokenizer.init_kwargs.pop(_KEY, None)
    if task.system_prompt is not None or variables:
        tokenizer.init_kwargs[_KEY] = asdict(ChatSettings(system_prompt=task.system_prompt, variables=variables))


def kept_settings(tokenizer: Any) -> ChatSettings:
    """Return the settings that are part of a tokenizer."""
    return ChatSettings(**tokenizer.init_kwargs.get(_KEY, {}))
