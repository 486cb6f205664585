"""The weights of the torch engine: written by a sync, verified in place, and returned in the form of a sync.

Linears that read the same input (q, k, v; gate, up) are fused into one product if the kernel is exact in integers, so
that fusion changes no bit. Their names, shapes and fingerprints stay those of the checkpoint: each is a range of rows
of the fused linear.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from qurl_ray.engines.protocol import Buffers
from qurl_ray.errors import SyncError
from qurl_ray.numerics.products import Linear
from qurl_ray.policy.adapters import move_adapter
from qurl_ray.policy.weights import HEAD
from qurl_ray.quant.fingerprint import fingerprint
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.kernels import kernel_for
from qurl_ray.quant.linear import QuantizedLinear
from qurl_ray.quant.quantize import QTensor, concatenate, shared
from qurl_ray.types import Manifest, TensorRecord

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class RowsOf(nn.Module):
    """Rows start … stop - 1 of a fused linear, which replace the linear that they belong to."""

    bias: torch.Tensor | None

    def __init__(self, whole: QuantizedLinear, start: int, stop: int) -> None:
        super().__init__()
        self.whole, self._rows = whole, slice(start, stop)
        self.out_features = stop - start
        # A view: a bias loaded here is the bias that the fused linear adds.
        self.register_buffer("bias", whole.bias[self._rows] if whole.bias is not None else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole(x)[..., self._rows]

    def of(self, q: QTensor) -> QTensor:
        """Return these rows of `q`, the weight of the fused linear."""
        return q.cut((self._rows.start, self._rows.stop))


class EngineWeights:
    """Holds the weights in the modules of `model`, and replaces modules when the format changes.

    Args:
        emulate: compute the float32 reference even where there is a kernel.
        fuse: fuse linears that read the same input, for a forward pass that computes them together. Any other forward
            pass would compute the whole fused product for each of them.
    """

    def __init__(self, model: PreTrainedModel, *, emulate: bool, fuse: bool) -> None:
        self._model, self._emulate, self._fused, self._device = model, emulate, fuse, model.device
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}  # tied ones once
        self._expected = self._shapes.keys()
        embedding = model.get_input_embeddings().weight
        tied = model.get_output_embeddings().weight is embedding
        self._optional = {HEAD: tuple(embedding.shape)} if tied else {}  # sent in addition if it is quantized
        self._waiting: dict[str, QTensor] = {}
        """Codes that are not in a linear yet, by path."""
        self._packing: list[tuple[list[str], list[int], Future[QuantizedLinear]]] = []
        """Linears being packed: paths, their numbers of rows, and the linear of them all."""
        self._verified: dict[str, tuple[torch.Tensor, ...]] = {}
        """Codes and scales as the last verification unpacked them, on a CPU only. The next delta is added to them."""

    # --- load ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, manifest: Manifest, buckets: Iterable[Buffers]) -> None:
        """Place bucket after bucket, then compare the resident weights with the manifest.

        Raises:
            SyncError: a tensor is missing, unknown, misshapen or damaged, or a subset has codes. The resident weights
                are then useless.
        """
        records = {record.name: record for record in manifest.tensors}
        expected = self._expected if manifest.complete else set(records) & self._expected
        if not expected <= set(records) <= self._expected | set(self._optional):
            raise _incomplete(manifest, expected, set(records))
        if not manifest.complete and any(record.format != "none" for record in manifest.tensors):
            raise SyncError(
                f"version {manifest.version} is a subset with codes, whose linears may be fused with others"
            )
        for name, shape in (self._shapes | self._optional).items():
            if name in records and records[name].shape != shape:
                raise SyncError(f"{name} has shape {records[name].shape}, expected {shape}")
        self._waiting, self._packing = {}, []
        placed: set[str] = set()
        # Packing, unpacking and fingerprints are single-threaded, and release Python's lock.
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for bucket in buckets:
                for name, parts in bucket.items():
                    if name not in records or name in placed:
                        raise _incomplete(manifest, set(records), {*placed, name})
                    self._place(records[name], parts, manifest.weight_max_code)
                    placed.add(name)
                self._settle()  # linears packed while this bucket was decoded
                self._pack(pool, whole_groups_only=True)
            if placed != set(records):
                raise _incomplete(manifest, set(records), placed)
            self._pack(pool, whole_groups_only=False)
            self._settle()
            if manifest.complete and set(self._optional) - set(records):  # the head is tied to the embedding
                embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
                if getattr(head, "weight", None) is not embedding.weight:
                    head = self._swap("lm_head", self._plain_linear(tuple(embedding.weight.shape), None))
                    head.weight = embedding.weight
            self._verify(manifest, pool)

    def _verify(self, manifest: Manifest, pool: ThreadPoolExecutor) -> None:
        by_module: dict[int, list[TensorRecord]] = {}
        for record in manifest.tensors:
            module = self._model.get_submodule(record.name.rpartition(".")[0])
            by_module.setdefault(id(getattr(module, "whole", module)), []).append(record)
        if manifest.complete:
            self._verified = {}
        for held in pool.map(partial(self._compare, manifest.version), by_module.values()):
            if self._device.type == "cpu":  # on other devices, they are held unpacked
                self._verified |= {name: tensors for name, tensors in held.items() if len(tensors) > 1}

    def _compare(self, version: int, records: Sequence[TensorRecord]) -> dict[str, tuple[torch.Tensor, ...]]:
        """Return the resident tensors of one module, after comparing them with what was sent."""
        held = dict(self._residents([record.name for record in records]))
        for record in records:
            resident = fingerprint(*held[record.name])
            if resident != record.fingerprint:
                raise SyncError(
                    f"version {version}: {record.name} is {resident:016x} in the engine, "
                    f"{record.fingerprint:016x} was sent"
                )
        return held

    def _place(self, record: TensorRecord, parts: tuple[np.ndarray, ...], max_code: int) -> None:
        path, _, leaf = record.name.rpartition(".")
        module = self._model.get_submodule(path)
        if record.format == "none":
            if parts[0].shape != record.shape:
                raise SyncError(f"{record.name} has shape {parts[0].shape}, expected {record.shape}")
            if leaf == "weight" and isinstance(module, QuantizedLinear | RowsOf):
                module = self._swap(path, self._plain_linear(record.shape, module.bias))
            getattr(module, leaf).copy_(shared(parts[0]))
            return
        q = QTensor.of([shared(part) for part in parts], get_format(record.format, max_code))
        if q.shape != record.shape:
            raise SyncError(f"{record.name} has shape {tuple(q.shape)}, expected {record.shape}")
        self._waiting[path] = q.to(self._device)

    def _pack(self, pool: ThreadPoolExecutor, *, whole_groups_only: bool) -> None:
        """Start to build linears from waiting codes, fused if the whole group has arrived."""
        groups = []
        for path, q in self._waiting.items():
            parent, _, leaf = path.rpartition(".")
            group = [path]  # the linears that are fused with this one, itself included
            names = next((names for names in _FUSED if leaf in names), None)
            if names and self._fused and not self._emulate and kernel_for(q.fmt, q.codes.device, tuple(q.shape)):
                group = [f"{parent}.{name}" for name in names]
            complete = all(member in self._waiting for member in group)
            if group[0] == path and complete:
                groups.append(group)
            elif not (complete or whole_groups_only):  # the others of its group are not quantized
                groups.append([path])
        for group in groups:
            parts = [self._waiting.pop(path) for path in group]
            sizes = [q.shape[0] for q in parts]
            self._packing.append((group, sizes, pool.submit(self._linear, parts)))

    def _settle(self) -> None:
        """Put the packed linears into the model."""
        for group, sizes, packing in self._packing:
            whole = packing.result()
            biases = [self._model.get_submodule(path).bias for path in group]
            like = next((bias for bias in biases if bias is not None), None)
            if like is not None:  # zeros take the place of missing ones
                pairs = zip(biases, sizes, strict=True)
                whole.bias = torch.cat([like.new_zeros(size) if bias is None else bias for bias, size in pairs])
            if len(group) == 1:
                self._swap(group[0], whole)
                continue
            borders = pairwise([0, *accumulate(sizes)])
            for path, (start, stop) in zip(group, borders, strict=True):
                self._swap(path, RowsOf(whole, start, stop))
        self._packing.clear()

    def _linear(self, parts: Sequence[QTensor]) -> QuantizedLinear:
        """Return one linear that computes all parts, without a bias, because biases may still arrive. `concatenate`
        copies them out of the buffers in which they came."""
        return QuantizedLinear(concatenate(parts), None, emulate=self._emulate)

    def _plain_linear(self, shape: tuple[int, ...], bias: torch.Tensor | None) -> nn.Linear:
        kind = {"device": self._device, "dtype": self._model.dtype}
        linear = Linear(shape[1], shape[0], bias=bias is not None, **kind).requires_grad_(False)
        if bias is not None:
            linear.bias.copy_(bias)
        return linear

    def _swap(self, path: str, module: nn.Module) -> nn.Module:
        parent, _, leaf = path.rpartition(".")
        move_adapter(self._model.get_submodule(path), module)
        setattr(self._model.get_submodule(parent), leaf, module)
        return module

    @torch.no_grad()
    def put(self, codes: Mapping[str, QTensor]) -> None:
        """Put codes of linears, by path, in the place of weights, and pack them. Nothing is verified."""
        self._waiting = dict(codes)
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            self._pack(pool, whole_groups_only=False)
            self._settle()
        self.pack()

    def pack(self) -> None:
        """Bring all codes into the layout that is fastest in the long run (quant.linear).

        Raises:
            StaleWeights: codes or products are others there.
        """
        linears = [module for module in self._model.modules() if isinstance(module, QuantizedLinear)]
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # packing is single-threaded
            list(pool.map(QuantizedLinear.pack, linears))

    # --- resident tensors ----------------------------------------------------------------------------------------

    def resident(self, name: str) -> tuple[np.ndarray, ...]:
        """Return one tensor in the form in which it is sent: the parts of its format, or (float32 values,)."""
        tensors = self._verified.get(name) or dict(self._residents([name]))[name]
        return tuple(tensor.detach().cpu().contiguous().numpy() for tensor in tensors)

    def _residents(self, names: Iterable[str]) -> Iterator[tuple[str, tuple[torch.Tensor, ...]]]:
        """Yield (name, its tensors); a fused linear is unpacked once."""
        wholes: dict[QuantizedLinear, QTensor] = {}
        for name in names:
            path, _, leaf = name.rpartition(".")
            module = self._model.get_submodule(path)
            if leaf != "weight" or not isinstance(module, QuantizedLinear | RowsOf):
                yield name, (getattr(module, leaf).float(),)  # exact, even if the engine holds fewer bits
                continue
            whole = module.whole if isinstance(module, RowsOf) else module
            if whole not in wholes:
                wholes[whole] = whole.resident()
            q = module.of(wholes[whole]) if isinstance(module, RowsOf) else wholes[whole]
            yield name, q.parts

    def kernels(self) -> list[str]:
        """Return the kernels of the linears now: "fbgemm", "emulation of int8", … or [] in full precision."""
        quantized = [m for m in self._model.modules() if isinstance(m, QuantizedLinear)]
        return sorted({m.kernel or f"emulation of {m.fmt.name}" for m in quantized})


def _incomplete(manifest: Manifest, expected: Set[str], sent: Set[str]) -> SyncError:
    missing, extra = sorted(expected - sent), sorted(sent - expected)
    return SyncError(f"version {manifest.version} is incomplete: missing {missing[:3]}, unexpected {extra[:3]}")
