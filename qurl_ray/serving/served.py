"""A served policy, with its engine's front, its tokenizer and its names; and the path of a request through them."""

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from qurl_ray.config.serving import ServingConfig
from qurl_ray.engines.requests import derive_seed
from qurl_ray.extensions import import_reference
from qurl_ray.serving.choice import AnswerPart, Choice
from qurl_ray.serving.front import Front, Mailbox
from qurl_ray.serving.load import LoadedPolicy
from qurl_ray.serving.meters import Meters
from qurl_ray.serving.prompts import tokenize_prompt
from qurl_ray.serving.protocol import ApiError, ChatRequest, CompletionRequest, Usage
from qurl_ray.serving.stream import Ask, Stream
from qurl_ray.serving.text import TokenBytes
from qurl_ray.tables import ENGINES
from qurl_ray.tools.template import template_format
from qurl_ray.types import Request, SamplingParams

_BRIEF = 8192  # most bytes of a body whose prompt is encoded on the event loop: a thread would take longer
_VERSION_DIGITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A request with its prompts as tokens, which fit the context."""

    request: ChatRequest | CompletionRequest
    prompts: list[np.ndarray]
    max_tokens: list[int]
    """Token limit of the answers to each prompt."""

    @property
    def count(self) -> int:
        """Number of answers requested."""
        return len(self.prompts) * self.request.n


class Served:
    """A policy that answers requests, on one event loop. Call `close` after `front.drained()`.

    Args:
        name: name of the model for clients, whatever its version is.
    """

    def __init__(self, loaded: LoadedPolicy, config: ServingConfig, *, name: str, meters: Meters) -> None:
        self._config, self._loaded, self.meters = config, loaded, meters
        self.name, self.fingerprint = name, loaded.fingerprint
        self.model = f"{name}@{loaded.fingerprint[:_VERSION_DIGITS]}"
        """Name of this version of the model: name@fingerprint, shortened."""
        self.created = int(time.time())
        self.length = loaded.length
        self.kernels = loaded.engine.kernels()
        self.token_bytes = TokenBytes(loaded.tokenizer)
        self._tool_format = template_format(loaded.tokenizer)
        self.front = Front(slots=config.slots, queue=config.queue, retry_after_s=config.retry_after_s)
        self._uids = itertools.count()
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encode")
        self.front.stream = self._stream(loaded)

    def _stream(self, loaded: LoadedPolicy) -> Stream:
        stream = ENGINES[self._config.engine].stream
        assert stream, "checked with the settings"
        return import_reference(stream)(
            loaded.engine,
            slots=self._config.slots,
            length=loaded.length,
            loop=asyncio.get_running_loop(),
            deliver=self.front.deliver,
            fail=self.front.fail,
        )

    def close(self) -> None:
        """Stop the engine. Blocks. No request may be running."""
        self.front.stream.close()
        self._encoder.shutdown()

    def check_model(self, asked: str) -> None:
        """Raise ApiError 404 unless `asked` names this model, or this version of it."""
        if asked not in (self.name, self.model):
            raise ApiError(404, "no such model: GET /v1/models lists the models", param="model", code="model_not_found")

    async def encode(self, request: ChatRequest | CompletionRequest, *, size: int) -> Encoded:
        """Encode the prompts of a request as tokens.

        Args:
            size: size of the body, in bytes; prompts of large bodies are encoded in a thread.

        Raises:
            ApiError: 404 for another model; 400 if a limit is exceeded, or a prompt is invalid or does not fit.
        """
        self.check_model(request.model)
        prompts = request.prompts()
        if not prompts:
            raise ApiError(400, "there is no prompt", param="prompt")
        if len(prompts) * request.n > self._config.max_choices:
            raise ApiError(
                400,
                f"a request can have at most {self._config.max_choices} answers, which are n times its prompts",
                param="n",
            )
        if (request.limit or 0) > self._config.max_tokens:
            raise ApiError(
                400, f"max_tokens can be at most {self._config.max_tokens} on this server", param="max_tokens"
            )
        if request.top_k and request.top_k > len(self._loaded.tokenizer):
            raise ApiError(400, "top_k exceeds the vocabulary", param="top_k")

        if request.calls and self._tool_format is None:
            message = "this policy's chat template writes no calls of tools that are known here (hermes, llama)"
            raise ApiError(400, message, param="tools", code="unsupported_parameter")
        tools = request.described() if request.calls else []

        def all_encoded() -> list[np.ndarray]:
            return [
                tokenize_prompt(
                    prompt,
                    self._loaded.tokenizer,
                    template=self._config.template,
                    tools=tools,
                    variables=request.variables,
                )
                for prompt in prompts
            ]

        if size <= _BRIEF:
            ids = all_encoded()
        else:
            ids = await asyncio.get_running_loop().run_in_executor(self._encoder, all_encoded)
        return Encoded(request=request, prompts=ids, max_tokens=[self._room(request, len(prompt)) for prompt in ids])

    def _room(self, request: ChatRequest | CompletionRequest, prompt: int) -> int:
        """Return the token limit of an answer to a prompt of `prompt` tokens. Raise ApiError 400 if it does not fit."""
        most = self._config.max_prompt_tokens or self.length - 1
        left = self.length - prompt
        wanted = request.limit or min(self._config.max_tokens, left)
        if prompt > most or wanted > left or left < 1:
            raise ApiError(
                400,
                f"the context has {self.length} tokens, of which a prompt can have at most "
                f"{min(most, self.length - 1)}: this prompt has {prompt}, and {max(wanted, 1)} were requested for the "
                "answer",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
                code="context_length_exceeded",
            )
        return wanted

    def open(self, encoded: Encoded) -> "Answer":
        """Start to answer.

        Raises:
            ApiError: 429 if too many answers wait; 503 if the engine is broken.
        """
        request = encoded.request
        seed = secrets.randbits(63) if request.seed is None else request.seed
        asks = []
        for prompt, limit in zip(encoded.prompts, encoded.max_tokens, strict=True):
            sampling = SamplingParams(
                temperature=request.heat,
                top_p=request.top_p or 1.0,
                top_k=request.top_k,
                max_new_tokens=limit,
                stop_ids=self._loaded.stop_ids,
                ignore_eos=request.ignore_eos,
            )
            # The seed of a choice depends on its number, not on its prompt: additional prompts change nothing.
            asks += [
                Ask(
                    request=Request(
                        uid=str(next(self._uids)),
                        prompt_ids=prompt,
                        seed=derive_seed("serving", seed, number),
                        sampling=sampling,
                    ),
                    top=request.top,
                )
                for number in range(request.n)
            ]
        choices = [
            Choice(
                self._loaded.tokenizer,
                stops=request.stop,
                stop_ids=self._loaded.stop_ids,
                logprobs=request.top is not None,
                calls=self._tool_format if request.calls else None,
            )
            for _ in asks
        ]
        prompt_tokens = sum(map(len, encoded.prompts))
        return Answer(self.front.ask(asks), choices, prompt_tokens=prompt_tokens, served=self)


class Answer:
    """The growing choices of one request."""

    def __init__(self, mailbox: Mailbox, choices: Sequence[Choice], *, prompt_tokens: int, served: Served) -> None:
        self._mailbox, self._choices, self._prompt_tokens, self.served = mailbox, choices, prompt_tokens, served

    @property
    def count(self) -> int:
        return len(self._choices)

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens, completion_tokens=sum(choice.tokens for choice in self._choices)
        )

    async def parts(self) -> AsyncIterator[list[tuple[int, AnswerPart]]]:
        """Yield (index, new part) of choices as they arrive. The engine releases the choices if the caller stops early.

        Raises:
            EngineError: the engine has died.
        """
        meter = self.served.meters.answer(self.served.model)
        with self._mailbox as mailbox:
            while not all(choice.finish for choice in self._choices):
                found: dict[int, AnswerPart] = {}
                drawn = 0
                for index, news in await mailbox.take():
                    choice = self._choices[index]
                    drawn += len(news.draws)
                    if choice.finish:
                        continue  # draws after its stop sequence, until the engine releases it
                    part = choice.feed(news.draws, news.finish)
                    found[index] = part if index not in found else _joined(found[index], part)
                    if choice.finish and news.finish is None:
                        mailbox.stop(index)
                meter.drew(drawn, len(found))
                yield list(found.items())
        meter.ended(self.usage)

    async def whole(self) -> list[AnswerPart]:
        """Wait until all choices end, and return them."""
        parts = [AnswerPart() for _ in self._choices]
        async for news in self.parts():
            for index, part in news:
                parts[index] = _joined(parts[index], part)
        return parts


def _joined(first: AnswerPart, then: AnswerPart) -> AnswerPart:
    return AnswerPart(
        text=first.text + then.text,
        calls=first.calls + then.calls,
        logprobs=first.logprobs + then.logprobs,
        finish=then.finish,
    )
