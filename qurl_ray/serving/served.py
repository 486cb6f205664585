"""A served policy: its engine, its tokenizer and its names; and the way of a request through them."""

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from qurl_ray.config.serving import ServingConfig
from qurl_ray.engines.requests import derive_seed
from qurl_ray.serving.choice import AnswerPart, Choice
from qurl_ray.serving.load import LoadedAdapter, LoadedPolicy
from qurl_ray.serving.meters import AnswerMeter, Meters
from qurl_ray.serving.prompts import chat_prompt_ids, prompt_ids
from qurl_ray.serving.protocol import ApiError, ChatRequest, CompletionRequest
from qurl_ray.serving.stream import Ask, Mailbox, Stream
from qurl_ray.tools.template import template_format
from qurl_ray.types import Request, SamplingParams


class Served:
    """A policy that answers requests, on one event loop. Call `close` after `stream.drained()`.

    Args:
        name: name of the model for clients, whatever its version is.
    """

    def __init__(self, loaded: LoadedPolicy, config: ServingConfig, *, name: str, meters: Meters) -> None:
        self._config, self.loaded, self.meters = config, loaded, meters
        self.name, self.fingerprint, self.tokenizer = name, loaded.fingerprint, loaded.tokenizer
        self.model = f"{name}@{loaded.fingerprint[:8]}"
        """Name of this version of the model: name@fingerprint, shortened."""
        self.created = int(time.time())
        self._tool_format = template_format(loaded.tokenizer)
        self.stream = Stream(loaded.engine, slots=config.slots, queue=config.queue, length=loaded.length)
        self._adapters: dict[str, ServedAdapter] = {}
        self._uids = itertools.count()
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")  # the event loop does not wait for it

    def close(self) -> None:
        """Stop the engine. Blocks. No request may be running."""
        self.stream.close()
        self._encoder.shutdown()

    @property
    def models(self) -> dict[str, "ServedAdapter"]:
        """Adapter of each name that clients may ask for, and of each version of it; that of the policy alone is ""."""
        alone = ServedAdapter(key="", model=self.model, fingerprint=self.fingerprint)
        named = {self.name: alone, self.model: alone} | self._adapters
        return named | {adapter.model: adapter for adapter in self._adapters.values()}

    async def adopt(self, adapters: Mapping[str, LoadedAdapter]) -> None:
        """Stand these adapters beside the policy, by name, in the place of those before. Requests that run end with the
        adapter that they began with.

        Raises:
            Exception: the engine cannot hold one of them; those before stay.
        """
        wanted: dict[str, ServedAdapter] = {}
        new: list[str] = []
        try:
            for name, loaded in adapters.items():
                model = f"{name}@{loaded.fingerprint[:8]}"
                if (before := self._adapters.get(name)) and before.model == model:
                    wanted[name] = before
                    continue
                key = f"{model}#{next(self._uids)}"
                factors = self.loaded.coded.factors if self.loaded.coded else {}
                await self.stream.put_adapter(key, loaded.saved, factors)
                new.append(key)
                wanted[name] = ServedAdapter(key=key, model=model, fingerprint=loaded.fingerprint)
        except Exception:
            for key in new:
                self.stream.drop_adapter(key)
            raise
        kept = {adapter.key for adapter in wanted.values()}
        gone, self._adapters = [a.key for a in self._adapters.values() if a.key not in kept], wanted
        for key in gone:
            self.stream.drop_adapter(key)

    def check_model(self, asked: str) -> "ServedAdapter":
        """Return the adapter that a name stands for. Raise ApiError 404 if it names no model here."""
        if (adapter := self.models.get(asked)) is None:
            raise ApiError(404, "no such model: GET /v1/models lists the models", param="model", code="model_not_found")
        return adapter

    async def encode(self, request: ChatRequest | CompletionRequest) -> list[np.ndarray]:
        """Return the prompts of a request as tokens.

        Raises:
            ApiError: 404 for another model; 400 if a limit is exceeded, or a prompt is invalid.
        """
        self.check_model(request.model)
        prompts = 1 if isinstance(request, ChatRequest) else len(request.prompts)
        most = self._config.max_choices
        if not 0 < prompts * request.n <= most:
            raise ApiError(400, f"a request has 1 to {most} answers, which are n times its prompts", param="n")
        if (request.limit or 0) > self._config.max_tokens:
            message = f"max_tokens can be at most {self._config.max_tokens} on this server"
            raise ApiError(400, message, param="max_tokens")
        if request.top_k > len(self.tokenizer):
            raise ApiError(400, "top_k exceeds the vocabulary", param="top_k")
        return await asyncio.get_running_loop().run_in_executor(self._encoder, self._encoded, request)

    def _encoded(self, request: ChatRequest | CompletionRequest) -> list[np.ndarray]:
        if isinstance(request, CompletionRequest):
            return [prompt_ids(prompt, self.tokenizer) for prompt in request.prompts]
        if request.callable_tools and self._tool_format is None:
            message = "this policy's chat template writes no calls of tools that are known here (hermes, llama)"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        ids = chat_prompt_ids(
            request.messages,
            self.tokenizer,
            template=self._config.template,
            tools=request.callable_tools,
            variables=request.chat_template_kwargs,
        )
        return [ids]

    def open(self, request: ChatRequest | CompletionRequest, prompts: Sequence[np.ndarray]) -> "Answer":
        """Start to answer a request whose prompts are encoded.

        Raises:
            ApiError: 400 if a prompt does not fit the context; 429 if too many answers wait; 503 if the engine is
                broken.
        """
        adapter = self.check_model(request.model)
        seed = secrets.randbits(63) if request.seed is None else request.seed
        asks = [
            Ask(request=self._request(request, prompt, derive_seed("serving", seed, number), adapter), top=request.top)
            for prompt in prompts
            for number in range(request.n)  # the seed depends on it alone: additional prompts change nothing
        ]
        reads_calls = isinstance(request, ChatRequest) and request.callable_tools
        choices = [
            Choice(
                self.tokenizer,
                stops=request.stop,
                stop_ids=self.loaded.stop_ids,
                logprobs=request.top is not None,
                calls=self._tool_format if reads_calls else None,
            )
            for _ in asks
        ]
        return Answer(
            self.stream.ask(asks), choices, prompt_tokens=sum(map(len, prompts)), served=self, adapter=adapter
        )

    def _request(
        self, request: ChatRequest | CompletionRequest, prompt: np.ndarray, seed: int, adapter: "ServedAdapter"
    ) -> Request:
        left = self.loaded.length - len(prompt)
        wanted = request.limit or min(self._config.max_tokens, left)
        if wanted > left or left < 1:
            raise ApiError(
                400,
                f"the context has {self.loaded.length} tokens: this prompt has {len(prompt)}, and {max(wanted, 1)} "
                "were requested for the answer",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )
        sampling = SamplingParams(
            temperature=request.sampling_temperature,
            top_p=request.top_p or 1.0,
            top_k=request.top_k,
            max_new_tokens=wanted,
            stop_ids=self.loaded.stop_ids,
            ignore_eos=request.ignore_eos,
        )
        uid = str(next(self._uids))
        return Request(uid=uid, prompt_ids=prompt, seed=seed, sampling=sampling, adapter=adapter.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapter:
    """An adapter beside a policy, or none."""

    key: str
    """Name in the engine, which no other version has; "" for the policy alone."""
    model: str
    """Name of this version for clients: name@fingerprint, shortened."""
    fingerprint: str


class Answer:
    """The growing choices of one request."""

    def __init__(
        self,
        mailbox: Mailbox,
        choices: Sequence[Choice],
        *,
        prompt_tokens: int,
        served: Served,
        adapter: "ServedAdapter",
    ) -> None:
        self._mailbox, self._choices, self._prompt_tokens, self.served = mailbox, choices, prompt_tokens, served
        self.adapter = adapter

    @property
    def count(self) -> int:
        return len(self._choices)

    @property
    def usage(self) -> dict[str, int]:
        """Token counts in OpenAI's form. Tokens of a prompt count once, whatever n is."""
        prompt, drawn = self._prompt_tokens, sum(choice.tokens for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}

    async def parts(self) -> AsyncIterator[list[tuple[int, AnswerPart]]]:
        """Yield (index, new part) of choices as they arrive. The engine releases the choices if the caller stops early.

        Raises:
            EngineError: the engine has died.
        """
        meter = AnswerMeter(self.served.meters, self.adapter.model)
        with closing(self._mailbox) as mailbox:
            while not all(choice.finish for choice in self._choices):
                parts: dict[int, AnswerPart] = {}
                drawn = 0
                for index, news in await mailbox.take():
                    choice = self._choices[index]
                    drawn += len(news.draws)
                    if choice.finish:
                        continue  # draws after its stop sequence, until the engine releases it
                    part = choice.feed(news.draws, news.finish)
                    parts[index] = parts[index] + part if index in parts else part
                    if choice.finish and news.finish is None:
                        mailbox.stop(index)
                meter.drew(drawn, len(parts))
                yield list(parts.items())
        meter.ended(self.usage)

    async def whole(self) -> list[AnswerPart]:
        """Wait until all choices end, and return them."""
        parts = [AnswerPart() for _ in self._choices]
        async for news in self.parts():
            for index, part in news:
                parts[index] += part
        return parts
