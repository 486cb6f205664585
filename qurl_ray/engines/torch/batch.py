"""The running sequences of an engine: the row, the drawn tokens and the end of each request. No model here."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from qurl_ray.engines.torch.sampling import noise_keys, sample
from qurl_ray.policy.logprobs import log_softmax
from qurl_ray.types import Completion, Finish, Request, SamplingParams

_Rows = slice | np.ndarray
"""Rows of a batch, from one to another or by their numbers."""
_ALL = slice(None)


class RunningBatch:
    """A batch of requests, of which rows 0 … count-1 are running.

    All arrays are indexed by request; `_row_request` maps rows to requests.
    """

    def __init__(self, requests: Sequence[Request], version: int) -> None:
        self.count = 0
        self._requests, self._version = requests, version
        longest = max(r.sampling.max_new_tokens for r in requests)
        self._tokens = np.zeros((len(requests), longest), dtype=np.int32)
        self._logprobs = np.zeros((len(requests), longest), dtype=np.float32)
        self._drawn = np.zeros(len(requests), dtype=np.int64)
        self._drawn_before = np.array([r.drawn for r in requests])
        self._finish: list[Finish] = ["length"] * len(requests)
        self._ended = np.zeros(len(requests), dtype=bool)
        self._prompt_lengths = np.array([len(r.prompt_ids) for r in requests])
        self._seeds = np.array([r.seed for r in requests], dtype=np.uint64)
        self._limits = np.array([r.sampling.max_new_tokens for r in requests])
        # Draws depend on all parameters but the limit; each different set of them is one call per step.
        unlimited = [replace(r.sampling, max_new_tokens=0) for r in requests]
        number = {params: kind for kind, params in enumerate(dict.fromkeys(unlimited))}
        self._kinds: list[SamplingParams] = list(number)
        self._kind = np.array([number[params] for params in unlimited])
        self._row_request = np.zeros(len(requests), dtype=np.int64)
        self._adapters = [r.adapter for r in requests]
        self._routes: list[list[np.ndarray]] = [[] for _ in requests]
        self._judged, self._agreed = np.zeros((2, len(requests)), dtype=np.int64)

    def admit(self, group: list[tuple[int, Request]]) -> torch.Tensor:
        """Give each (request index, request) the next free row; return the row numbers [len(group)]."""
        rows = np.arange(self.count, self.count + len(group))
        self._row_request[rows] = [index for index, _ in group]
        self.count += len(group)
        return torch.from_numpy(rows)

    def positions(self) -> torch.Tensor:
        """Position of each running row's last drawn token, which is computed next, [count]."""
        running = self.running()
        return torch.from_numpy(self._prompt_lengths[running] + self._drawn[running] - 1)

    def last_tokens(self) -> torch.Tensor:
        """Last drawn token of each running row, int64 [count]."""
        running = self.running()
        return torch.from_numpy(self._tokens[running, self._drawn[running] - 1]).long()

    def adapters(self) -> list[str]:
        """Name of the adapter of each running row."""
        return [self._adapters[index] for index in self.running()]

    def draw(self, logits_BV: torch.Tensor, rows: _Rows = _ALL) -> None:
        """Draw one token for each of these rows from their logits."""
        running = self.running()[rows]
        for params, chosen, tokens, logprobs in self._sampled(logits_BV, running):
            who = running[chosen]
            self._tokens[who, self._drawn[who]] = tokens
            self._logprobs[who, self._drawn[who]] = logprobs
            if not params.ignore_eos:
                self.end(who[np.isin(tokens, params.stop_ids)], "stop")
        self._drawn[running] += 1

    def draft(self, logits_BV: torch.Tensor, ahead: int) -> torch.Tensor:
        """Return the token that each running row would draw from these logits as its next one but `ahead`, with the
        noise of that token, int64 [count]. Nothing is noted."""
        drafts = np.zeros(self.count, dtype=np.int64)
        for _, chosen, tokens, _ in self._sampled(logits_BV, self.running(), ahead):
            drafts[chosen] = tokens
        return torch.from_numpy(drafts)

    def verify(self, logits_BTV: torch.Tensor, drafts_BK: torch.Tensor) -> np.ndarray:
        """Draw up to T = K + 1 tokens for each running row: those that agree with its drafts, and the next one.

        Args:
            logits_BTV: after the last token and after each draft; those after a wrong draft mean nothing.

        Returns:
            Number of tokens drawn, int64 [count].
        """
        before, rows = self._drawn[self.running()], np.arange(self.count)
        for place in range(logits_BTV.shape[1]):
            self.draw(logits_BTV[torch.from_numpy(rows), place], rows)
            if place == drafts_BK.shape[1]:
                break
            rows = rows[~self._done()[rows]]
            who = self.running()[rows]
            agreed = self._tokens[who, self._drawn[who] - 1] == drafts_BK[:, place].numpy()[rows]
            self._judged[who] += 1
            self._agreed[who] += agreed
            rows = rows[agreed]
            if not len(rows):
                break
        return self._drawn[self.running()] - before

    def left(self) -> int:
        """Most tokens that a running row may still draw."""
        running = self.running()
        return int((self._limits[running] - self._drawn[running]).max())

    def drafts(self) -> tuple[int, int]:
        """Return how many drafts were compared with the token drawn in their place so far, and how many agreed."""
        return int(self._judged.sum()), int(self._agreed.sum())

    def _sampled(
        self, logits_BV: torch.Tensor, running: np.ndarray, ahead: int = 0
    ) -> Iterator[tuple[SamplingParams, np.ndarray, np.ndarray, np.ndarray]]:
        """Yield (parameters, indices into `running`, their tokens and log-probs) for each different set of
        parameters."""
        keys_B = noise_keys(self._seeds[running], self._drawn_before[running] + self._drawn[running] + ahead)
        for kind, params in enumerate(self._kinds):
            chosen = np.flatnonzero(self._kind[running] == kind)
            if not len(chosen):
                continue
            part = logits_BV if len(chosen) == len(running) else logits_BV[torch.from_numpy(chosen)]
            drawn = sample(part, params, keys_B[chosen])
            tokens, logprobs = (tensor.cpu().numpy() for tensor in drawn)
            yield params, chosen, tokens, logprobs

    def record(self, index: int, routes_TLk: np.ndarray) -> None:
        """Note the experts of a request's next tokens (AnswerTokens.routes)."""
        self._routes[index].append(routes_TLk)

    def routes_of(self, index: int) -> np.ndarray | None:
        """Return the experts of a request's tokens so far; None if none were noted."""
        return np.concatenate(self._routes[index]) if self._routes[index] else None

    def end(self, indices: Iterable[int], finish: Finish) -> None:
        """End these requests. The next `retire` drops their rows."""
        for index in indices:
            self._finish[index], self._ended[index] = finish, True

    def running(self) -> np.ndarray:
        """Indices of the requests that have a row, [count]."""
        return self._row_request[: self.count]

    def finished(self) -> list[tuple[int, int]]:
        """Return (row, request index) of the rows that `retire` will drop."""
        running = self.running()
        return [(int(row), int(running[row])) for row in np.flatnonzero(self._done())]

    def row_of(self, index: int) -> tuple[Request, np.ndarray, Finish]:
        """Return a request, what it has drawn so far, and how it ends."""
        return self._requests[index], self._tokens[index, : self._drawn[index]], self._finish[index]

    def _done(self) -> np.ndarray:
        running = self.running()
        return self._ended[running] | (self._drawn[running] >= self._limits[running])

    def retire(self) -> tuple[list[int], list[int]]:
        """Drop finished rows. Return (sources, targets): rows to copy so that the running ones stay in front."""
        done = self._done()
        left = int((~done).sum())
        targets = np.flatnonzero(done[:left])
        sources = left + np.flatnonzero(~done[left:])
        self._row_request[targets] = self._row_request[sources]
        self.count = left
        return sources.tolist(), targets.tolist()

    def completions(self) -> list[Completion]:
        """Return one completion per request, in the order of the requests."""
        return [
            Completion(
                uid=request.uid,
                token_ids=self._tokens[i, : self._drawn[i]].copy(),
                logprobs=self._logprobs[i, : self._drawn[i]].copy(),
                versions=np.full(self._drawn[i], self._version, dtype=np.int32),
                finish=self._finish[i],
                routes=self.routes_of(i),
                drafted=int(self._judged[i]),
                agreed=int(self._agreed[i]),
            )
            for i, request in enumerate(self._requests)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One drawn token."""

    token: int
    logprob: float | None = None
    """Log-prob under the policy itself, at temperature 1 and not truncated, in nats; None if it was not requested."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, log-prob) of the likeliest tokens, the likeliest first, as many as were requested."""


class OpenBatch(RunningBatch):
    """A batch whose requests are not known in advance. Each gets one of a fixed number of places, which are reused.

    Example:
        place = batch.enter(request, top=None)
        engine.step(batch, [(place, request)])
        news = batch.news()

    Args:
        places: number of requests at a time, as many as there are slots.
        longest: largest number of tokens of an answer.
    """

    def __init__(self, *, places: int, longest: int, version: int) -> None:
        nothing = SamplingParams(max_new_tokens=longest)
        ids = np.zeros(1, dtype=np.int32)
        super().__init__([Request(uid="", prompt_ids=ids, seed=0, sampling=nothing)] * places, version)
        self._free = list(range(places))
        self._top = np.full(places, -1)
        self._new: dict[int, list[Draw]] = {}
        self._gone: dict[int, Finish] = {}
        self.finite = True
        """True if the log-probs of all draws were finite; if not, the engine is broken."""

    @property
    def free(self) -> int:
        """Number of places that no request has."""
        return len(self._free)

    def enter(self, request: Request, *, top: int | None) -> int:
        """Give a place to a request, which the next step must admit. Return the place.

        Args:
            top: number of likeliest tokens to report with each draw; None omits the drawn token's log-prob, too.
        """
        unlimited = replace(request.sampling, max_new_tokens=0)
        if unlimited not in self._kinds:
            used = set(np.delete(self._kind, self._free).tolist())
            self._kinds = [kind if number in used else unlimited for number, kind in enumerate(self._kinds)]
            if unlimited not in self._kinds:
                self._kinds.append(unlimited)
        place = self._free.pop()
        self._kind[place] = self._kinds.index(unlimited)
        self._drawn[place], self._drawn_before[place] = 0, request.drawn
        self._finish[place], self._ended[place] = "length", False
        self._prompt_lengths[place], self._seeds[place] = len(request.prompt_ids), request.seed
        self._limits[place] = request.sampling.max_new_tokens
        self._top[place] = -1 if top is None else top
        self._adapters[place] = request.adapter
        return place

    def draw(self, logits_BV: torch.Tensor, rows: _Rows = _ALL) -> None:
        who = self.running()[rows].copy()
        super().draw(logits_BV, rows)
        tokens = self._tokens[who, self._drawn[who] - 1]
        self.finite &= bool(np.isfinite(self._logprobs[who, self._drawn[who] - 1]).all())
        # Log-probs of the drawn token and of the likeliest ones, by place, where they were requested.
        requested: dict[int, tuple[float, tuple[tuple[int, float], ...]]] = {}
        asked = np.flatnonzero(self._top[who] >= 0)
        if len(asked):
            logprobs_AV = log_softmax(logits_BV[torch.from_numpy(asked)], 1.0).cpu()
            own = logprobs_AV.gather(1, torch.from_numpy(tokens[asked]).long()[:, None])[:, 0].tolist()
            counts = self._top[who[asked]].tolist()
            values, ids = (top.tolist() for top in logprobs_AV.topk(min(max(counts), logprobs_AV.shape[1]), dim=-1))
            likely = zip(who[asked].tolist(), own, counts, ids, values, strict=True)
            for place, drawn, count, likeliest, logprobs in likely:
                requested[place] = (drawn, tuple(zip(likeliest[:count], logprobs[:count], strict=True)))
        for place, token in zip(who.tolist(), tokens.tolist(), strict=True):
            logprob, top = requested.get(place, (None, ()))
            self._new.setdefault(place, []).append(Draw(token=token, logprob=logprob, top=top))

    def retire(self) -> tuple[list[int], list[int]]:
        before = self.running().tolist()
        moved = super().retire()
        if self.count < len(before):
            for place in set(before).difference(self.running().tolist()):
                self._gone[place] = self._finish[place]
                self._free.append(place)
        return moved

    def news(self) -> list[tuple[int, list[Draw], Finish | None]]:
        """Return (place, tokens drawn, end or None) of what changed since the last call. Places that ended are free."""
        places = [*self._new, *(place for place in self._gone if place not in self._new)]
        news = [(place, self._new.get(place, []), self._gone.get(place)) for place in places]
        self._new, self._gone = {}, {}
        return news
