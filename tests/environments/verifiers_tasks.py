"""A task set and an environment of verifiers. Tests copy it to where verifiers finds it: in a module without a dot."""

import verifiers.v1 as vf

__all__ = ["Numbers", "Talk"]


class NumberData(vf.TaskData):
    number: int


class NumberTask(vf.Task[NumberData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        """1 if the last reply is the number."""
        if "broken" in (trace.branches[-1].messages[-1].content or ""):
            raise ValueError("no such answer")
        return float((trace.branches[-1].messages[-1].content or "").strip() == str(self.data.number))

    @vf.reward
    async def short(self, trace: vf.Trace) -> float:
        return 0.25 if len(trace.branches[-1].messages[-1].content or "") < 10 else 0.0


class Numbers(vf.Taskset[NumberTask, vf.TasksetConfig]):
    def load(self):
        for number in range(5):
            asked = f"Say {number}."
            prompt = [vf.UserMessage(content=asked)] if number == 3 else asked
            yield NumberTask(NumberData(prompt=prompt, system_prompt="Be short.", number=number), self.config.task)


class TalkConfig(vf.EnvConfig):
    speaker: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()


class Talk(vf.Env[TalkConfig]):
    """Says how many turns there were until the reply is the number, as the user; "two" begins a second conversation."""

    async def run(self, task, agents):
        async with agents.speaker.interaction(task) as interaction:
            segment, turns = await interaction.turn(), 1
            while not segment.terminated and segment.last_reply != str(task.data.number):
                if segment.last_reply == "two":
                    await agents.other.run(task)
                if segment.last_reply == "raise":
                    raise KeyError("no such move")
                segment, turns = await interaction.turn(f"Turn {turns}: no."), turns + 1
        interaction.trace.record_reward("turns", 1.0 / turns, 1.0)
