"""Rollouts without loss: INT8 codes draft tokens, and the weights in full precision, from which the engine makes these
codes, verify them (rollout.lossless).

A draw is a function of logits, request and place (engines.torch.sampling). Drafts are drawn with the noise of their
places, from the codes' logits. One pass of the weights over the last token and K drafts then gives the logits of K + 1
places. Tokens are drawn from these, for as long as the draft before was right (RunningBatch.verify). Every token and
log-prob is so that of an engine without drafts, bit for bit, whatever the drafts are: a wrong one costs time alone.

- A sync sends full precision, with one manifest, verified as always. Codes are made here, and verified by nothing.
- Drafts attend to the verified keys and values of earlier tokens. Their own are written where the verifying pass
  replaces them before it reads them, in the same cache. A wrong draft's are replaced when its place is drawn again.
- All linears are drafted with codes, the head too (quantization.keep does not apply), with channels equalized by
  factors that are measured at the first load. A model's own adapter is merged into its codes; those by name are left
  out.
- The number of drafts follows the share of right ones, and the times of passes that are measured at every load.

This is speculative decoding (https://arxiv.org/abs/2211.17192) with noise that both share
(https://arxiv.org/abs/2408.07978) in place of rejection sampling, which would keep the distribution but not the tokens.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from qurl_ray.config.quantization import QuantizationConfig
from qurl_ray.engines.torch.adapters import RowAdapters
from qurl_ray.engines.torch.decoder import Apply, Decoder, ForwardPass, head_of, knows, through_transformers
from qurl_ray.engines.torch.slots import SlotCache
from qurl_ray.engines.torch.weights import EngineWeights
from qurl_ray.errors import QuantizationError
from qurl_ray.numerics.products import ADAPTER_FACTORS
from qurl_ray.policy.adapters import merged
from qurl_ray.policy.ranges import configured_factors
from qurl_ray.quant.equalize import Factors, equalized
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.linear import weight_max_code
from qurl_ray.quant.quantize import quantize
from qurl_ray.quant.units import units

FORMAT = "int8"
MOST = 10
"""Most drafts of a pass."""
MEASURED = 16
"""Number of tokens of the larger pass that is timed."""
_REPEATS = 3
_RIGHT, _OF = 28.0, 32.0
"""Drafts that count as right after a load, and all of them, before any was judged."""
_DECAY = 0.98
"""Factor on the weight of earlier drafts, with each pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds (of processors, here) of a pass as a function of its tokens: `start` + `each` · tokens."""

    start: float
    each: float

    def __call__(self, tokens: int) -> float:
        return self.start + self.each * tokens

    @classmethod
    def of(cls, one: float, several: float) -> "Line":
        """Return the line through the seconds of passes of one token and of MEASURED tokens."""
        each = max(0.0, several - one) / (MEASURED - 1)
        return cls(start=max(0.0, one - each), each=each)


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of a draft of so many rows, and of a verifying pass of so many tokens."""

    draft: Line
    verify: Line


def best_count(right: float, rows: int, costs: Costs, most: int) -> int:
    """Return the number k of drafts, at most `most`, with which a row draws the most tokens per second:

        Σ_{i=0…k} rightⁱ / (k · draft(rows) + verify(rows · (k + 1)))

    Args:
        right: share of drafts that agree, above 0.
    """

    def speed(k: int) -> float:
        tokens = sum(right**i for i in range(k + 1))
        return tokens / (k * costs.draft(rows) + costs.verify(rows * (k + 1)))

    return max(range(min(most, MOST) + 1), key=speed, default=0)


