"""The app under load: python benchmarks/serving.py (about 20 minutes), or --quick, --only PART.

The app runs in a process of its own, as `make serve` starts it. App and openai clients share this machine's cores:

- load: 64 clients; one of two replicas is SIGKILLed during the load. Measured are answers that were lost in spite of
  their clients' retries, latency, throughput, and the memory of the app's processes.
- fuzz: requests that are damaged at random. All must be refused or answered in OpenAI's format.
- batching: 16 streams at once against 16 requests one after the other, of the tiny policy and of SmolLM2-135M.
- latency: time to the first token and between tokens, float32 and INT8.

Tables and a picture go to benchmarks/results/serving.{json,md,png}; with --only they keep the other parts' figures.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx2  # HTTP library of the openai client
import matplotlib
import openai
import psutil
import typer
from shared import RESULTS, ROOT, machine

matplotlib.use("agg")
from matplotlib import pyplot as plt

sys.path.insert(0, str(ROOT))

from qurl_ray.config.model import TinyModel
from qurl_ray.policy.tiny import cached_tiny_policy
from tests.conftest import SUMS
from tests.serving.apps import KEY, Server, descendants, serving

CLIENTS, STREAMS = 64, 16
_SUM = [{"role": "user", "content": "12+34="}]
_TALK = [{"role": "user", "content": "Write a long story about a ship that sails around the world."}]
_EXACTLY = {"ignore_eos": True}
_GAIN = 3.0
_GROWTH = 1.1  # of memory, last quarter of the load over the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy to serve, and the request that clients send to it."""

    label: str
    folder: Path
    messages: list[dict[str, str]]
    tokens: int


def policies(quick: bool) -> list[Policy]:
    config = TinyModel(cold_start=False, max_length=1024)
    tiny = cached_tiny_policy(config, SUMS, lambda *_: None)
    found = [Policy(label="tiny", folder=tiny, messages=_SUM, tokens=100 if quick else 400)]
    try:
        from engines import SMOLLM2

        from qurl_ray.policy.gguf import cached_gguf_policy

        smollm2 = cached_gguf_policy(SMOLLM2)
        found.append(Policy(label="SmolLM2-135M", folder=smollm2, messages=_TALK, tokens=16 if quick else 64))
    except Exception as error:  # not installed: make smollm2
        print(f"without SmolLM2: {error}")
    return found


@contextlib.contextmanager
def served(policy: Policy, *settings: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="qurl-serving-") as folder:
        threads = () if any(one.startswith("threads=") for one in settings) else (f"threads={os.cpu_count()}",)
        with serving(Path(folder), f"policy={policy.folder}", "name=policy", *threads, *settings) as server:
            yield server


# --- load ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """Results of the clients of a load."""

    seconds: list[float] = field(default_factory=list)
    """Seconds of each answer, from its first attempt to its last token."""
    tokens: int = 0
    again: Counter = field(default_factory=Counter)
    """Number of attempts that had to be repeated, by status or error."""
    lost: int = 0


async def _client(server: Server, number: int, policy: Policy, until: float, found: Outcome) -> None:
    async with server.async_client(timeout=60) as client:
        rng = random.Random(number)
        while time.monotonic() < until:
            began = time.monotonic()
            for attempt in range(30):
                try:
                    tokens = await _answer(client, policy, stream=bool(number % 2))
                    found.tokens += tokens
                    found.seconds.append(time.monotonic() - began)
                    break
                except (openai.APIError, httpx2.HTTPError, OSError) as error:
                    status = getattr(error, "status_code", None)
                    found.again[str(status or type(error).__name__)] += 1
                    await asyncio.sleep(min(2.0, 0.25 * 2**attempt) * rng.uniform(0.5, 1.0))
            else:
                found.lost += 1


