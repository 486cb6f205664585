"""Environments of verifiers 0.4 (https://github.com/PrimeIntellect-ai/verifiers): an environment, and its problems.

An environment of verifiers plays an episode by asking a model for chat completions. Here each of these requests is a
turn of the trajectory, and the turn's text is the answer:

    episode ─ chat completion ─► interception ─► Endpoint ─ its new messages ─► the policy
                                     (verifiers)       ◄──── the turn's text ──

verifiers' own programs of an agent start a process for each episode, and give the model tools. By default the program
is `Chat` here, which only talks.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from typing import Any

import aiohttp
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils.loaders import env_config_type, load_environment, load_taskset, resolve_env_config

from qurl_ray.environments.protocol import EnvironmentMessage, Step
from qurl_ray.errors import EnvironmentFailed
from qurl_ray.tools.messages import read_message
from qurl_ray.types import Problem

__all__ = ["Chat", "Verifiers", "tasks"]

_CHAT = "qurl_ray_chat"
sys.modules[_CHAT] = sys.modules[__name__]
"""verifiers finds the program of an agent by the name of a module without a dot."""
_KEY = "QURL_RAY_NO_KEY"
"""Name of no variable: the endpoint asks for no key."""
_MOST_BYTES = 1 << 24  # of a request


def tasks(*, taskset: str | dict[str, Any], count: int = 1000, **config: Any) -> Iterator[dict[str, Any]]:
    """Yield the tasks of a task set as problems, for `task.problems=verifiers`. `meta` has what the environment needs
    to find them again.

    Args:
        taskset: name of an installed task set, or its settings with an `id`.
        count: most tasks.
        config: further settings of the environment, as the environment's own.

    Raises:
        EnvironmentFailed: a task has no prompt.
    """
    for index, task in enumerate(islice(load_taskset(_config(taskset, config).taskset), count)):
        prompt = _conversation(task.data.system_prompt, task.data.prompt)
        if not prompt:
            raise EnvironmentFailed(f"task {index} of {taskset} has no prompt: its user, a program, begins")
        yield {"prompt": prompt, "meta": {"task": index}}


class Verifiers:
    """An episode of an environment of verifiers. Its reward comes with the last turn; a trajectory that is cut off
    before has 0. The sampling settings of verifiers have no effect.

    Args:
        taskset: as `tasks` has it.
        config: further settings of the environment: `id` of one that is not the task set's own, and the settings of
            its agents by their names. An agent's program is `Chat` and its runtime a process here unless they say
            otherwise.
    """

    def __init__(self, *, taskset: str | dict[str, Any], **config: Any) -> None:
        self._config = _config(taskset, config)
        self._open = AsyncExitStack()

    async def reset(self, problem: Problem) -> list[EnvironmentMessage]:
        environment = load_environment(self._config)
        self._endpoint = _Endpoint()
        url = await self._open.enter_async_context(self._endpoint.serving())
        await self._open.enter_async_context(environment.serving())
        client = vf.EvalClientConfig(base_url=url, api_key_var=_KEY)
        task = next(islice(environment.taskset, problem.meta["task"], None))
        asked = environment.run_episode(task, vf.ModelContext(model="policy", client=client))
        self._episode = asyncio.create_task(asked)
        self._open.push_async_callback(self._end)
        self._known = list(problem.messages or _conversation(None, problem.prompt))
        news = await self._news()
        if news is None:
            raise EnvironmentFailed(f"the episode ended before its first turn with {self._reward()}")
        return news

    async def step(self, answer: str) -> Step:
        self._known.append({"role": "assistant", "content": answer})
        self._endpoint.answer(answer)
        news = await self._news()
        return Step(reward=self._reward(), done=True) if news is None else Step(messages=news, reward=0.0)

    async def close(self) -> None:
        await self._open.aclose()

    async def _end(self) -> None:
        self._endpoint.end()  # an episode whose program waits for an answer does not end when it is cancelled
        await self._episode

    async def _news(self) -> list[EnvironmentMessage] | None:
        """Return the messages that the next request adds to the conversation; None if the episode is over.

        Raises:
            EnvironmentFailed: a request does not continue the conversation, or has tools.
        """
        asking = asyncio.ensure_future(self._endpoint.asked.get())
        await asyncio.wait({asking, self._episode}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            asking.cancel()
            return None
        request = asking.result()
        if request.get("tools"):
            raise EnvironmentFailed(
                "the environment gives its agent tools, which the policy's chat template does not get"
            )
        messages = [_plain(message) for message in request["messages"]]
        if messages[: len(self._known)] != self._known:
            raise EnvironmentFailed("the environment rewrites the conversation, or has several; the policy has one")
        news, self._known = messages[len(self._known) :], messages
        return news

    def _reward(self) -> float:
        episode = self._episode.result()
        for record in (episode, *episode.traces):
            if record.errors:
                raise EnvironmentFailed(f"the episode failed: {record.errors[-1].type}: {record.errors[-1].message}")
        return sum(trace.reward for trace in episode.traces)


class Chat(vf.Harness[vf.HarnessConfig]):
    """Program of an agent that sends the conversation to the model, and says what the model says."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Ask for one completion; the next segment of a conversation begins with all of it."""
        if mcp_urls:
            raise EnvironmentFailed(f"the task has tools, which this environment does not give: {', '.join(mcp_urls)}")
        asked = {"model": ctx.model, "messages": _conversation(*self.resolve_prompt(data))}
        head, timeout = {"Authorization": f"Bearer {secret}"}, aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(headers=head, timeout=timeout) as client,
            client.post(f"{endpoint}/chat/completions", json=asked) as reply,
        ):
            return vf.ProgramResult(exit_code=int(not reply.ok), stdout="", stderr=await reply.text())


