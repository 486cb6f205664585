"""The vLLM engine: continuous batching by vLLM 0.32, linears by quant/linear.py, weights verified in place.

vLLM runs in its own processes (server.py). There, worker.py writes weights into the layers of plugin.py and reads them
back.

Unlike the torch engine, it is not batch-invariant: vLLM's attention depends on the other requests in the batch.
Log-probs therefore differ from the learner's in the last bits, and by more where such a bit changes the code of an
activation. Its random numbers cannot start in the middle of an answer: a continued request draws from the same
distribution, but it draws other tokens than the uninterrupted request. Whole runs were made on one H200, with sleep
mode and CUDA graphs (docs/gpu.md); tensor parallelism was tried on CPUs alone.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from qurl_ray.engines.protocol import Buffers
from qurl_ray.engines.requests import check_requests
from qurl_ray.engines.vllm.server import VllmServer
from qurl_ray.engines.vllm.shards import TensorShard, join_fingerprints, join_shards
from qurl_ray.errors import EngineError, QuantizationError, StaleWeights, SyncError
from qurl_ray.policy.adapters import add_adapters
from qurl_ray.policy.experts import router_weights
from qurl_ray.policy.kv import calibration_ids, power_of_two_scales
from qurl_ray.policy.load import context_length, empty_model
from qurl_ray.policy.logprobs import textless
from qurl_ray.quant.fingerprint import fingerprint
from qurl_ray.quant.formats import Format, get_format
from qurl_ray.quant.linear import weight_max_code
from qurl_ray.transfer.shared_memory import SharedBuffer
from qurl_ray.types import Completion, Manifest, PolicySpec, Request, SamplingParams, StagedBucket, TensorRecord

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

EXTENSION = "qurl_ray.engines.vllm.worker.WorkerExtension"
"""Class that vLLM mixes into its workers."""

_SETTINGS: dict[str, Any] = {
    "quantization": "qurl",
    "load_format": "dummy",  # the first load sends the weights
    "logprobs_mode": "processed_logprobs",
    "max_logprobs": 20,
    "skip_tokenizer_init": True,
    "generation_config": "vllm",  # no sampling defaults from the model's folder
    "disable_log_stats": True,
}
"""vLLM's settings that every engine has."""

_SHARED = 0.01
"""Share of a GPU's memory that must be free for vLLM to start; it has no other effect with `kv_cache_bytes`."""


