"""The embedded engine: a transformers model in this process, its block linears quantized, continuous batching.

Batch-invariant: a request's tokens and log-probs do not depend on what else is in the batch, on the number of slots, or
on whether its prompt was prefilled for it alone (docs/concepts.md). A prompt shared by requests is computed once.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from qurl_ray.errors import EngineError, StaleWeights, SyncError
from qurl_ray.policy.load import context_length, empty_model
from qurl_ray.quant.fingerprint import fingerprint
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.linear import QuantizedLinear, weight_max_code
from qurl_ray.quant.quantize import QTensor
from qurl_ray.rollout.batch import RunningBatch
from qurl_ray.rollout.engine import Buffers
from qurl_ray.rollout.slots import SlotCache
from qurl_ray.types import Completion, Manifest, PolicySpec, Request, TensorRecord

_PREFILL_TOKENS = 8192  # padded tokens of one prefill pass: bounds its memory


class TorchEngine:
    """See rollout.engine.Engine.

    Args:
        slots: sequences decoded at a time.
        kernel: "auto" uses the device's integer kernel where there is one, "emulation" the float32 reference.
    """

    def __init__(self, spec: PolicySpec, *, slots: int, kernel: str = "auto") -> None:
        self.version: int | None = None
        self._model = empty_model(spec).requires_grad_(False)
        self._context = context_length(spec)
        self._slots = slots
        self._emulate = kernel == "emulation"
        self._cache: SlotCache | None = None

    # --- weights -----------------------------------------------------------------------------------------------

    def weight_max_code(self, format_name: str) -> int:
        if format_name == "none":
            return 0
        fmt = get_format(format_name)
        return fmt.weight_max if self._emulate else weight_max_code(fmt, torch.device("cpu"))

    @torch.no_grad()
    def load(self, manifest: Manifest, buffers: Buffers) -> None:
        self.version = None  # STALE until every tensor is verified
        expected = _checkpoint_names(self._model)
        sent = {record.name for record in manifest.tensors}
        if sent != expected or set(buffers) != sent:
            missing, extra = sorted(expected - (sent & set(buffers))), sorted((sent | set(buffers)) - expected)
            raise SyncError(f"version {manifest.version} is incomplete: missing {missing[:3]}, unexpected {extra[:3]}")
        for record in manifest.tensors:
            self._place(record, buffers[record.name], manifest.weight_max_code)
        for record in manifest.tensors:
            resident = fingerprint(*self._resident(record.name))
            if resident != record.fingerprint:
                raise SyncError(
                    f"version {manifest.version}: {record.name} is {resident:016x} in the engine, "
                    f"{record.fingerprint:016x} was sent"
                )
        self.version = manifest.version

    def _place(self, record: TensorRecord, parts: tuple[np.ndarray, ...], max_code: int) -> None:
        if parts[0].shape != record.shape:
            raise SyncError(f"{record.name} has shape {parts[0].shape}, expected {record.shape}")
        path, _, leaf = record.name.rpartition(".")
        module = self._model.get_submodule(path)
        if record.format == "none":
            if isinstance(module, QuantizedLinear) and leaf == "weight":
                module = _swap(self._model, path, _plain_linear(record.shape, module.bias))
            getattr(module, leaf).copy_(torch.tensor(parts[0]))  # a copy: buffers from an object store are read-only
            return
        q = QTensor.from_numpy(*parts, get_format(record.format, max_code))
        _swap(self._model, path, QuantizedLinear(q, module.bias, emulate=self._emulate))

    def _resident(self, name: str) -> tuple[torch.Tensor, ...]:
        path, _, leaf = name.rpartition(".")
        module = self._model.get_submodule(path)
        if isinstance(module, QuantizedLinear) and leaf == "weight":
            q = module.resident()
            return q.codes, q.scale
        return (getattr(module, leaf),)

    def kernels(self) -> list[str]:
        """What computes the linears now: "fbgemm", "emulation of int8", … or [] in full precision."""
        quantized = [m for m in self._model.modules() if isinstance(m, QuantizedLinear)]
        return sorted({m.kernel or f"emulation of {m.fmt.name}" for m in quantized})

    # --- generation --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], *, version: int) -> list[Completion]:
        if self.version != version:
            held = "unverified weights" if self.version is None else f"weights {self.version}"
            raise StaleWeights(f"engine holds {held}, caller wants {version}")
        for request in requests:
            self._check(request)
        if not requests:
            return []
        waiting = deque(enumerate(requests))
        cache = self._slots_for(requests)
        batch = RunningBatch(requests, version)
        while waiting or batch.count:
            admitted = [waiting.popleft() for _ in range(min(len(waiting), cache.slots - batch.count))]
            for group in _prefill_groups(admitted):
                self._prefill(cache, batch, group)
            self._decode(cache, batch)
        return batch.completions()

    def _check(self, request: Request) -> None:
        total = len(request.prompt_ids) + request.sampling.max_new_tokens
        if not len(request.prompt_ids) or total > self._context:
            raise EngineError(
                f"{request.uid}: {len(request.prompt_ids)} prompt + {request.sampling.max_new_tokens} new tokens "
                f"do not fit the context of {self._context}"
            )

    def _slots_for(self, requests: Sequence[Request]) -> SlotCache:
        """A cache large enough for these requests; the last one if it is."""
        slots = min(self._slots, len(requests))
        length = max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in requests)
        if self._cache is None or self._cache.slots < slots or self._cache.length < length:
            config = self._model.config
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            self._cache = SlotCache(
                layers=config.num_hidden_layers,
                slots=slots,
                kv_heads=config.num_key_value_heads,
                head_dim=head_dim,
                length=length,
            )
        return self._cache

    def _prefill(self, cache: SlotCache, batch: RunningBatch, group: list[tuple[int, Request]]) -> None:
        """Compute each different prompt once, fill a row per request, draw the first tokens."""
        prompts = list({r.prompt_ids.tobytes(): r.prompt_ids for _, r in group}.values())
        place = {prompt.tobytes(): i for i, prompt in enumerate(prompts)}
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.from_numpy(prompt)
        sources = torch.tensor([place[r.prompt_ids.tobytes()] for _, r in group])
        cache.prefill(batch.admit(group), sources)
        hidden = self._forward(ids, torch.arange(ids.shape[1])[None], cache)
        logits = self._model.get_output_embeddings()(hidden[torch.arange(len(prompts)), lengths - 1])
        batch.draw(logits[sources], first=batch.count - len(group))
        self._retire(cache, batch)

    def _decode(self, cache: SlotCache, batch: RunningBatch) -> None:
        """One more token for every running row."""
        if not batch.count:
            return
        positions = batch.positions()
        cache.decode(positions)
        hidden = self._forward(batch.last_tokens()[:, None], positions[:, None], cache)
        batch.draw(self._model.get_output_embeddings()(hidden[:, 0]))
        self._retire(cache, batch)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, cache: SlotCache) -> torch.Tensor:
        return self._model.base_model(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True
        ).last_hidden_state

    def _retire(self, cache: SlotCache, batch: RunningBatch) -> None:
        sources, targets = batch.retire()
        if sources:
            cache.move(sources, targets, int(batch.positions().max()) + 1)


def _prefill_groups(admitted: list[tuple[int, Request]]) -> list[list[tuple[int, Request]]]:
    """Split so that one pass holds at most _PREFILL_TOKENS padded tokens of different prompts."""
    groups: list[list[tuple[int, Request]]] = []
    different: set[bytes] = set()
    longest = 0
    for item in admitted:
        prompt = item[1].prompt_ids
        grown, length = different | {prompt.tobytes()}, max(longest, len(prompt))
        if not groups or len(grown) * length > _PREFILL_TOKENS:
            groups.append([])
            grown, length = {prompt.tobytes()}, len(prompt)
        groups[-1].append(item)
        different, longest = grown, length
    return groups


def _checkpoint_names(model: nn.Module) -> set[str]:
    """Parameter names, whether or not a linear is quantized now; tied ones once."""
    names = {name for name, _ in model.named_parameters()}
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            names |= {f"{path}.weight"} | ({f"{path}.bias"} if module.bias is not None else set())
    return names


def _swap(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)
    return module


def _plain_linear(shape: tuple[int, ...], bias: torch.Tensor | None) -> nn.Linear:
    linear = nn.Linear(shape[1], shape[0], bias=bias is not None).requires_grad_(False)
    if bias is not None:
        linear.bias.copy_(bias)
    return linear
