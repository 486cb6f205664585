"""Metrics of serving, as Ray metrics: Ray's agents export them, and /metrics shows those of all nodes."""

import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable

import ray
from ray.serve import metrics

from qurl_ray.serving.protocol import Usage

_PREFIX = "qurl_serving"
_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0]
_SCRAPE_S = 2.0


class Meters:
    """Metrics of one replica. The tag `version` is the model's full name, name@fingerprint."""

    def __init__(self) -> None:
        def counter(name: str, what: str, *tags: str) -> metrics.Counter:
            return metrics.Counter(f"{_PREFIX}_{name}", what, tag_keys=tags)

        def seconds(name: str, what: str) -> metrics.Histogram:
            return metrics.Histogram(
                f"{_PREFIX}_{name}_seconds", f"{what}, in seconds.", boundaries=_SECONDS, tag_keys=("version",)
            )

        self.requests = counter("requests", "Number of requests, by path and HTTP status.", "path", "status")
        self.prompt_tokens = counter("prompt_tokens", "Number of prompt tokens of finished requests.", "version")
        self.tokens = counter("tokens", "Number of tokens generated for finished requests.", "version")
        self.first_token = seconds("first_token", "Time from the arrival of a request at its engine to its first token")
        self.next_token = seconds("next_token", "Time between two tokens of an answer, as its client receives them")
        self.duration = seconds("duration", "Time from the arrival of a request at its engine to its last token")
        self.running = metrics.Gauge(
            f"{_PREFIX}_running", "Number of answers that are being generated.", tag_keys=("version",)
        )
        self.waiting = metrics.Gauge(
            f"{_PREFIX}_waiting", "Number of answers that wait for a slot.", tag_keys=("version",)
        )
        self.swaps = counter("swaps", "Number of swaps to another policy, by outcome: done or refused.", "outcome")

    def answer(self, version: str) -> "AnswerMeter":
        return AnswerMeter(self, version)


class AnswerMeter:
    """Metrics of one request."""

    def __init__(self, meters: Meters, version: str) -> None:
        self._meters, self._tags = meters, {"version": version}
        self._began = self._last = time.monotonic()
        self._first = True

    def drew(self, tokens: int, answers: int) -> None:
        """Record that `tokens` tokens of `answers` answers arrived at once."""
        if not tokens:
            return
        now = time.monotonic()
        if self._first:
            self._meters.first_token.observe(now - self._began, self._tags)
            self._first = False
        else:
            self._meters.next_token.observe((now - self._last) * max(1, answers) / tokens, self._tags)
        self._last = now

    def ended(self, usage: Usage) -> None:
        self._meters.duration.observe(time.monotonic() - self._began, self._tags)
        self._meters.prompt_tokens.inc(usage.prompt_tokens, self._tags)
        if usage.completion_tokens:
            self._meters.tokens.inc(usage.completion_tokens, self._tags)


def exposition() -> str:
    """Return all replicas' metrics in Prometheus' text format, from all nodes' agents. Blocks for seconds at most."""
    pages = []
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for node in ray.nodes():
        if node["Alive"] and node.get("MetricsExportPort"):
            url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
            try:
                with opener.open(url, timeout=_SCRAPE_S) as page:
                    pages.append(page.read().decode())
            except OSError:
                continue  # a node that just left
    return merged(line for page in pages for line in page.splitlines())


def merged(lines: Iterable[str]) -> str:
    """Merge the lines of several pages into one page that has only our own metrics.

    The lines of a metric stand together, after its help and type.
    """
    heads: dict[str, dict[str, str]] = defaultdict(dict)
    samples: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        if line.startswith("# "):
            _, what, name, *_ = line.split(" ", 3)
            heads[name].setdefault(what, line)
        elif line.startswith(f"ray_{_PREFIX}_"):
            name = line.partition("{")[0].partition(" ")[0]
            family = next((name.removesuffix(end) for end in _ENDS if name.removesuffix(end) in heads), name)
            samples[family].append(line)
    return "".join(f"{line}\n" for name in samples for line in (*heads[name].values(), *samples[name]))


_ENDS = ("", "_bucket", "_count", "_sum", "_total")