class Drafter:
    """The forward pass of an engine's codes, and how many drafts are worth their time.

    Args:
        emulate: compute codes in float32 even where there is a kernel.
    """

    def __init__(self, *, emulate: bool) -> None:
        self._emulate = emulate
        self._forward: ForwardPass | None = None
        self._head: Apply
        self._kernels: list[str] = []
        self._factors: Mapping[str, Factors] | None = None
        self._costs: Costs | None = None
        self._least: dict[tuple[str, int], float] = {}
        """Least seconds of a draft or a verifying pass of so many tokens, over all loads."""
        self._right, self._judged = _RIGHT, _OF

    def load(self, model: PreTrainedModel, forward: ForwardPass, head: Apply, cache: Callable[[], SlotCache]) -> None:
        """Make codes of a model's weights, which they then follow no more.

        Args:
            forward, head: the verifying pass, which is timed.
            cache: makes a cache of MEASURED slots and tokens for that.
        """
        self.drop()
        try:
            copied = self._coded(model)
        except QuantizationError:  # a weight is not finite, which the log-probs will show
            return
        if knows(copied):
            self._forward = Decoder(copied, adapters=RowAdapters())
        else:
            self._forward = partial(through_transformers, copied)
        self._head = head_of(copied)
        self._right, self._judged = _RIGHT, _OF
        self._costs = self._measured(forward, head, cache())

    def drop(self) -> None:
        """Forget the codes: there are no drafts until the next load."""
        self._forward, self._kernels = None, []

    def kernels(self) -> list[str]:
        """Return the kernels of the codes, in words."""
        return [f"{kernel}, for drafts" for kernel in self._kernels]

    def __call__(self, ids_B1: torch.Tensor, positions_B1: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        """Return logits [B, V] after one token of each row, for which the cache is prepared."""
        assert self._forward
        return self._head(self._forward(ids_B1, positions_B1, cache)[:, 0])

    def count(self, rows: int, most: int) -> int:
        """Return the number of drafts for the next pass over so many rows, at most `most`."""
        if self._forward is None or self._costs is None:
            return 0
        return best_count(self._right / self._judged, rows, self._costs, most)

    def learn(self, judged: int, agreed: int) -> None:
        """Note how many drafts of a pass were judged, and how many agreed."""
        self._judged, self._right = _DECAY * self._judged + judged, _DECAY * self._right + agreed

    @torch.no_grad()
    def _coded(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return a copy of the model whose linears have codes; all other tensors are the model's own or equalized."""
        own = [*model.parameters(), *model.buffers()]
        copied = copy.deepcopy(model, {id(tensor): tensor for tensor in own})
        scaling = 1.0
        for module in copied.modules():
            if hasattr(module, "lora_A"):
                scaling = module.lora_B.scaling
                del module.lora_A, module.lora_B
        linears = units(copied)
        if self._factors is None:
            self._factors = configured_factors(copied, linears, QuantizationConfig(), FORMAT)
        named = dict(model.named_parameters())
        adapter = {name: tensor for name, tensor in named.items() if name.split(".")[-2] in ADAPTER_FACTORS}
        base = ((name, tensor) for name, tensor in named.items() if name not in adapter)
        held = dict(equalized(merged(base, adapter, scaling), self._factors))
        for name, tensor in held.items():
            if name not in linears:
                path, _, leaf = name.rpartition(".")
                setattr(copied.get_submodule(path), leaf, nn.Parameter(tensor, requires_grad=False))
        fmt = get_format(FORMAT, weight_max_code(get_format(FORMAT), model.device))
        head = model.get_output_embeddings().weight  # under another name if it is the embedding, too
        codes = {unit.module: quantize(held.get(name, head), fmt) for name, unit in linears.items()}
        weights = EngineWeights(copied, emulate=self._emulate, fuse=knows(copied))
        weights.put(codes)
        self._kernels = weights.kernels()
        return copied

    @torch.inference_mode()
    def _measured(self, forward: ForwardPass, head: Apply, cache: SlotCache) -> Costs:
        ids = torch.zeros(MEASURED, 1, dtype=torch.int64)
        places = torch.arange(MEASURED)[None]

        def draft(rows: int) -> None:
            cache.decode(torch.zeros(rows, dtype=torch.int64))
            self(ids[:rows], torch.zeros_like(ids[:rows]), cache)

        def verify(tokens: int) -> None:
            cache.extend(0, places[:, :tokens])
            head(forward(ids[:tokens].T, places[:, :tokens], cache))

        def seconds(step: Callable[[int], None], tokens: int) -> float:
            step(tokens)  # the first call makes copies of weights
            least = self._least.get((step.__name__, tokens), math.inf)  # also of earlier loads: other work only adds
            for _ in range(_REPEATS):
                started = time.process_time()  # other work on the machine tells less on it than on the clock
                step(tokens)
                least = min(least, time.process_time() - started)
            self._least[step.__name__, tokens] = least
            return least

        draft_line, verify_line = (Line.of(seconds(step, 1), seconds(step, MEASURED)) for step in (draft, verify))
        return Costs(draft=draft_line, verify=verify_line)
