"""The embedded engine: a transformers model in this process, with quantized block linears and continuous batching.

It is batch-invariant: a request's tokens and log-probs do not depend on other requests in the batch, on the number of
slots, or on whether its prompt was prefilled for it alone (docs/concepts.md). A prompt shared by requests is computed
once.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from qurl_ray.engines.protocol import Buffers
from qurl_ray.engines.requests import check_requests
from qurl_ray.engines.torch.adapters import Adapter, RowAdapters
from qurl_ray.engines.torch.batch import RunningBatch
from qurl_ray.engines.torch.decoder import Apply, Decoder, head_of, knows, through_transformers
from qurl_ray.engines.torch.drafts import MEASURED, Drafter
from qurl_ray.engines.torch.graphs import Capture, DecodeGraphs, why_not
from qurl_ray.engines.torch.kept import KeptKeys, KeysPool
from qurl_ray.engines.torch.slots import Cache, Fp8SlotCache, SlotCache, WholeSequences
from qurl_ray.engines.torch.weights import EngineWeights
from qurl_ray.errors import EngineError, StaleWeights
from qurl_ray.policy.adapters import SavedAdapter, add_adapters, check_shapes
from qurl_ray.policy.attention import QUERY_CHUNK
from qurl_ray.policy.experts import mixtures, route_dtype
from qurl_ray.policy.kv import KVScales, MaximaRecorder, calibration_ids
from qurl_ray.policy.load import context_length, empty_model
from qurl_ray.policy.logprobs import log_softmax
from qurl_ray.policy.settings import head_dim
from qurl_ray.quant.equalize import Factors, equalized
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.linear import weight_max_code
from qurl_ray.types import Completion, Manifest, PolicySpec, Request

_PREFILL_TOKENS = 8192  # limit of padded tokens in one prefill pass, which bounds its memory
_FEW_ROWS = range(2, 64)
_PACK_CODES_AFTER = 128
"""Decode steps of _FEW_ROWS after which codes are packed. This takes as long as 75 (1.1B) to 300 (135M) such steps save
(without AMX, docs/LOG.md); steps of more rows, or of one, are as fast without."""
_ADMIT_SHARE = 8  # new requests are admitted when an eighth of the slots is free


class TorchEngine:
    """Engine on a transformers model in this process; see engines.protocol.Engine.

    Args:
        slots: number of sequences decoded at a time.
        kernel: "auto" uses the device's integer kernel where there is one, "emulation" the float32 reference.
        kv_cache: "full", or "fp8", which holds keys and values as policy.kv rounds them, with scales of the weights
            last loaded.
        device: device of the whole engine.
        dtype: type of activations and of unquantized tensors, which must then be sent in no more bits.
        kept_bytes: limit of keys and values of requests that may be continued.
        capture: makes the object that captures decode steps, for one set of weights and one cache (rollout.graphs).
        routes: note the experts of each token (AnswerTokens.routes).
        route_weights: note their weights, too.
        drafts: draft tokens with codes where weights arrive in full precision (engines.torch.drafts).

    Raises:
        EngineError: decode steps of this model cannot be captured as requested.
    """

    def __init__(
        self,
        spec: PolicySpec,
        *,
        slots: int,
        kernel: str = "auto",
        kv_cache: str = "full",
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        kept_bytes: int = 0,
        capture: Callable[[], Capture] | None = None,
        routes: bool = False,
        route_weights: bool = False,
        drafts: bool = False,
    ) -> None:
        self.version: int | None = None
        with torch.device(device):
            self._model = empty_model(spec, dtype).requires_grad_(False)
        if spec.adapters:
            add_adapters(self._model, spec.adapters)
            self._model.requires_grad_(False)
        self._device = self._model.device
        self._mixtures, self._route_weights = mixtures(self._model) if routes else [], route_weights
        self._context = context_length(spec)
        self._slots = slots
        self._emulate = kernel == "emulation"
        self._weights = EngineWeights(self._model, emulate=self._emulate, fuse=knows(self._model))
        if capture and (reason := why_not(self._model)):
            raise EngineError(reason)
        self._decoder: Decoder | None = None
        self._adapters = RowAdapters()
        self._head: Apply
        self._cache: SlotCache | None = None
        self._capture = capture
        self._graphs: DecodeGraphs | None = None
        """Captured steps of the present decoder and cache; dropped when either is replaced."""
        self._rounds_cache = kv_cache == "fp8"
        self._kv_scales: Mapping[int, KVScales] | None = None
        self._kept = KeysPool(kept_bytes)
        self._cancelled: set[str] = set()
        self._steps_of_few = 0
        """Decode steps of _FEW_ROWS since the weights were loaded."""
        self._drafter = Drafter(emulate=self._emulate) if drafts else None

    # --- weights -----------------------------------------------------------------------------------------------

    def weight_max_code(self, format_name: str) -> int:
        if format_name == "none":
            return 0
        fmt = get_format(format_name)
        return fmt.weight_max if self._emulate else weight_max_code(fmt, self._device)

    def load(self, manifest: Manifest, buckets: Iterable[Buffers]) -> None:
        self.version = self._graphs = None  # STALE until every tensor is verified
        self._kept.clear()
        self._weights.load(manifest, buckets)
        self._steps_of_few = 0
        self._adapters.begin(self._model)
        self._decoder = Decoder(self._model, self._adapters) if knows(self._model) else None
        self._head = head_of(self._model)
        if self._rounds_cache:
            self._cache, self._kv_scales = None, self._measure_cache()
        if self._drafter:
            self._drafter.drop()
            if not self._weights.kernels():  # codes need no drafts
                self._adapters.choose([""])
                scratch = partial(self._new_cache, MEASURED, MEASURED)
                self._drafter.load(self._model, self._forward, self._head, scratch)
        self.version = manifest.version

    def put_adapter(self, name: str, saved: SavedAdapter, factors: Mapping[str, Factors]) -> None:
        """Hold an adapter beside the weights, for requests that name it, in the place of one of the same name, which no
        request may be using. Another load forgets it.

        Args:
            factors: of equalization, by module, with which the base was loaded.

        Raises:
            EngineError: this model, or this engine, cannot have adapters by name.
            ConfigError: the adapter is of a model of another shape.
        """
        if self._decoder is None or self._capture:
            raise EngineError("adapters by name need a model that the engine's decoder knows, and no captured steps")
        if experts := [name for name in saved.parameters if ".experts." in name]:
            raise EngineError(f"{experts[0]}: adapters by name are not for experts, whose rows come from many requests")
        check_shapes(self._model, saved)
        parameters = dict(equalized(saved.parameters.items(), factors))
        self._adapters.put(name, Adapter.saved(parameters, saved.adapters.scaling, self._device))

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter, which no request may be using."""
        self._adapters.drop(name)

    @torch.inference_mode()
    def _measure_cache(self) -> Mapping[int, KVScales]:
        """Return the scales of keys and values for the present weights, by layer."""
        ids = calibration_ids(self._model.config)
        self._adapters.choose([""])
        recorder = MaximaRecorder(ids)
        self._forward(torch.tensor([ids], device=self._device), self._arange(len(ids))[None], recorder)
        return recorder.scales()

    def resident(self, name: str) -> tuple[np.ndarray, ...]:
        return self._weights.resident(name)

    def kernels(self) -> list[str]:
        emulated = ["emulation of fp8 keys and values"] if self._rounds_cache else []
        drafts = self._drafter.kernels() if self._drafter else []
        return sorted([*self._weights.kernels(), *drafts, *emulated])

    def sleep(self) -> None:
        """Release keys and values. The weights stay: they are quantized, and small compared to a learner's states."""
        self._cache = self._graphs = None
        self._kept.clear()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # otherwise this process would keep the memory

    def wake(self) -> None:
        """Do nothing: the next call makes a cache."""

    def close(self) -> None:
        self.version = self._cache = self._graphs = self._drafter = None
        self._kept.clear()

    # --- generation --------------------------------------------------------------------------------------------

    def cancel(self, uids: Collection[str]) -> None:
        self._cancelled |= set(uids)  # one assignment: safe from another thread

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], *, version: int, deadline_s: float | None = None
    ) -> list[Completion]:
        check_requests(requests, held=self.version, version=version, context=self._context)
        if not requests:
            return []
        ends = time.monotonic() + deadline_s if deadline_s is not None else math.inf
        self._cancelled = set()  # earlier cancels do not apply to this call
        # The longest first: requests left at the end, where slots stay empty, are short.
        order = sorted(range(len(requests)), key=lambda i: -requests[i].sampling.max_new_tokens)
        waiting = deque((index, requests[index]) for index in order)
        longest = max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in requests)
        if any(r.continues for r in requests) and self._cache and self._cache.length < longest:
            longest = min(2 * longest, self._context)  # else the cache would be made again at every turn
        cache = self.reserve(min(self._slots, len(requests)), longest)
        batch = RunningBatch(requests, version)
        while waiting or batch.count:
            if time.monotonic() > ends:
                batch.end([*batch.running(), *(index for index, _ in waiting)], "deadline")
                break
            if self._cancelled:
                uids, self._cancelled = self._cancelled, set()
                unfinished = [*batch.running(), *(index for index, _ in waiting)]
                batch.end([index for index in unfinished if requests[index].uid in uids], "cancelled")
                self._retire(cache, batch)
                waiting = deque(item for item in waiting if item[1].uid not in uids)
            admitted: list[tuple[int, Request]] = []
            free = cache.slots - batch.count
            # Several at a time, because a prefill of one prompt takes nearly as long as a prefill of a few.
            if not batch.count or free >= min(len(waiting), -(-cache.slots // _ADMIT_SHARE)):
                admitted = [waiting.popleft() for _ in range(min(len(waiting), free))]
            self.step(batch, admitted)
        completions = batch.completions()
        if not all(np.isfinite(completion.logprobs).all() for completion in completions):
            self._cache = self._graphs = None  # nan in a slot would outlive its request: 0 · nan is nan
            self._kept.clear()
        return completions

    @torch.inference_mode()
    def score(self, texts: Sequence[tuple[np.ndarray, np.ndarray]], *, temperature: float = 1.0) -> list[np.ndarray]:
        """Return the log-probs that this engine gives to answers of any origin: those of `generate`, had it drawn them.

        Args:
            texts: token ids of (prompt, answer), int32, neither of them empty.
            temperature: above 0.

        Returns:
            float32 [answer length] each.
        """
        ids = [torch.from_numpy(np.concatenate(text)).long() for text in texts]
        scored: dict[int, np.ndarray] = {}
        self._adapters.choose([""])
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        while order:
            rows = max(1, min(len(order), _PREFILL_TOKENS // len(ids[order[-1]])))
            order, group = order[:-rows], order[-rows:]
            ids_BT = torch.nn.utils.rnn.pad_sequence([ids[index] for index in group], batch_first=True)
            cache = WholeSequences(self._kv_scales)
            states_BTd = self._forward(ids_BT.to(self._device), self._arange(ids_BT.shape[1])[None], cache)
            for states_Td, index in zip(states_BTd, group, strict=True):
                answer = ids[index][len(texts[index][0]) :]
                states_Td = states_Td[len(texts[index][0]) - 1 :][: len(answer)]
                logprobs_TV = log_softmax(self._head(states_Td), temperature)
                scored[index] = logprobs_TV.gather(1, answer.to(self._device)[:, None])[:, 0].cpu().numpy()
        return [scored[index] for index in range(len(ids))]

    def reserve(self, slots: int, length: int) -> SlotCache:
        """Return a cache for `slots` sequences of `length` tokens, for `step`; the last one if it is large enough.

        Raises:
            EngineError: there is not enough memory.
        """
        if self._cache is None or self._cache.slots < slots or self._cache.length < length:
            self._cache = self._graphs = None  # freed first, so that there are never two
            try:
                self._cache = self._new_cache(slots, length)
            except RuntimeError as error:
                raise EngineError(f"no memory for {slots} slots of {length} tokens, use fewer: {error}") from None
        if self._capture and not self._graphs:
            assert self._decoder, "captured operations are the decoder's"
            self._graphs = DecodeGraphs(self._decoder, self._cache, self._capture())
        return self._cache

    def _new_cache(self, slots: int, length: int) -> SlotCache:
        config = self._model.config
        make = partial(Fp8SlotCache, self._kv_scales) if self._kv_scales else SlotCache
        return make(
            layers=config.num_hidden_layers,
            slots=slots,
            kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=head_dim(config),
            length=length,
            dtype=self._model.dtype,
            device=self._device,
        )

    @torch.inference_mode()
    def step(self, batch: RunningBatch, admitted: list[tuple[int, Request]], *, cancelled: Sequence[int] = ()) -> None:
        """Draw one token for each running request, with right drafts more, and two for each admitted one. `generate`
        makes steps until nothing is left. A caller of single steps must have checked the requests and called `reserve`.

        Args:
            admitted: (index in the batch, request), not more than there are free slots.
            cancelled: indices in the batch of requests that end before this step.

        Raises:
            StaleWeights: weights were other ones in the layout of a faster kernel; the engine has no version now.
        """
        cache = self._cache
        assert cache, "a batch has slots"
        if cancelled:
            batch.end(cancelled, "cancelled")
            self._retire(cache, batch)
        try:
            resumed = {i: kept for i, r in admitted if r.drawn and (kept := self._kept.take(r.uid, r.prompt_ids))}
            for group in _prefill_groups([item for item in admitted if item[0] not in resumed]):
                self._prefill(cache, batch, group)
            for group in _extend_groups([item for item in admitted if item[0] in resumed], resumed):
                self._extend(cache, batch, group, [resumed[index] for index, _ in group])
            self._decode(cache, batch)
        except StaleWeights:  # the weights did not survive packing
            self.version = None
            raise

    def _prefill(self, cache: SlotCache, batch: RunningBatch, group: list[tuple[int, Request]]) -> None:
        """Compute each different prompt once, fill a row per request, and draw the first tokens."""
        different = {_prompt_key(r): r for _, r in group}
        prompts = [r.prompt_ids for r in different.values()]
        place = {key: number for number, key in enumerate(different)}
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.from_numpy(prompt)
        sources = torch.tensor([place[_prompt_key(r)] for _, r in group])
        cache.prefill(batch.admit(group), sources)
        self._adapters.choose([r.adapter for r in different.values()])
        hidden = self._forward(ids.to(self._device), self._arange(ids.shape[1])[None], cache)
        logits = self._head(hidden[torch.arange(len(prompts)), lengths - 1])
        if (routes_BTLk := self._routes(*ids.shape)) is not None:
            for (index, request), source in zip(group, sources.tolist(), strict=True):
                batch.record(index, routes_BTLk[source, : len(request.prompt_ids)])
        batch.draw(logits[sources], slice(batch.count - len(group), None))
        self._retire(cache, batch)

    def _extend(
        self, cache: SlotCache, batch: RunningBatch, group: list[tuple[int, Request]], kept: list[KeptKeys]
    ) -> None:
        """Give requests rows with keys that were kept, compute the tokens behind them, and draw a token of each."""
        rows = batch.admit(group).tolist()
        for row, prefix in zip(rows, kept, strict=True):
            cache.write(row, prefix.keys, prefix.values)
        starts = torch.tensor([len(prefix.token_ids) for prefix in kept])
        news = [torch.from_numpy(r.prompt_ids[start:]) for (_, r), start in zip(group, starts.tolist(), strict=True)]
        lengths = torch.tensor([len(new) for new in news])
        ids = torch.nn.utils.rnn.pad_sequence(news, batch_first=True).long()
        # Keys of padding come to lie behind a row's end, where its next tokens replace them before they are seen.
        positions = (starts[:, None] + torch.arange(ids.shape[1])).clamp(max=cache.length - 1)
        cache.extend(rows[0], positions)
        self._adapters.choose([r.adapter for _, r in group])
        hidden = self._forward(ids.to(self._device), positions.to(self._device), cache)
        if (routes_BTLk := self._routes(*ids.shape)) is not None:
            for row, ((index, _), prefix) in enumerate(zip(group, kept, strict=True)):
                assert prefix.routes is not None
                batch.record(index, prefix.routes)
                batch.record(index, routes_BTLk[row, : lengths[row]])
        batch.draw(self._head(hidden[torch.arange(len(group)), lengths - 1]), slice(rows[0], None))
        self._retire(cache, batch)

    def _decode(self, cache: SlotCache, batch: RunningBatch) -> None:
        """Draw one more token for every running row."""
        if not batch.count:
            return
        if batch.count in _FEW_ROWS:
            self._steps_of_few += 1
            if self._steps_of_few == _PACK_CODES_AFTER:
                self._weights.pack()
        last, positions = batch.last_tokens(), batch.positions()
        if self._drafter and (count := self._drafter.count(batch.count, batch.left() - 1)):
            self._draft_and_verify(cache, batch, count)
            return
        self._adapters.choose(batch.adapters())
        if self._graphs:
            hidden = self._graphs(last, positions)
        else:
            cache.decode(positions)
            hidden = self._forward(last[:, None].to(self._device), positions[:, None].to(self._device), cache)
        if (routes_BTLk := self._routes(batch.count, 1)) is not None:
            for index, routes_TLk in zip(batch.running().tolist(), routes_BTLk, strict=True):
                batch.record(index, routes_TLk)
        batch.draw(self._head(hidden[:, 0]))
        self._retire(cache, batch)

    def _draft_and_verify(self, cache: SlotCache, batch: RunningBatch, count: int) -> None:
        """Draft `count` tokens for every running row, and draw those that agree, and the one after them, in a single
        pass, which also replaces the drafts' keys. Keys behind a row's end are replaced before they are seen."""
        assert self._drafter
        ids = batch.last_tokens()[:, None]
        positions = (batch.positions()[:, None] + torch.arange(count + 1)).clamp(max=cache.length - 1)
        for ahead in range(count):
            cache.decode(positions[:, ahead])
            logits = self._drafter(ids[:, -1:], positions[:, ahead : ahead + 1], cache)
            ids = torch.cat([ids, batch.draft(logits, ahead)[:, None]], dim=1)
        cache.extend(0, positions)
        self._adapters.choose(batch.adapters())
        hidden = self._forward(ids, positions, cache)
        routes_BTLk, judged = self._routes(*ids.shape), batch.drafts()
        drawn = batch.verify(self._head(hidden), ids[:, 1:])
        if routes_BTLk is not None:
            for index, routes_TLk, taken in zip(batch.running().tolist(), routes_BTLk, drawn, strict=True):
                batch.record(index, routes_TLk[:taken])
        self._drafter.learn(*(now - before for now, before in zip(batch.drafts(), judged, strict=True)))
        self._retire(cache, batch)

    def _routes(self, rows: int, width: int) -> np.ndarray | None:
        """Return the experts of the last pass, as AnswerTokens.routes has them, [rows, width, layers with experts, k or
        2 k]; None if they are not noted."""
        if not self._mixtures:
            return None
        taken = [mixture.taken for mixture in self._mixtures if mixture.taken is not None]
        routes_NLx = torch.stack([experts_Nk for experts_Nk, _ in taken], dim=1)
        if self._route_weights:
            weights_NLk = torch.stack([weights_Nk for _, weights_Nk in taken], dim=1)
            routes_NLx = torch.cat([routes_NLx.float(), weights_NLk], dim=-1)
        dtype = route_dtype(len(self._mixtures[0].experts), weights=self._route_weights)
        return routes_NLx.unflatten(0, (rows, width)).cpu().numpy().astype(dtype)

    def _arange(self, count: int) -> torch.Tensor:
        return torch.arange(count, device=self._device)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        if self._decoder:
            return self._decoder(ids, positions, cache)
        return through_transformers(self._model, ids, positions, cache)

    def _retire(self, cache: SlotCache, batch: RunningBatch) -> None:
        for row, index in batch.finished():
            request, drawn, finish = batch.row_of(index)
            length = len(request.prompt_ids) + len(drawn) - 1  # the last token has no keys yet
            if (
                request.continues
                and not request.adapter
                and finish in ("stop", "length")
                and self._kept.has_room(cache.bytes_of(length))
            ):
                keys, values = cache.read(row, length)
                ids = np.concatenate([request.prompt_ids, drawn[:-1]])
                kept = KeptKeys(token_ids=ids, keys=keys, values=values, routes=batch.routes_of(index))
                self._kept.put(request.uid, kept)
        sources, targets = batch.retire()
        if sources:
            cache.move(sources, targets, int(batch.positions().max()) + 1)


def _prompt_key(request: Request) -> tuple[str, bytes]:
    """Return what the keys and values of a prompt depend on."""
    return request.adapter, request.prompt_ids.tobytes()


def _prefill_groups(admitted: list[tuple[int, Request]]) -> list[list[tuple[int, Request]]]:
    """Split requests so that one pass holds at most _PREFILL_TOKENS padded tokens of different prompts."""
    groups: list[list[tuple[int, Request]]] = []
    different: set[tuple[str, bytes]] = set()
    longest = 0
    for item in admitted:
        prompt = item[1].prompt_ids
        grown, length = different | {_prompt_key(item[1])}, max(longest, len(prompt))
        if not groups or len(grown) * length > _PREFILL_TOKENS:
            groups.append([])
            grown, length = {_prompt_key(item[1])}, len(prompt)
        groups[-1].append(item)
        different, longest = grown, length
    return groups


def _extend_groups(items: list[tuple[int, Request]], kept: Mapping[int, KeptKeys]) -> list[list[tuple[int, Request]]]:
    """Split requests whose keys were kept so that one pass holds at most _PREFILL_TOKENS padded tokens, and no more
    scores of attention than a prompt of as many."""
    groups: list[list[tuple[int, Request]]] = []
    longest = 0

    def new_tokens(item: tuple[int, Request]) -> int:
        return len(item[1].prompt_ids) - len(kept[item[0]].token_ids)

    for item in sorted(items, key=new_tokens):
        length, count = len(item[1].prompt_ids), len(groups[-1]) + 1 if groups else 1
        new, longest = new_tokens(item), max(longest, length)
        scores = count * min(new, QUERY_CHUNK) * longest
        if not groups or count * new > _PREFILL_TOKENS or scores > _PREFILL_TOKENS * QUERY_CHUNK:
            groups.append([])
            longest = length
        groups[-1].append(item)
    return groups
