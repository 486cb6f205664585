"""vLLM's schedulers, which send the tokens of many steps at once.

After each step, vLLM's core sends every request's token and log-prob to the process that asked, which decodes them one
by one: some 30 µs a token in that process alone, more than the step itself with hundreds of sequences. A caller that
waits for whole answers has no use for that. Its tokens are held for a while, and sent together, with their routes if
these are noted (engines/vllm/routes.py).
"""

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

from qurl_ray.engines.vllm.routes import RouteMemory

HELD_S = 0.1
"""Longest time that a token is held, in seconds. A request that is aborted loses the tokens that are held then."""


class _Holding:
    """Holds outputs of requests that are answered as a whole (RequestOutputKind.FINAL_ONLY)."""

    requests: dict[str, Any]
    vllm_config: Any
    kv_cache_config: Any
    kv_cache_manager: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, list[EngineCoreOutput]] = {}
        self._sent_at = 0.0
        self._routes: RouteMemory | None = getattr(self.vllm_config.quant_config, "routes", None)
        if self._routes:
            self._routes.allocate(self.kv_cache_config)
        self._routed: dict[str, int] = {}
        """Number of tokens of each request whose routes have been sent."""
        self._last_routes: dict[str, np.ndarray] = {}
        """Routes to send with the last tokens of requests whose blocks are no longer theirs."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        clients = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        now = time.monotonic()
        if send := now - self._sent_at >= HELD_S:
            self._sent_at = now
        for client in clients.values():
            sent = []
            for output in client.outputs:
                request = self.requests.get(output.request_id)  # None once it has ended
                params = request.sampling_params if request else None
                waits = params is not None and params.output_kind is RequestOutputKind.FINAL_ONLY
                if waits and not send and output.finish_reason is None:
                    self._held.setdefault(output.request_id, []).append(output)
                else:
                    sent.append(as_one_output([*self._held.pop(output.request_id, ()), output]))
                    if self._routes:
                        ended = self._last_routes.pop(output.request_id, None)
                        output.routed_experts = self._new_routes(request) if ended is None else ended
            client.outputs = sent
        return clients

    def _new_routes(self, request: Any) -> np.ndarray:
        """Return the routes of a request's tokens after those that have been sent, but for the last, which was only
        drawn."""
        assert self._routes
        start, stop = self._routed.get(request.request_id, 0), request.num_tokens - 1
        self._routed[request.request_id] = stop
        (blocks,) = self.kv_cache_manager.get_block_ids(request.request_id)
        return self._routes.read(blocks, start, stop)

    def _handle_stopped_request(self, request: Any) -> bool:
        if self._routes:
            self._last_routes[request.request_id] = self._new_routes(request)
            del self._routed[request.request_id]
        return super()._handle_stopped_request(request)  # type: ignore[misc]

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Any]:
        ended = super().finish_requests(request_ids, finished_status)  # type: ignore[misc]
        for request in ended:
            self._held.pop(request.request_id, None)
            self._routed.pop(request.request_id, None)
        return ended


def as_one_output(outputs: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Return the outputs of one request, in their order, as one: the tokens of all, the first's account of the prompt,
    and the last's end."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return last
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    last.prefill_stats = first.prefill_stats
    lists = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if lists:
        ids, logprobs, ranks, _ = zip(*lists, strict=True)
        last.new_logprobs = LogprobsLists(np.concatenate(ids), np.concatenate(logprobs), np.concatenate(ranks))
    return last


class HoldingScheduler(_Holding, Scheduler):
    """vLLM's scheduler."""


class HoldingAsyncScheduler(_Holding, AsyncScheduler):
    """vLLM's scheduler that prepares a step while the one before runs."""