class _Endpoint:
    """Server of chat completions, whose answers are given one after the other."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._open: list[asyncio.Future[str | None]] = []
        self._ended = False

    def answer(self, text: str) -> None:
        """Answer the request that came first of those without an answer."""
        self._open.pop(0).set_result(text)

    def end(self) -> None:
        """Refuse the requests without an answer, and all further ones."""
        self._ended = True
        while self._open:
            self._open.pop(0).set_result(None)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Yield the address, on this machine."""
        app = web.Application(client_max_size=_MOST_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    async def _complete(self, request: web.Request) -> web.Response:
        self.asked.put_nowait(await request.json())
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._open.append(answer)
        if self._ended:
            self.end()
        text = await answer
        if text is None:
            return web.json_response({"error": {"message": "the trajectory is over"}}, status=400)
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        head = {"id": "turn", "object": "chat.completion", "created": int(time.time()), "model": "policy"}
        return web.json_response(head | {"choices": [choice]})


def _config(taskset: str | dict[str, Any], config: dict[str, Any]) -> vf.EnvConfig:
    """Return the settings of an environment, with our program and runtime where its agents have none."""
    source = {"id": taskset} if isinstance(taskset, str) else taskset
    kind = env_config_type(source["id"], config.get("id", ""))
    agents = [name for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    ours = {"harness": {"id": _CHAT}, "runtime": {"type": "subprocess"}}
    return resolve_env_config(config | {"taskset": source} | {name: ours | config.get(name, {}) for name in agents})


def _conversation(system: str | None, prompt: Any) -> list[EnvironmentMessage]:
    """Return a prompt, text or verifiers' messages, as messages."""
    first = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*first, {"role": "user", "content": prompt}]
    return [*first, *(_plain(message_to_wire(message)) for message in prompt or [])]


def _plain(message: dict[str, Any]) -> EnvironmentMessage:
    """Return a message with text as its content.

    Raises:
        DataError, EnvironmentFailed: it has a picture, or a call of a tool.
    """
    read = read_message(message | {"content": message.get("content") or ""}, "a message", "the environment")
    if "tool_calls" in read:
        raise EnvironmentFailed("a message of the environment has calls of tools, which the policy does not get")
    return {"role": read["role"], "content": read["content"]}