async def _answer(client: openai.AsyncOpenAI, policy: Policy, *, stream: bool) -> int:
    asked = {"model": "policy", "messages": policy.messages, "max_tokens": policy.tokens, "extra_body": _EXACTLY}
    if not stream:
        reply = await client.chat.completions.create(**asked)
        assert reply.usage.completion_tokens == policy.tokens
        return policy.tokens
    last = None
    async for chunk in await client.chat.completions.create(stream=True, **asked):
        last = chunk
    if last is None or last.choices[0].finish_reason is None:
        raise OSError("the stream broke off")
    return policy.tokens


def _memory(server: Server, samples: list[tuple[float, float]], end: threading.Event) -> None:
    """Record the memory of proxy, controller and replicas together every second, in MiB."""
    while not end.wait(1.0):
        total = 0
        for pid, command in descendants(server.process.pid):
            if command.startswith(("ray::ServeReplica", "ray::ProxyActor", "ray::ServeController")):
                with contextlib.suppress(psutil.Error):
                    total += psutil.Process(pid).memory_info().rss
        samples.append((time.monotonic(), total / 2**20))


def load(quick: bool) -> dict[str, Any]:
    policy = policies(True)[0]
    seconds = 20 if quick else 120
    found, samples, end = Outcome(), [], threading.Event()
    with served(policy, "replicas=2", "slots=32", "queue=64", "threads=1") as server:
        _wait(lambda: len(server.replicas()) == 2)
        watcher = threading.Thread(target=_memory, args=(server, samples, end))
        watcher.start()
        began = time.monotonic()
        killed = server.replicas()[0]
        strike = threading.Timer(seconds / 3, os.kill, (killed, signal.SIGKILL))
        strike.start()
        until = began + seconds

        async def everybody() -> None:
            await asyncio.gather(*(_client(server, i, policy, until, found) for i in range(CLIENTS)))

        asyncio.run(everybody())
        took = time.monotonic() - began
        back = len(set(server.replicas()) - {killed}) == 2
        end.set()
        watcher.join()
    held = [mib for at, mib in samples if at > began + seconds / 2]  # both replicas run again
    middle = len(held) // 2
    growth = statistics.median(held[middle:]) / statistics.median(held[:middle])
    return {
        "clients": CLIENTS,
        "seconds": took,
        "answers": len(found.seconds),
        "lost": found.lost,
        "attempts_repeated": dict(found.again),
        "replica_came_back": back,
        "p50_s": _quantile(found.seconds, 0.5),
        "p99_s": _quantile(found.seconds, 0.99),
        "answers_per_second": len(found.seconds) / took,
        "tokens_per_second": found.tokens / took,
        "memory_mib": [round(mib) for _, mib in samples],
        "memory_growth": growth,
        "ok": found.lost == 0 and back and growth < _GROWTH,
    }


# --- fuzz ----------------------------------------------------------------------------------------------------------

_JUNK = (
    None,
    True,
    -1,
    0,
    1e308,
    2**70,
    "",
    "x" * 5000,
    "\x00",
    "й",
    [],
    {},
    [[]],
    [None],
    {"a": {"b": []}},
    ["x"] * 50,
)


def _damaged(rng: random.Random) -> bytes:
    body: dict[str, Any] = {"model": "policy", "messages": [dict(_SUM[0])], "max_tokens": 2, "n": 1, "stop": ["="]}
    kind = rng.randrange(4)
    if kind == 0:
        body[rng.choice([*body, "seed", "logprobs", "top_p", "tools", "stream", "nonsense"])] = rng.choice(_JUNK)
    elif kind == 1:
        body["messages"][0][rng.choice(["role", "content", "name", "x"])] = rng.choice(_JUNK)
    text = bytearray(json.dumps(body).encode())
    if kind == 2:
        del text[rng.randrange(len(text)) :]
    elif kind == 3:
        for _ in range(rng.randrange(1, 6)):
            text[rng.randrange(len(text))] = rng.randrange(256)
    return bytes(text)


