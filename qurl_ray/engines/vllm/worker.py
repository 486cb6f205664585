"""Code inside a vLLM worker, which writes checkpoint tensors into vLLM's layers and reads them back.

vLLM mixes `WorkerExtension` into its worker class; the engine calls it through `collective_rpc`. Messages hold only
plain types (lists, strings, bytes), because vLLM's own messages carry neither arrays nor errors of this package.
"""

import itertools
import os
import select
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from qurl_ray.engines.vllm.experts import MIXTRAL, place_of_expert
from qurl_ray.engines.vllm.keys import Triples, attention_layers, read_scales, store_nearest, watch, write_scales
from qurl_ray.engines.vllm.plugin import AdapterMatrix, QurlLinearMethod
from qurl_ray.engines.vllm.shards import Partition, Piece, TensorShard, cut, fingerprint_pieces, local_shards, read
from qurl_ray.errors import QurlError, SyncError
from qurl_ray.policy.logprobs import without_text
from qurl_ray.quant.formats import Format, get_format
from qurl_ray.quant.quantize import QTensor
from qurl_ray.transfer.group import Meeting, broadcast, join
from qurl_ray.transfer.shared_memory import Placed, opened, opened_on_gpu, tensor_at, uuid_of

EncodedArray = tuple[str, tuple[int, ...], bytes]
"""An array in a message: (numpy dtype, shape, bytes)."""
Wire = list[EncodedArray]
Item = tuple[str, str, Sequence[Placed]]
"""(name, format, places of the arrays in a buffer) of a tensor."""


class WorkerExtension:
    """Methods that are added to vLLM's worker class."""

    model_runner: Any
    model_config: Any

    def qurl(self, method: str, *args: object) -> tuple[str, object]:
        """Call a method of ResidentPolicy. Return ("ok", result), or (name of the error, message)."""
        if not hasattr(self, "qurl_policy"):
            self.qurl_policy = ResidentPolicy(self.model_runner.get_model())
        try:
            return "ok", getattr(self.qurl_policy, method)(*args)
        except QurlError as error:
            return type(error).__name__, str(error)

    def qurl_follow(self, pid: int) -> None:
        """End this process when process `pid` ends, however it ends: vLLM's outlive a killed owner. On Linux only."""
        if not hasattr(os, "pidfd_open"):
            return
        ended = select.poll()
        ended.register(os.pidfd_open(pid), select.POLLIN)
        threading.Thread(target=lambda: (ended.poll(), os._exit(1)), name="follow", daemon=True).start()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Location of a checkpoint tensor in this worker."""

    parameter: str
    """vLLM's name of the parameter."""
    module: Any
    leaf: str
    shards: tuple[TensorShard, ...]
    rows: int
    """Number of rows of the parameter on this rank, of all its tensors together, without padding."""

    @property
    def method(self) -> QurlLinearMethod | None:
        """Quantization method of a linear's weight; None for any other tensor."""
        method = getattr(self.module, "quant_method", None)
        return method if self.leaf == "weight" and isinstance(method, QurlLinearMethod) else None

    def held(self) -> list[QTensor]:
        """Return the codes of the whole layer, which q, k and v share; [] if it holds none."""
        return self.method.resident() if self.method and self.method.fmt else []

    def read(self, shard: TensorShard, held: list[QTensor]) -> tuple[torch.Tensor, ...]:
        """Return the parts of a shard, from `held`, or its values."""
        if held:
            return read(held, shard)
        return (getattr(self.module, self.leaf).data[shard.at : shard.at + shard.rows].float(),)


