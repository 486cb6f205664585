"""vLLM's AsyncLLM on an event loop in a thread, for callers that are not asynchronous themselves.

The first VllmServer of a process sets the environment variables that vllm reads, and then imports it. From then on, the
environment of the process belongs to vLLM.
"""

import asyncio
import contextlib
import importlib.util
import itertools
import multiprocessing
import os
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Set
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np
import torch

from qurl_ray import errors
from qurl_ray.engines.requests import derive_seed
from qurl_ray.errors import DeadlineExceeded, EngineError
from qurl_ray.types import Completion, Finish, Request

_SHUTDOWN_S = 10.0  # time until processes that do not end by themselves are killed
_ABORT_S = 30.0  # time that vLLM may take to return aborted requests
_ABORT_AGAIN_S = 0.02


class VllmServer:
    """One AsyncLLM and its processes.

    Args:
        settings: arguments of vLLM's AsyncEngineArgs.
        threads: CPU threads of each worker on a CPU; None leaves the choice to vLLM.
        timeout_s: longest time that the start, or any other call but `generate`, may take.
    """

    def __init__(self, settings: Mapping[str, Any], *, threads: int | None, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.identity = uuid.uuid4().hex
        """Identity of the processes."""
        self._counter = itertools.count()
        self._running: dict[str, str] = {}  # uid of unfinished requests by vLLM's id; used on the loop only
        self._llm: Any = None
        _set_environment(threads, settings["tensor_parallel_size"], eager=settings["enforce_eager"])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        others = multiprocessing.active_children()
        try:
            self._call(self._start(settings), "vLLM to start", timeout_s)
        except BaseException:
            self.close()
            for child in multiprocessing.active_children():  # of a start that still runs in the thread
                if child not in others:
                    child.kill()
            raise

    async def _start(self, settings: Mapping[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        import qurl_ray.engines.vllm.plugin  # noqa: F401, registers the plugin even where the package is not installed

        self.device = torch.device(current_platform.device_type)
        if settings["enable_sleep_mode"] and self.device.type == "cpu":
            raise EngineError("vLLM cannot sleep on a CPU: leave sleep_mode off, or run the engine on a CUDA device")
        if self.device.type == "cpu":
            # After a part of a prompt, vLLM 0.32 turns back the generator of its request, which a CPU's cannot.
            settings = {**settings, "enable_chunked_prefill": False}
        # Without a context, vLLM prefills 2048 tokens at a time, where an H100 takes eight times as many.
        config = AsyncEngineArgs(**settings).create_engine_config(UsageContext.LLM_CLASS)
        if self.device.type == "cpu" and config.cache_config.kv_cache_memory_bytes is None:
            # max_num_seqs full contexts, in whole blocks, and one spare block
            model, block = config.model_config, config.cache_config.block_size
            blocks = config.scheduler_config.max_num_seqs * -(-model.max_model_len // block) + 1
            heads = model.get_num_kv_heads(config.parallel_config)
            layers = model.get_num_layers(config.parallel_config)
            size = 1 if config.cache_config.cache_dtype.startswith("fp8") else model.dtype.itemsize
            token = 2 * layers * heads * model.get_head_size() * size
            config.cache_config.kv_cache_memory_bytes = blocks * block * token
        if not settings["enforce_eager"]:
            config.parallel_config.worker_cls = "qurl_ray.engines.vllm.compiling.Worker"
        kind = "HoldingAsyncScheduler" if config.scheduler_config.async_scheduling else "HoldingScheduler"
        config.scheduler_config.scheduler_cls = f"qurl_ray.engines.vllm.scheduler.{kind}"
        self._llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        await self._llm.collective_rpc("qurl_follow", args=(os.getpid(),))

    # --- calls -----------------------------------------------------------------------------------------------------

    def control(self, method: str, *args: object, **kwargs: object) -> Any:
        """Return the result of one of AsyncLLM's own methods.

        Raises:
            EngineError: vLLM failed, or is closed.
            DeadlineExceeded: it took longer than timeout_s.
        """
        if self._llm is None:
            raise EngineError("the engine is closed")
        return self._call(getattr(self._llm, method)(*args, **kwargs), f"vLLM to {method}", self._timeout_s)

    def workers(self, method: str, *args: object) -> list[Any]:
        """Return the results of a method of worker.ResidentPolicy in all workers, or raise the first error."""
        return self.start(method, *args)()

    def start(self, method: str, *args: object) -> Callable[[], list[Any]]:
        """Begin such a call. Return a function that waits for it and returns its results."""
        if self._llm is None:
            raise EngineError("the engine is closed")
        future = asyncio.run_coroutine_threadsafe(self._llm.collective_rpc("qurl", args=(method, *args)), self._loop)

        def results() -> list[Any]:
            replies = self._wait(future, f"vLLM to {method}", self._timeout_s)
            for kind, value in replies:
                if kind != "ok":
                    raise getattr(errors, kind)(value)
            return [value for _, value in replies]

        return results

    def _call(self, work: Coroutine, event: str, timeout_s: float | None) -> Any:
        return self._wait(asyncio.run_coroutine_threadsafe(work, self._loop), event, timeout_s)

    def _wait(self, future: Future, event: str, timeout_s: float | None) -> Any:
        try:
            return future.result(timeout_s)
        except FutureTimeout:
            future.cancel()
            raise DeadlineExceeded(f"waited {timeout_s:g} s for {event}") from None
        except errors.QurlError:
            raise
        except Exception as error:  # vLLM's own types are many, and callers need not know them
            # vLLM's errors only say that its processes failed. These have printed why: to a file, in Ray's workers.
            log = os.path.realpath("/proc/self/fd/2")
            place = f" ({log} has the cause)" if os.path.isfile(log) else ""
            raise EngineError(
                f"vLLM failed while it was asked for {event}: {type(error).__name__}: {error}{place}"
            ) from error

    # --- generation ------------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], version: int, deadline_s: float | None) -> list[Completion]:
        """Return completions in the order of the requests; after `deadline_s`, unfinished ones as far as they got.

        Raises:
            EngineError: vLLM failed, or is closed.
        """
        if self._llm is None:
            raise EngineError("the engine is closed")
        wait = None if deadline_s is None else deadline_s + _ABORT_S
        return self._call(self._generate(requests, version, deadline_s), "answers", wait)

    async def _generate(self, requests: Sequence[Request], version: int, deadline_s: float | None) -> list[Completion]:
        ids = [f"{request.uid}#{next(self._counter)}" for request in requests]
        self._running |= {own: request.uid for own, request in zip(ids, requests, strict=True)}
        tasks = {own: asyncio.ensure_future(self._final_output(r, own)) for own, r in zip(ids, requests, strict=True)}
        try:
            await asyncio.wait(tasks.values(), timeout=deadline_s)
            late = {own for own, task in tasks.items() if not task.done()}
            await self._abort(late)
            outputs = await asyncio.gather(*tasks.values())
        finally:
            for own, task in tasks.items():
                task.cancel()
                self._running.pop(own, None)
        completions = []
        for own, request, output in zip(ids, requests, outputs, strict=True):
            tokens = output.token_ids
            drawn = [step[token].logprob for step, token in zip(output.logprobs or (), tokens, strict=True)]
            finish: Finish = "deadline" if own in late else "cancelled"
            if output.finish_reason != "abort":
                finish = output.finish_reason
            completions.append(
                Completion(
                    uid=request.uid,
                    token_ids=np.array(tokens, dtype=np.int32),
                    # For a greedy draw, vLLM returns the log-prob at temperature 1. The draw is certain, so it is 0.
                    logprobs=np.array(drawn, dtype=np.float32) * np.float32(request.sampling.temperature > 0),
                    versions=np.full(len(tokens), version, dtype=np.int32),
                    routes=output.routed_experts,
                    finish=finish,
                )
            )
        return completions

    async def _final_output(self, request: Request, own: str) -> Any:
        """Return vLLM's final output for a request: all of its tokens, whether it ended or was aborted."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        sampling = request.sampling
        # vLLM's generators start at their seed: with the same one, the rest would reuse the start's random numbers.
        seed = derive_seed(request.seed, request.drawn) if request.drawn else request.seed
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=[] if sampling.ignore_eos else list(sampling.stop_ids),
            ignore_eos=True,  # only stop_ids end an answer, not the ids that vLLM finds in the model's folder
            seed=seed & (2**63 - 1),  # vLLM's seeds are signed
            logprobs=0,  # of the drawn token only
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        try:
            answers = self._llm.generate({"prompt_token_ids": request.prompt_ids.tolist()}, params, own)
            return [answer.outputs[0] async for answer in answers][-1]
        finally:
            self._running.pop(own, None)

    def cancel(self, uids: Set[str]) -> None:
        """End these requests, from any thread; they return the tokens drawn so far. Unknown ones are ignored."""
        if self._llm is not None:
            asyncio.run_coroutine_threadsafe(self._cancel(uids), self._loop)

    async def _cancel(self, uids: Set[str]) -> None:
        await self._abort([own for own, uid in self._running.items() if uid in uids])

    async def _abort(self, ids: Iterable[str]) -> None:
        """Abort these requests, repeatedly until all have ended: vLLM ignores those that it has not admitted yet."""
        while left := [own for own in ids if own in self._running]:
            await self._llm.abort(left)
            await asyncio.sleep(_ABORT_AGAIN_S)

    def close(self) -> None:
        """End vLLM's processes and the thread. Callers that wait get the tokens drawn so far, or an error."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown(timeout=_SHUTDOWN_S)
            with contextlib.suppress(FutureTimeout):
                asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(_SHUTDOWN_S)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_SHUTDOWN_S)


async def _cancel_others() -> None:
    """Cancel all other tasks on the loop, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _set_environment(threads: int | None, ranks: int, *, eager: bool) -> None:
    """Set the variables that vLLM reads when it is imported, or passes to its processes."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")  # scales stay the learner's, not powers of two
    if importlib.util.find_spec("flashinfer") is None:  # on Hopper, vLLM would import it for its sampler and fail
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork would copy locks of the caller's threads
    if not torch.cuda.is_available():
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # other processes run on the same cores
        if eager:
            os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # no compiler, and no cache that other processes read
        if ranks == 1:
            # A single worker then runs in vLLM's core process. Else a process is put between, to bind threads to cores.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