def fuzz(quick: bool) -> dict[str, Any]:
    rng, statuses, bad = random.Random(0), Counter(), []
    count = 300 if quick else 3000
    with served(policies(True)[0]) as server, server.http() as http:
        for _ in range(count):
            body = _damaged(rng)
            reply = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
            statuses[reply.status_code] += 1
            stream = reply.headers["content-type"].startswith("text/event-stream")
            shaped = (
                stream
                or "choices" in reply.json()
                or set(reply.json()["error"]) == {"message", "type", "param", "code"}
            )
            leaked = any(word in reply.text for word in ("Traceback", KEY, str(ROOT), ".py"))
            if reply.status_code >= 500 or not shaped or leaked:
                bad.append(repr(body[:200]))
        alive = http.get("/health").status_code == 200
    return {"requests": count, "by_status": dict(sorted(statuses.items())), "bad": bad, "ok": not bad and alive}


# --- batching and latency ------------------------------------------------------------------------------------------


async def _timed(client: openai.AsyncOpenAI, policy: Policy, *, seed: int) -> list[float]:
    """Return the seconds from the request to each chunk that has a text."""
    began, at = time.perf_counter(), []
    asked = {"model": "policy", "messages": policy.messages, "max_tokens": policy.tokens, "seed": seed}
    async for chunk in await client.chat.completions.create(stream=True, extra_body=_EXACTLY, **asked):
        if chunk.choices and chunk.choices[0].delta.content:
            at.append(time.perf_counter() - began)
    return at


def _together(server: Server, policy: Policy, streams: int) -> tuple[float, list[list[float]]]:
    async def main() -> tuple[float, list[list[float]]]:
        async with server.async_client(timeout=600) as client:
            await _timed(client, policy, seed=0)  # warm-up
            began = time.perf_counter()
            found = await asyncio.gather(*(_timed(client, policy, seed=i) for i in range(streams)))
            return time.perf_counter() - began, found

    return asyncio.run(main())


def _in_turn(server: Server, policy: Policy, requests: int) -> tuple[float, list[list[float]]]:
    async def main() -> tuple[float, list[list[float]]]:
        async with server.async_client(timeout=600) as client:
            await _timed(client, policy, seed=0)
            began = time.perf_counter()
            found = [await _timed(client, policy, seed=i) for i in range(requests)]
            return time.perf_counter() - began, found

    return asyncio.run(main())


def speed(quick: bool) -> dict[str, Any]:
    """Measure batching and latency, from the same streams."""
    figures: dict[str, Any] = {}
    for policy in policies(quick):
        for name in ("none", "int8"):
            with served(policy, f"quantization={name}", f"slots={STREAMS}") as server:
                rounds = [
                    (_together(server, policy, STREAMS), _in_turn(server, policy, STREAMS))
                    for _ in range(1 if quick else 3)
                ]
            many = [streams for (_, streams), _ in rounds]
            one = [streams for _, (_, streams) in rounds]
            figures[f"{policy.label}, {'float32' if name == 'none' else name}"] = {
                "tokens": policy.tokens,
                "gain": statistics.median(alone / together for (together, _), (alone, _) in rounds),
                "tokens_per_second": STREAMS * policy.tokens / statistics.median(took for (took, _), _ in rounds),
                "first_token_s": _first(one),
                "next_token_s": _next(one, policy.tokens),
                "first_token_of_16_s": _first(many),
                "next_token_of_16_s": _next(many, policy.tokens),
            }
    gains = [row["gain"] for label, row in figures.items() if label.startswith("tiny")]
    return {"rows": figures, "ok": min(gains) >= _GAIN}


def _first(rounds: Sequence[list[list[float]]]) -> float:
    return statistics.median(at[0] for streams in rounds for at in streams)


