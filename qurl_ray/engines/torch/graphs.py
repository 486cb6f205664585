"""Decode steps as CUDA graphs: one call starts all kernels of a step.

Tested and measured on an H200 (docs/gpu.md).

A graph replays kernels on fixed addresses, without the Python code around them. Therefore a step uses memory that
stays in place (last tokens, positions, the cache), with a fixed number of rows and of visible keys. Both are rounded
up, so that there are few graphs. More keys change no bit (policy/attention.py). Rows beyond the running ones compute
token 0 at position 0 of a free row: they write only the first key of that row, which the next prompt there overwrites.

Graphs are dropped when the weights or the cache are replaced. Each sync replaces every linear, so after a sync each
pair of rows and keys is captured again at its first use. This takes about as long as two steps without graphs: one
warm-up step, and the capture, which runs Python but no kernels. A call that goes through seven sizes of keys with all
slots running, and then empties 512 slots, pays this some thirteen times. The cost is negligible for answers of
thousands of tokens, and too high for answers of ten.
"""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from qurl_ray.engines.torch.decoder import Decoder, knows
from qurl_ray.engines.torch.slots import SlotCache
from qurl_ray.errors import EngineError
from qurl_ray.policy.experts import mixtures

FEWEST_KEYS = 64
FEWEST_ROWS = 8

DecodeStep = Callable[[], torch.Tensor]
Capture = Callable[[DecodeStep], DecodeStep]
"""Function that runs a step once, and returns a function that replays it on the same memory.

The replay returns the same tensor each time.
"""


class DecodeGraphs:
    """The decode steps of one decoder over one cache, captured at their first use."""

    def __init__(self, decoder: Decoder, cache: SlotCache, capture: Capture) -> None:
        self._decoder, self._cache, self._capture = decoder, cache, capture
        self._inputs = torch.zeros(2, cache.slots, dtype=torch.int64, device=cache.device)
        """Last tokens and their positions, int64 [2, slots]."""
        self._repeats: dict[tuple[int, int], DecodeStep] = {}

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return final states [count, 1, hidden] of the running rows, valid until the next call.

        Raises:
            EngineError: the step cannot be captured.
        """
        count = len(tokens)
        rows = min(_power_of_two(count, FEWEST_ROWS), self._cache.slots)
        keys = min(_power_of_two(int(positions.max()) + 1, FEWEST_KEYS), self._cache.length)
        inputs = torch.zeros(2, rows, dtype=torch.int64)
        inputs[0, :count], inputs[1, :count] = tokens, positions
        self._inputs[:, :rows] = inputs.to(self._inputs.device)
        if (rows, keys) not in self._repeats:

            def step() -> torch.Tensor:
                last, places = self._inputs[:, :rows]
                self._cache.decode(places, keys)
                return self._decoder(last[:, None], places[:, None], self._cache)

            try:
                self._repeats[rows, keys] = self._capture(step)
            except RuntimeError as error:
                raise EngineError(
                    f"a decode step of {rows} rows and {keys} keys could not be captured; use fewer slots or "
                    f"rollout.cuda_graphs=false: {error}"
                ) from error
        return self._repeats[rows, keys]()[:count]


class CudaCapture:
    """Capture by CUDA graphs. Graphs of one instance share memory for intermediate results, used within a step only."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: DecodeStep) -> DecodeStep:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()  # libraries allocate workspaces and kernels are compiled; neither can be captured
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            states = step()

        def repeat() -> torch.Tensor:
            graph.replay()
            return states

        return repeat


def why_not(model: PreTrainedModel) -> str | None:
    """Return why this model's decode steps cannot be captured; None if they can."""
    if not knows(model):
        return (
            "rollout.cuda_graphs needs the forward of engines/torch/decoder.py, which is not that of "
            f"{type(model).__name__} as configured here: turn it off"
        )
    if mixtures(model):
        return (
            f"rollout.cuda_graphs: rows of {type(model).__name__} are given to its experts on the host, which a graph "
            "cannot do: turn it off, or use rollout.engine=vllm"
        )
    kind = (model.config.rope_parameters or {}).get("rope_type", "default")
    if "dynamic" in kind or kind == "longrope":
        return (
            f"rollout.cuda_graphs: with rotary embeddings of type {kind}, {type(model).__name__} looks at positions to "
            "choose its frequencies, which a graph cannot do: turn it off"
        )
    return None


def _power_of_two(count: int, least: int) -> int:
    """Return the smallest power of two that is not below `count` or `least`, itself a power of two."""
    return max(least, 1 << (count - 1).bit_length())
