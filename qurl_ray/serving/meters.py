"""Metrics of serving, as Ray metrics: Ray's agents export them beside Ray Serve's own (docs/serving.md)."""

import time
from collections.abc import Mapping
from functools import partial

from ray.serve import metrics

_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]
_TAGS = ("version",)


class Meters:
    """Metrics of one replica. The tag `version` is the model's full name, name@fingerprint."""

    def __init__(self) -> None:
        counter, gauge = partial(metrics.Counter, tag_keys=_TAGS), partial(metrics.Gauge, tag_keys=_TAGS)
        histogram = partial(metrics.Histogram, boundaries=_SECONDS, tag_keys=_TAGS)
        self.prompt_tokens = counter("qurl_serving_prompt_tokens", "Number of prompt tokens of finished requests.")
        self.tokens = counter("qurl_serving_tokens", "Number of tokens generated for finished requests.")
        self.first_token = histogram(
            "qurl_serving_first_token_seconds",
            "Time from the arrival of a request at its engine to its first token, in seconds.",
        )
        self.next_token = histogram(
            "qurl_serving_next_token_seconds",
            "Time between two tokens of an answer, as its client receives them, in seconds.",
        )
        self.running = gauge("qurl_serving_running", "Number of answers that are being generated.")
        self.waiting = gauge("qurl_serving_waiting", "Number of answers that wait for a slot.")


class AnswerMeter:
    """Metrics of one request."""

    def __init__(self, meters: Meters, version: str) -> None:
        self._meters, self._tags = meters, {"version": version}
        self._last = time.monotonic()
        self._first = True

    def drew(self, tokens: int, answers: int) -> None:
        """Record that `tokens` tokens of `answers` answers arrived at once."""
        if not tokens:
            return
        now = time.monotonic()
        if self._first:
            self._meters.first_token.observe(now - self._last, self._tags)
            self._first = False
        else:
            self._meters.next_token.observe((now - self._last) * max(1, answers) / tokens, self._tags)
        self._last = now

    def ended(self, usage: Mapping[str, int]) -> None:
        self._meters.prompt_tokens.inc(usage["prompt_tokens"], self._tags)
        if usage["completion_tokens"]:
            self._meters.tokens.inc(usage["completion_tokens"], self._tags)