def _next(rounds: Sequence[list[list[float]]], tokens: int) -> float:
    """Median seconds per token. Chunks may hold several tokens if a client is slower than the engine."""
    return statistics.median((at[-1] - at[0]) / (tokens - 1) for streams in rounds for at in streams)


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _wait(condition: Callable[[], bool], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise SystemExit("the app did not come to what was waited for")
        time.sleep(0.1)


# --- all -----------------------------------------------------------------------------------------------------------


def lines(figures: dict[str, Any]) -> Iterator[str]:
    command = f"python benchmarks/serving.py{' --quick' if figures['quick'] else ''}"
    yield f"`{command}`; clients and app on the same cores"
    yield from ("", *(f"- {part}: {where}" for part, where in figures["machines"].items()))
    if one := figures.get("load"):
        yield from ("", "| 64 clients, one of two replicas killed | |", "|---|---|")
        yield f"| answers in {one['seconds']:.0f} s | {one['answers']} |"
        yield f"| lost after retries | {one['lost']} |"
        yield f"| attempts repeated | {sum(one['attempts_repeated'].values())} {one['attempts_repeated']} |"
        yield f"| latency p50 / p99 | {one['p50_s']:.2f} s / {one['p99_s']:.2f} s |"
        yield f"| throughput | {one['answers_per_second']:.1f} answers/s, {one['tokens_per_second']:.0f} tokens/s |"
        yield f"| memory, last quarter over the one before | {one['memory_growth']:.3f} |"
    if one := figures.get("fuzz"):
        yield from ("", "| damaged requests | by status | 5xx, other shapes, leaks |", "|---|---|---|")
        yield f"| {one['requests']} | {one['by_status']} | {len(one['bad'])} |"
    if one := figures.get("speed"):
        yield ""
        yield "| | 16 streams over 16 in turn | tokens/s of 16 | first token ms (of 16) | per token ms (of 16) |"
        yield "|---|---|---|---|---|"
        for label, row in one["rows"].items():
            first, following = 1e3 * row["first_token_s"], 1e3 * row["next_token_s"]
            first_16, following_16 = 1e3 * row["first_token_of_16_s"], 1e3 * row["next_token_of_16_s"]
            yield (
                f"| {label} | {row['gain']:.1f} | {row['tokens_per_second']:.0f} | {first:.0f} ({first_16:.0f}) | "
                f"{following:.1f} ({following_16:.1f}) |"
            )


def draw(figures: dict[str, Any], path: Path) -> None:
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), constrained_layout=True)
    if one := figures.get("load"):
        left.plot(one["memory_mib"], color="#0072B2")
        left.set(title="64 clients, a replica killed at a third", xlabel="s", ylabel="MiB of the app", ylim=(0, None))
    if one := figures.get("speed"):
        rows = one["rows"]
        middle.barh(list(rows), [row["gain"] for row in rows.values()], color="#009E73")
        middle.axvline(_GAIN, color="black", linewidth=0.8)
        middle.set(title="16 streams over 16 in turn", xlabel="times as fast")
        right.barh(list(rows), [1e3 * row["next_token_s"] for row in rows.values()], color="#D55E00")
        right.set(title="One stream", xlabel="ms per token")
        for axis in (middle, right):
            axis.invert_yaxis()
            axis.margins(x=0.2)
            axis.bar_label(axis.containers[0], fmt="%.3g", padding=3)
    figure.savefig(path, dpi=120)


PARTS: dict[str, Callable[[bool], dict[str, Any]]] = {"load": load, "fuzz": fuzz, "speed": speed}


def main(
    quick: Annotated[bool, typer.Option(help="Less of everything; about 4 minutes.")] = False,
    only: Annotated[str | None, typer.Option(help="load, fuzz or speed (batching and latency).")] = None,
    out: Annotated[Path, typer.Option(help="Folder of serving.json, .md and .png.")] = RESULTS,
) -> None:
    """Measure the app; print and write the tables."""
    path = out / "serving.json"
    figures = json.loads(path.read_text()) if only and path.exists() else {}
    figures |= {"quick": quick}
    machines = figures.setdefault("machines", {})
    for name, part in PARTS.items():
        if only in (None, name):
            figures[name], machines[name] = part(quick), machine()
            print(f"{name}: {'as promised' if figures[name]['ok'] else 'NOT as promised'}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=2) + "\n")
    text = "\n".join(lines(figures))
    (out / "serving.md").write_text(text + "\n")
    draw(figures, out / "serving.png")
    print(f"\n{text}")


if __name__ == "__main__":
    typer.run(main)