class VllmEngine:
    """Engine on vLLM; see engines.protocol.Engine. A process can have one, which changes the process's environment.

    Args:
        slots: number of sequences decoded at a time.
        dtype: type of activations and of unquantized tensors; float32 tensors are rounded to it when they are placed.
        tensor_parallel: number of workers (GPUs on CUDA) that share the policy.
        kv_cache_bytes: memory for keys and values in each worker. None means the memory that `slots` full contexts
            need on a CPU, and the memory that vLLM finds free on a GPU.
        kv_cache: "full", or "fp8", which holds keys and values in E4M3, with one scale for each layer's keys and values
            that is measured for every version as policy.kv does it.
        format_name: number format of the linears at first; "none" is full precision.
        keep: patterns of checkpoint names that stay in full precision in any format, as in quant/units.py.
        graphs: compile the model and, on CUDA, replay its decode steps as CUDA graphs; on a CPU for emulation alone.
            The engine then holds one format at a time, as it always does on CUDA, and a load in another one restarts
            vLLM, which takes as long as its start.
        kernel: "auto" or "emulation", as in the torch engine.
        routes: note the experts of each token (AnswerTokens.routes), on a CPU without tensor parallelism.
        route_weights: note their weights, too.
        threads: number of CPU threads of each worker on a CPU; None leaves the choice to vLLM.
        sleep_mode: make `sleep` possible, on CUDA.
        timeout_s: longest time that the start, or any other call to vLLM but `generate`, may take.

    Example:
        engine = VllmEngine(PolicySpec(source="Qwen/Qwen3-0.6B"), slots=64)
        engine.load(manifest, buckets)
        completions = engine.generate(requests, version=manifest.version, deadline_s=600)
        engine.close()
    """

    def __init__(
        self,
        spec: PolicySpec,
        *,
        slots: int,
        dtype: str = "float32",
        tensor_parallel: int = 1,
        kv_cache_bytes: int | None = None,
        kv_cache: str = "full",
        format_name: str = "none",
        keep: Sequence[str] = (),
        graphs: bool = False,
        kernel: str = "auto",
        routes: bool = False,
        route_weights: bool = False,
        threads: int | None = None,
        sleep_mode: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        self.version: int | None = None
        if dtype not in _DTYPES:
            raise EngineError(f"unknown dtype {dtype!r}; known: {', '.join(_DTYPES)}")
        self._dtype, self._ranks, self._emulate = _DTYPES[dtype], tensor_parallel, kernel == "emulation"
        self._context = context_length(spec)
        with torch.device("meta"):
            model = empty_model(spec)
        if spec.adapters:
            add_adapters(model, spec.adapters)
        self._adapters = spec.adapters
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}  # tied ones once
        self._routers = router_weights(model)
        self._textless = textless(model)
        self._calibration = calibration_ids(model.config) if kv_cache == "fp8" else []
        self._key_scales: dict[str, list[float]] = {}
        """Scales of queries, keys and values in FP8 for the present weights, by vLLM's name of the layer."""
        self._records: dict[str, TensorRecord] = {}
        self._before: int | None = None
        """Version that was held when a direct transport began."""
        self._shared = SharedBuffer(), SharedBuffer()
        self._keeps_base = False
        self._base: dict[str, tuple[np.ndarray, ...]] = {}
        """The verified version, once deltas have come: to read it back for each of them would take longer than to send
        whole tensors."""
        self._sleep_mode, self._asleep = sleep_mode, False
        self._fingerprints: dict[str, int] = {}
        """Fingerprint that each tensor of the verified version has in the workers."""
        self._slept = False
        """True if the engine has slept since these were compared."""
        on_cuda = torch.cuda.is_available()
        if graphs and not on_cuda and not self._emulate:
            raise EngineError("on a CPU, vLLM compiles no kernel of this package: graphs need kernel=emulation")
        if routes and (on_cuda or tensor_parallel > 1):
            raise EngineError("vLLM's routes are noted on a CPU without tensor parallelism alone")
        self._routes = ("weights" if route_weights else "experts") if routes else None
        self._fixed = on_cuda or graphs
        self._threads, self._timeout_s = threads, timeout_s
        self._keep, self._kernel = tuple(keep), kernel
        self._settings = _SETTINGS | {
            "model": spec.source,
            "dtype": dtype,
            "tensor_parallel_size": tensor_parallel,
            "max_num_seqs": slots,
            "max_model_len": self._context,
            "kv_cache_memory_bytes": kv_cache_bytes,
            "kv_cache_dtype": "fp8_e4m3" if kv_cache == "fp8" else "auto",
            "enable_sleep_mode": sleep_mode,
            "enforce_eager": not graphs,
            "worker_extension_cls": EXTENSION,
            "distributed_executor_backend": "mp" if tensor_parallel > 1 else "uni",
        }
        self._overrides = dict(spec.overrides)
        if kv_cache_bytes is not None:
            self._settings["gpu_memory_utilization"] = _SHARED  # others, such as the learner, may hold the rest
        self._start(format_name)

    def _start(self, format_name: str) -> None:
        """Start vLLM for a format."""
        plugin = {"quant_method": "qurl", "kernel": self._kernel, "fixed": self._fixed, "routes": self._routes}
        if self._fixed:
            plugin |= {"format": format_name, "keep": self._keep}
        if self._adapters:
            plugin["adapters"] = asdict(self._adapters)
        settings = self._settings | {"hf_overrides": {**self._overrides, "quantization_config": plugin}}
        self._server = VllmServer(settings, threads=self._threads, timeout_s=self._timeout_s)
        self._format, self._key_scales = format_name, {}
        if self._textless is not None:
            self._server.workers("never_draw", self._textless.tolist())
        if self._calibration:
            self._server.workers("hold_keys_in_fp8")

    # --- weights ---------------------------------------------------------------------------------------------------

    def weight_max_code(self, format_name: str) -> int:
        if format_name == "none":
            return 0
        fmt = get_format(format_name)
        return fmt.weight_max if self._emulate else weight_max_code(fmt, self._server.device)

    def load(self, manifest: Manifest, buckets: Iterable[Buffers]) -> None:
        """Replace all weights, bucket by bucket, then compare the resident weights with the manifest.

        Requests that still run are aborted, and returned as cancelled. If the engine holds one format at a time and was
        made for another one, vLLM is restarted first.

        Raises:
            SyncError: a tensor is missing, misshapen or damaged. The engine stays STALE.
            QuantizationError: a tensor that was sent as codes cannot be held as codes.
        """
        if self._fixed and manifest.precision != self._format:
            self.version = None
            self._server.close()
            self._start(manifest.precision)
        self.version = None  # until every tensor is verified
        self._check(manifest)
        self._pause()
        self._keeps_base |= manifest.base_version is not None
        try:
            self._verify(manifest, self._place(manifest, buckets))
        except BaseException:
            self._base.clear()  # parts of two versions
            raise
        finally:
            self._server.control("resume_generation")
        self._scale_keys(manifest.version)
        self.version = manifest.version

    def begin(self, version: int, format_name: str) -> tuple[str, int]:
        """See engines.protocol.DirectEngine."""
        self._before, self.version = self.version, None  # until every tensor is verified
        if self._fixed and format_name != self._format:
            raise SyncError(f"version {version} comes in {format_name}, and the engine was made for {self._format}")
        self._base.clear()
        self._pause()
        return self._server.identity, self._ranks

    def put(self, bucket: StagedBucket, index: int) -> None:
        """See engines.protocol.DirectEngine."""
        source = dict(bucket.source) | {"size": bucket.size}
        source["rank"] = source.pop("first", {}).get(index, index * self._ranks)
        self._server.workers("put", source, bucket.items, bucket.weight_max_code)

    def commit(self, manifest: Manifest) -> None:
        """See engines.protocol.DirectEngine."""
        if not manifest.complete and self._before != manifest.base_version:
            raise SyncError(
                f"version {manifest.version} is a part of {manifest.base_version}, the engine held {self._before}"
            )
        self._check(manifest)
        try:
            self._check_complete(manifest)
            self._verify(manifest, {record.name: record.fingerprint for record in manifest.tensors})
        finally:
            self._server.control("resume_generation")
        self._scale_keys(manifest.version)
        self.version = manifest.version

    def _pause(self) -> None:
        """Abort running requests, and have the workers forget the tensors put before."""
        self._check_awake()
        self._server.control("pause_generation", mode="abort", clear_cache=True)
        self._server.workers("begin")

    def _check(self, manifest: Manifest) -> None:
        came = {record.name: record for record in manifest.tensors}
        self._records = came if manifest.complete else self._records | came
        if tied := [record.name for record in manifest.tensors if record.tied]:
            raise QuantizationError(f"{tied[0]} cannot be quantized in vLLM, being tied: add it to quantization.keep")
        self._check_names(set(came), manifest)

    def _verify(self, manifest: Manifest, expected: Mapping[str, int]) -> None:
        """Compare the tensors of the version with their fingerprints; all others, too, if the engine has slept."""
        self._fingerprints = dict(expected) if manifest.complete else {**self._fingerprints, **expected}
        self._compare(manifest.version, self._fingerprints if self._slept else expected)
        self._slept = False
        self._reset_prefixes()

    def _compare(self, version: int | None, expected: Mapping[str, int]) -> None:
        """Compare tensors with their fingerprints, which the workers compute where they hold them, from their shards.

        Raises:
            SyncError: a tensor is another one.
        """
        shapes = [(name, shape) for name, shape in self._shapes.items() if name in expected]
        of_ranks = self._server.workers("fingerprints", shapes)
        for (name, shape), *pieces in zip(shapes, *of_ranks, strict=True):
            resident = join_fingerprints(name, shape, self._format_of(name), itertools.chain.from_iterable(pieces))
            if resident != expected[name]:
                raise SyncError(
                    f"version {version}: {name} is {resident:016x} in the engine, {expected[name]:016x} was sent"
                )

    def _compare_keys(self, version: int | None) -> None:
        """Compare the scales of FP8 keys and values with those that were measured.

        Raises:
            SyncError: a worker holds other scales.
        """
        if self._key_scales and any(held != self._key_scales for held in self._server.workers("key_scales")):
            raise SyncError(f"version {version}: scales of its keys and values are not those that were measured")

    def _scale_keys(self, version: int) -> None:
        """Measure the FP8 keys and values of the calibration sequence under the weights that came, and set scales.

        Raises:
            EngineError: a layer did not show its keys.
            SyncError: a worker holds other scales.
        """
        if not self._calibration:
            return
        asked = Request(
            uid="calibration/0",
            prompt_ids=np.array(self._calibration, dtype=np.int32),
            seed=0,
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
        )
        try:
            self._server.workers("watch_keys", len(self._calibration) - 1)
            self._server.generate([asked], version, self._timeout_s)
        finally:
            of_ranks = self._server.workers("largest_keys")
        if not of_ranks[0] or any(largest.keys() != of_ranks[0].keys() for largest in of_ranks):
            raise EngineError(f"version {version}: vLLM computed keys and values where they could not be measured")
        maxima = {name: torch.tensor([largest[name] for largest in of_ranks]).amax(0) for name in of_ranks[0]}
        self._key_scales = {name: power_of_two_scales(pair).tolist() for name, pair in maxima.items()}
        self._server.workers("scale_keys", self._key_scales)
        self._compare_keys(version)
        self._reset_prefixes()

    def _reset_prefixes(self) -> None:
        """Forget the keys and values of prompts that were computed with other weights or scales."""
        if not self._server.control("reset_prefix_cache"):
            raise EngineError("vLLM did not reset its prefix cache: it would reuse keys of other weights")

    def _check_names(self, names: set[str], manifest: Manifest) -> None:
        wanted = set(self._shapes) if manifest.complete else {record.name for record in manifest.tensors}
        missing, extra = sorted(wanted - names), sorted(names - set(self._shapes))
        if missing or extra:
            raise SyncError(f"version {manifest.version} is incomplete: missing {missing[:3]}, unexpected {extra[:3]}")

    def _place(self, manifest: Manifest, buckets: Iterable[Buffers]) -> dict[str, int]:
        """Send all tensors to the workers, each bucket while they place the one before. Return by name the fingerprint
        that each must have there."""
        expected: dict[str, int] = {}
        placing: Callable[[], object] = list
        try:
            for number, bucket in enumerate(buckets):
                for name, parts in bucket.items():
                    if name not in self._records or name in expected:
                        problem = "twice" if name in expected else "unexpected"
                        raise SyncError(f"version {manifest.version}: {name} came {problem}")
                    self._check_shapes(self._records[name], parts)
                buffer = self._shared[number % 2]
                places = iter(buffer.write(part for parts in bucket.values() for part in parts))
                items = [
                    (name, self._records[name].format, [next(places) for _ in parts]) for name, parts in bucket.items()
                ]
                placing()
                placing = self._server.start("put", {"file": buffer.address}, items, manifest.weight_max_code)
                for name, parts in bucket.items():
                    expected[name] = self._expected(self._records[name], parts)
                    if self._keeps_base:
                        self._base[name] = tuple(part if part.flags.owndata else part.copy() for part in parts)
        finally:
            placing()
        self._check_names(set(expected), manifest)
        self._check_complete(manifest)
        return expected

    def _check_complete(self, manifest: Manifest) -> None:
        if not manifest.complete:
            return
        for unplaced in self._server.workers("unplaced"):
            if unplaced:
                raise SyncError(
                    f"version {manifest.version} leaves parameters of vLLM's model without values: {unplaced[:3]}"
                )

    def _check_shapes(self, record: TensorRecord, parts: tuple[np.ndarray, ...]) -> None:
        shape = self._shapes[record.name]
        wanted: list[tuple[tuple[int, ...], np.dtype]] = [(shape, np.dtype(np.float32))]
        if record.format != "none":
            wanted = [(part.shape, part.dtype) for part in get_format(record.format).parts(shape)]
        if [(part.shape, part.dtype) for part in parts] != wanted or record.shape != shape:
            shapes = ", ".join(f"{part.dtype} {part.shape}" for part in parts)
            raise SyncError(f"{record.name} has shape {shapes}, expected {wanted[0][0]} in {record.format}")

    def _expected(self, record: TensorRecord, parts: tuple[np.ndarray, ...]) -> int:
        """Return the record's fingerprint, or that of the rounded values if the engine holds less than float32."""
        if record.format != "none" or self._dtype == torch.float32 or record.name in self._routers:
            return record.fingerprint
        values = torch.tensor(parts[0])
        if (sent := fingerprint(values)) != record.fingerprint:
            raise SyncError(f"{record.name} arrived as {sent:016x}, {record.fingerprint:016x} was sent")
        return fingerprint(values.to(self._dtype).float())

    def resident(self, name: str) -> tuple[np.ndarray, ...]:
        """Return a tensor as the workers hold it, in the form of Buffers: read back from the kernels' own memory,
        unless the verified version is kept here."""
        if name in self._base:
            return self._base[name]
        shards = []
        for of_rank in self._server.workers("resident", name):
            for start, stop, columns, wire in of_rank:
                arrays = tuple(np.frombuffer(data, dtype).reshape(shape) for dtype, shape, data in wire)
                shard = TensorShard(start=start, stop=stop, at=0, columns=tuple(columns) if columns else None)
                shards.append((shard, arrays))
        return join_shards(name, self._shapes[name], self._format_of(name), shards)

    def _format_of(self, name: str) -> Format | None:
        """Return the format of a tensor in the version that came last; None for full precision."""
        record = self._records[name]
        return None if record.format == "none" else get_format(record.format)

    def kernels(self) -> list[str]:
        """Return the kernels of the linears now: "fbgemm", "emulation of fp8", … or [] in full precision."""
        return sorted({name for names in self._server.workers("kernels") for name in names})

    # --- generation ------------------------------------------------------------------------------------------------

    def generate(
        self, requests: Sequence[Request], *, version: int, deadline_s: float | None = None
    ) -> list[Completion]:
        """Return completions in the order of the requests. Log-probs of greedy draws are 0, as in the torch engine.

        Args:
            deadline_s: seconds from now; unfinished requests are then aborted, and returned as far as they got.

        Raises:
            StaleWeights: the engine does not hold `version`, or holds other weights than before it slept.
            EngineError: a request does not fit the context, or vLLM failed.
        """
        check_requests(requests, held=self.version, version=version, context=self._context)
        self._check_awake()
        if self._slept:
            try:
                self._compare(version, self._fingerprints)
                self._compare_keys(version)
            except SyncError as error:
                self.version = None
                raise StaleWeights(f"the engine slept, and {error}") from None
            self._slept = False
        return self._server.generate(requests, version, deadline_s) if requests else []

    def cancel(self, uids: Collection[str]) -> None:
        """End these requests, which return the tokens drawn so far; see engines.protocol.Engine."""
        self._server.cancel(set(uids))

    # --- sleep, end ------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Release the GPU's memory; the weights move to the host. It has run on an H200.

        Raises:
            EngineError: the engine was made without sleep_mode.
        """
        if not self._sleep_mode:
            raise EngineError("the engine was made without sleep_mode, which vLLM offers on CUDA alone")
        if self._asleep:
            return
        self._server.control("sleep", 1)  # vLLM's level 1 keeps the weights, on the host
        self._asleep = self._slept = True

    def wake(self) -> None:
        """Undo `sleep`."""
        if self._asleep:
            self._server.control("wake_up")
            self._asleep = False

    def _check_awake(self) -> None:
        if self._asleep:
            raise EngineError("the engine is asleep: wake it first")

    def close(self) -> None:
        """End vLLM's processes. It can be called more than once."""
        self.version = None
        self._server.close()
        for buffer in self._shared:
            buffer.close()
