"""Environments that users of SkyRL Gym wrote."""

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Echo(BaseTextEnv):
    """Repeats what it was given; the reward is the number of turns."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.config, self.extras = env_config, extras

    def init(self, prompt):
        begun = [*prompt, {"role": "user", "content": f"{self.config.greeting}: {sorted(self.extras)}"}]
        return (begun[1:] if self.extras.get("rewrite") else begun), {}

    def step(self, action):
        self.turns += 1
        said = [] if action == "end" else [{"role": "user", "content": action}]
        found = BaseTextEnvStepOutput(observations=said, reward=self.turns, done=action == "end", metadata={})
        return found | {"postprocessed_action": action[:3]}