@dataclass
class ResidentPolicy:
    """The policy's tensors in this worker, accessed by their checkpoint names."""

    model: nn.Module
    _waiting: dict[str, list[tuple[int, torch.Tensor | QTensor]]] = field(default_factory=dict)
    _placed: dict[str, int] = field(default_factory=dict)
    _group: tuple[Meeting | None, Any] = (None, None)
    """Group that was joined last."""
    _watched: Callable[[], Triples] | None = None
    """Ends the measurement of keys and values that goes on."""
    _layers: dict[str, Any] = field(default_factory=dict)
    """Attention layers, if keys and values are held in FP8."""

    def never_draw(self, ids: Sequence[int]) -> None:
        """Have no request draw these ids. Log-probs are then those of the learner, which leaves them out, too."""
        hidden = torch.tensor(ids, device=next(self.model.parameters()).device)

        def hide(_: nn.Module, __: object, logits: torch.Tensor | None) -> torch.Tensor | None:
            return None if logits is None else without_text(logits, hidden)

        cast(Any, self.model).logits_processor.register_forward_hook(hide)

    def begin(self) -> None:
        """Forget the tensors placed before."""
        self._waiting, self._placed = {}, {}

    @torch.no_grad()
    def put(self, source: dict[str, Any], items: Sequence[Item], weight_max_code: int) -> None:
        """Write the tensors of a bucket to their locations. A fused layer changes when the last of its tensors has
        arrived.

        Args:
            source: where the bytes are: a `file`; or for direct transports (weights.transports.direct) `memory` by
                device, or the `group` that broadcasts `size` of them, with the `rank` of this engine's first process.
            weight_max_code: largest code of the tensors that came as codes.
        """
        device = next(self.model.parameters()).device
        memory = self._received(source, device)
        with self._threads() as pool:
            packing = []
            for name, format_name, places in items:
                fmt = None if format_name == "none" else get_format(format_name, weight_max_code)
                if complete := self._write(name, fmt, [tensor_at(memory, place) for place in places]):
                    packing.append(pool.submit(complete))
            for layer in packing:
                layer.result()
        if device.type == "cuda" and "file" not in source:
            torch.cuda.synchronize(device)  # the sender may write there again

    def _received(self, source: dict[str, Any], device: torch.device) -> torch.Tensor:
        """Return the bytes of a bucket, uint8."""
        if "file" in source:
            return torch.from_numpy(opened(source["file"]))
        rank = source["rank"] + get_tensor_model_parallel_rank()
        if "group" in source:
            memory = torch.empty(source["size"], dtype=torch.uint8, device=device)
            meeting: Meeting = tuple(source["group"])
            if self._group[0] != meeting:
                self._group = (meeting, join(meeting, rank, device))
            broadcast(self._group[1], memory)
            return memory
        if device.type == "cuda":
            handle = source["memory"].get(uuid_of(device))
            if handle is None:
                raise SyncError(f"no rank of the learner shares this engine's GPU {uuid_of(device)}")
            return opened_on_gpu(handle, device)
        of_ranks = sorted(source["memory"])  # all are alike
        return torch.from_numpy(opened(source["memory"][of_ranks[rank % len(of_ranks)]]))

    def _threads(self) -> ThreadPoolExecutor:
        """Return threads for work that uses one and releases Python's lock: packing, unpacking and fingerprints on a
        CPU."""
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        return ThreadPoolExecutor(torch.get_num_threads() if on_cpu else 1)

    def _write(self, name: str, fmt: Format | None, arrays: Sequence[torch.Tensor]) -> Callable[[], None] | None:
        """Take a tensor. Return a function that writes its layer, if that is complete now."""
        place = self._find(name)
        value: Any = arrays[0]
        if fmt and place.method is None:
            raise SyncError(
                f"{name} came as {fmt.name} codes, but vLLM holds it in full precision: add it to quantization.keep"
            )
        if fmt:
            value = QTensor.of(arrays, fmt)
        own = [(shard.at, cut(value, shard)) for shard in place.shards]
        done = self._placed[place.parameter] = self._placed.get(place.parameter, 0) + sum(p.rows for p in place.shards)
        if place.method is None:
            target = getattr(place.module, place.leaf).data
            for at, part in own:
                target[at : at + len(part)].copy_(part)
            return None
        waiting = self._waiting.setdefault(place.parameter, [])
        device = place.module.weight.device
        waiting += [(at, part.to(device, copy=True)) for at, part in own]  # the buffer is written again
        if done != place.rows:
            return None
        del self._waiting[place.parameter]
        parts = [part for _, part in sorted(waiting, key=lambda item: item[0])]
        return partial(place.method.hold, place.module, parts)

    def unplaced(self) -> list[str]:
        """Return names of vLLM's parameters that have not got all their rows since `begin`."""
        unplaced = []
        for name, parameter in self.model.named_parameters():
            path, _, leaf = name.rpartition(".")
            if leaf == "weight_scale":
                continue  # it is written with its codes
            if self._placed.get(name, 0) != _rows(self.model.get_submodule(path), parameter):
                unplaced.append(name)
        return unplaced

    def fingerprints(self, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> list[list[Piece]]:
        """Return what this rank's shards add to the fingerprints of these tensors, given by name and shape."""
        of_modules: dict[int, list[tuple[str, tuple[int, ...], Place]]] = {}
        for name, shape in shapes:
            place = self._find(name)
            of_modules.setdefault(id(place.module), []).append((name, tuple(shape), place))
        with self._threads() as pool:
            pieces = dict(itertools.chain.from_iterable(pool.map(_pieces, of_modules.values())))
        return [pieces[name] for name, _ in shapes]

    def resident(self, name: str) -> list[tuple[int, int, tuple[int, int] | None, Wire]]:
        """Return this rank's shards of a tensor: rows, columns, and the parts of its format, or float32 values."""
        place = self._find(name)
        held = place.held()
        shards = []
        for shard in place.shards:
            arrays = [encoded(tensor.cpu().numpy()) for tensor in place.read(shard, held)]
            shards.append((shard.start, shard.stop, shard.columns, arrays))
        return shards

    def hold_keys_in_fp8(self) -> None:
        """Prepare the attention layers, once."""
        self._layers = attention_layers(self.model)
        store_nearest(self._layers)

    def watch_keys(self, tokens: int) -> None:
        """Measure queries, keys and values of the first tokens of the next pass."""
        self._watched = watch(self._layers, tokens)

    def largest_keys(self) -> Triples:
        """End the measurement. Return the largest absolute queries, keys and values that came, by layer."""
        watched, self._watched = self._watched, None
        return watched() if watched else {}

    def scale_keys(self, scales: Triples) -> None:
        """Set the scales of queries, keys and values."""
        write_scales(self._layers, scales)

    def key_scales(self) -> Triples:
        """Return the scales of queries, keys and values that the layers compute with."""
        return read_scales(self._layers)

    def kernels(self) -> list[str]:
        """Return the names of the kernels, or emulations, that compute the quantized linears."""
        methods = [getattr(module, "quant_method", None) for module in self.model.modules()]
        return sorted({name for method in methods if isinstance(method, QurlLinearMethod) for name in method.kernels()})

    def _find(self, name: str) -> Place:
        kind = type(self.model).__name__
        here = name.replace(".mlp.", MIXTRAL) if kind == "MixtralForCausalLM" else name
        parameter, index = place_of_expert(here) or self._mapped(here)
        path, _, leaf = parameter.rpartition(".")
        try:
            module = self.model.get_submodule(path)
            value = module.get_parameter(leaf)
        except AttributeError:
            raise SyncError(f"vLLM's {kind} has no place for {name}: {parameter} does not exist") from None
        partitions = _partitions(module, value)
        linear, inner = module, leaf == "weight"  # the columns of an adapter's A are those of its linear
        if isinstance(module, AdapterMatrix):
            linear, inner = module.layer, module is module.layer.lora_A
            index = None if index is None else module.tensors.index(index)
        columns = None
        if isinstance(linear, RowParallelLinear) and inner and linear.tp_size > 1:
            width = linear.input_size_per_partition
            columns = (linear.tp_rank * width, (linear.tp_rank + 1) * width)
        return Place(
            parameter=parameter,
            module=module,
            leaf=leaf,
            shards=tuple(local_shards(partitions, index, columns)),
            rows=_rows(module, value),
        )

    def _mapped(self, name: str) -> tuple[str, int | None]:
        """Return vLLM's name of a parameter, and its place among the tensors of a fused one."""
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        if mapper is None:
            return name, None
        marked = list(mapper.apply([(name, torch.empty(0))]))
        if len(marked) != 1:
            raise SyncError(f"vLLM's {type(self.model).__name__} has {len(marked)} places for {name} instead of one")
        parameter, marker = marked[0]
        shard_id: Any = getattr(marker, "shard_id", None)
        return parameter, {"q": 0, "k": 1, "v": 2}.get(shard_id, shard_id)


def _pieces(tensors: Sequence[tuple[str, tuple[int, ...], Place]]) -> list[tuple[str, list[Piece]]]:
    """Return (name, pieces of its fingerprint) of the tensors of one module, which is unpacked once."""
    pieces_of_tensors = []
    held = next((codes for _, _, place in tensors if (codes := place.held())), [])
    for name, shape, place in tensors:
        fmt = place.method.fmt if place.method else None
        pieces: list[Piece] = []
        for shard in place.shards:
            pieces += fingerprint_pieces(place.read(shard, held if fmt else []), shape, shard, fmt)
        pieces_of_tensors.append((name, pieces))
    return pieces_of_tensors


def encoded(array: np.ndarray) -> EncodedArray:
    """Encode an array so that vLLM's messages can carry it."""
    return array.dtype.str, array.shape, array.tobytes()


def _partitions(module: nn.Module, parameter: torch.Tensor) -> list[Partition]:
    """Return the partitions of which the rows of a module's parameter consist on this rank."""
    rows = _rows(module, parameter)
    if isinstance(module, AdapterMatrix):
        if module is module.layer.lora_A:
            return [Partition.share(rows // len(module.tensors)) for _ in module.tensors]
        of_layer = _partitions(module.layer, parameter)
        return [of_layer[tensor] for tensor in module.tensors] if len(of_layer) > 1 else of_layer
    if isinstance(module, VocabParallelEmbedding):
        first = module.shard_indices.org_vocab_start_index
        return [Partition(rows=rows, first=first, total=module.org_vocab_size)]
    if not isinstance(module, ColumnParallelLinear):
        return [Partition.share(rows)]
    sizes, rank, ranks = module.output_partition_sizes, module.tp_rank, module.tp_size
    if isinstance(module, QKVParallelLinear):
        copies = (1, module.num_kv_head_replicas, module.num_kv_head_replicas)
        return [Partition.share(n, rank // c, ranks // c) for n, c in zip(sizes, copies, strict=True)]
    return [Partition.share(n, rank, ranks) for n in sizes]


def _rows(module: Any, parameter: torch.Tensor) -> int:
    """Return the number of rows of a parameter on this rank, without padding, for floats as well as for codes."""
    if isinstance(module, VocabParallelEmbedding):
        return module.num_org_embeddings_per_partition
    return sum(module.output_partition_sizes) if isinstance(module, LinearBase) else len(parameter)
