"""Traits of a run's environment, before a trajectory is played: its tools go to the chat template."""

from qurl_ray.config import RunConfig
from qurl_ray.config.environment import EnvironmentConfig
from qurl_ray.environments.process import EnvironmentProcess
from qurl_ray.environments.protocol import Traits
from qurl_ray.tools.messages import read_tools


def declared_traits(settings: EnvironmentConfig) -> Traits:
    """Return the traits of the environment; those of none if there is no environment. It is imported in a process of
    its own.

    Raises:
        EnvironmentFailed: it cannot be imported, or does not take its parameters.
    """
    if settings.type is None:
        return Traits()
    with EnvironmentProcess.of(settings) as process:
        process.check()
        return process.traits


def with_tools(config: RunConfig, traits: Traits) -> RunConfig:
    """Return the settings with the environment's tools among the arguments of the chat template. Tools that
    `task.chat_template_args` has are kept instead."""
    if not (traits.tools and traits.described):
        return config
    tools = read_tools(traits.tools, "the environment")
    arguments = {"tools": tools} | config.task.chat_template_args
    return config.model_copy(update={"task": config.task.model_copy(update={"chat_template_args": arguments})})
