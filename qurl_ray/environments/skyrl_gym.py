"""Environments of SkyRL Gym (https://github.com/NovaSky-AI/SkyRL), its own and those that users wrote for it."""

from types import SimpleNamespace
from typing import Any

import skyrl_gym
from skyrl_gym.envs.registration import EnvSpec

from qurl_ray.environments.protocol import EnvironmentMessage, Step, Traits
from qurl_ray.errors import EnvironmentFailed
from qurl_ray.extensions import did_you_mean, import_reference
from qurl_ray.types import Problem

_CONFIGS = {
    "search": "skyrl_gym.envs.search.env:SearchEnvConfig",
    "text2sql": "skyrl_gym.envs.sql.env:Text2SQLEnvConfig",
}
"""Classes of settings with defaults."""
_DETERMINISTIC = ("aime", "gsm8k", "gsm8k_multi_turn")
"""Environments that only compare text. The others ask a server, a database, or run code."""


class SkyRLGym:
    """An environment of SkyRL Gym. Its `extras` are the problem's `meta`, with the problem's answer as the ground truth
    unless `meta` has a `reward_spec` or `reward_model`.

    Args:
        env: name of an environment, such as "gsm8k_multi_turn", or `module:Class` of one that is not registered.
        env_config: settings of the environment, by name.
        max_turns: number of turns after which it ends, for the environments that ask for it; None is their default.
            Like `environment.max_turns`, which ends the trajectory without asking the environment.
    """

    def __init__(self, *, env: str, env_config: dict[str, Any] | None = None, max_turns: int | None = None) -> None:
        known = skyrl_gym.registry
        if ":" not in env and env not in known:
            raise EnvironmentFailed(f"skyrl_gym has no environment {env!r}{did_you_mean(env, known)}")
        self._name, self._max_turns = env, max_turns
        make_config = import_reference(_CONFIGS[env]) if env in _CONFIGS else SimpleNamespace
        self._config = make_config(**(env_config or {}))

    @classmethod
    def traits(cls, *, env: str = "", **_: Any) -> Traits:
        """Environments that only compare text are deterministic."""
        return Traits(deterministic=env in _DETERMINISTIC)

    def reset(self, problem: Problem) -> list[EnvironmentMessage]:
        truth = {"ground_truth": problem.answer}
        extras: dict[str, Any] = {"reward_spec": truth, "reward_model": truth, "extra_info": {}} | problem.meta
        if self._max_turns is not None:
            extras["max_turns"] = self._max_turns
        spec = EnvSpec(id=self._name, entry_point=self._name) if ":" in self._name else self._name
        self._env = skyrl_gym.make(spec, env_config=self._config, extras=extras)
        asked = problem.messages or [{"role": "user", "content": problem.prompt}]
        begun, _ = self._env.init(list(asked))
        if begun[: len(asked)] != asked:
            raise EnvironmentFailed(f"{self._name} rewrites the prompt: give problems the prompt that it makes of it")
        return begun[len(asked) :]

    def step(self, answer: str) -> Step:
        result = self._env.step(answer)
        if result.get("postprocessed_action") not in (None, answer):
            raise EnvironmentFailed(f"{self._name} rewrites a turn, and what the policy drew stays as it is")
        return Step(messages=result["observations"], reward=result["reward"], done=result["done"])

    def close(self) -> None:
        self._env.close()
