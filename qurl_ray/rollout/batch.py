"""The running sequences of an engine: which request sits in which row, what it drew, when it ends. No model here."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from qurl_ray.rollout.sampling import sample, uniforms
from qurl_ray.types import Completion, Finish, Request, SamplingParams


class RunningBatch:
    """Rows 0 … count-1 are running. All arrays are indexed by request; `_row_request` maps rows to requests."""

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
        # Draws differ by all of these but their limit; each kind is one call a step.
        unlimited = [replace(r.sampling, max_new_tokens=0) for r in requests]
        number = {params: kind for kind, params in enumerate(dict.fromkeys(unlimited))}
        self._kinds: list[SamplingParams] = list(number)
        self._kind = np.array([number[params] for params in unlimited])
        self._row_request = np.zeros(len(requests), dtype=np.int64)

    def admit(self, group: list[tuple[int, Request]]) -> torch.Tensor:
        """Give each (request index, request) the next free row; their numbers [len(group)]."""
        rows = np.arange(self.count, self.count + len(group))
        self._row_request[rows] = [index for index, _ in group]
        self.count += len(group)
        return torch.from_numpy(rows)

    def positions(self) -> torch.Tensor:
        """Position of each running row's last drawn token, the next one to be computed: [count]."""
        running = self.running()
        return torch.from_numpy(self._prompt_lengths[running] + self._drawn[running] - 1)

    def last_tokens(self) -> torch.Tensor:
        """[count]"""
        running = self.running()
        return torch.from_numpy(self._tokens[running, self._drawn[running] - 1]).long()

    def draw(self, logits_BV: torch.Tensor, first: int = 0) -> None:
        """Draw one token for rows first … count-1 from their logits."""
        running = self.running()[first:]
        uniform_B = uniforms(self._seeds[running], self._drawn_before[running] + self._drawn[running])
        for kind, params in enumerate(self._kinds):
            chosen = np.flatnonzero(self._kind[running] == kind)
            if not len(chosen):
                continue
            part = logits_BV if len(chosen) == len(running) else logits_BV[torch.from_numpy(chosen)]
            drawn = sample(part, params, uniform_B[torch.from_numpy(chosen)])
            tokens, logprobs = (found.cpu() for found in drawn)
            who = running[chosen]
            self._tokens[who, self._drawn[who]] = tokens.numpy()
            self._logprobs[who, self._drawn[who]] = logprobs.numpy()
            if not params.ignore_eos:
                self.end(who[np.isin(tokens.numpy(), params.stop_ids)], "stop")
        self._drawn[running] += 1

    def end(self, indices: Iterable[int], finish: Finish) -> None:
        """These requests draw no more; their rows go with the next `retire`."""
        for index in indices:
            self._finish[index], self._ended[index] = finish, True

    def running(self) -> np.ndarray:
        """Indices of the requests that have a row: [count]."""
        return self._row_request[: self.count]

    def retire(self) -> tuple[list[int], list[int]]:
        """Drop finished rows. Returns (sources, targets): rows to copy so that the running ones stay in front."""
        running = self.running()
        done = self._ended[running] | (self._drawn[running] >= self._limits[running])
        left = int((~done).sum())
        targets = np.flatnonzero(done[:left])
        sources = left + np.flatnonzero(~done[left:])
        self._row_request[targets] = self._row_request[sources]
        self.count = left
        return sources.tolist(), targets.tolist()

    def completions(self) -> list[Completion]:
        """One per request, in the order asked."""
        return [
            Completion(
                uid=request.uid,
                token_ids=self._tokens[i, : self._drawn[i]].copy(),
                logprobs=self._logprobs[i, : self._drawn[i]].copy(),
                versions=np.full(self._drawn[i], self._version, dtype=np.int32),
                finish=self._finish[i],
            )
            for i, request in enumerate(self._requests)
        ]
