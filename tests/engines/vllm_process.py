"""A VllmEngine in a process of its own, as in an actor: vllm patches torch, and would change it under other tests."""

import itertools
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil

START_S = 900


class EngineProcess:
    """Calls of a VllmEngine, with a deadline each.

    Example:
        with EngineProcess(spec, slots=8) as engine:
            engine.call("load", manifest, buckets)
            ticket = engine.start("generate", requests, version=1)
            completions = engine.result(ticket)
    """

    def __init__(
        self, *args: object, capture: bool = False, settings: dict[str, object] | None = None, **kwargs: object
    ) -> None:
        """Make the engine, with these settings of vLLM's own beside those that it passes."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, args, kwargs, capture, settings or {}))
        self._process.start()
        theirs.close()
        self._tickets = itertools.count(1)
        self._replies: dict[int, Future] = {0: Future()}
        self._lock = threading.Lock()
        self._known: list[psutil.Process] = []
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.result(0, START_S)
        except BaseException:
            self.end()
            raise

    def _read(self) -> None:
        """Hand out the replies, in a thread of its own: calls of several threads wait at a time."""
        while True:
            try:
                ticket, good, value = self._pipe.recv()
            except (EOFError, OSError):
                break
            if reply := self._replies.get(ticket):  # somebody still waits
                reply.set_result(value) if good else reply.set_exception(value)
        for reply in list(self._replies.values()):
            if not reply.done():
                reply.set_exception(EOFError("the engine's process has ended"))

    def start(self, method: str, *args: object, **kwargs: object) -> int:
        """Begin a call, in a thread of its own over there."""
        with self._lock:
            ticket = next(self._tickets)
            self._replies[ticket] = Future()
            self._pipe.send((ticket, method, args, kwargs))
        return ticket

    def result(self, ticket: int, timeout_s: float = 60) -> Any:
        """The result of a call, or raise its error."""
        try:
            return self._replies[ticket].result(timeout_s)
        finally:
            del self._replies[ticket]

    def call(self, method: str, *args: object, **kwargs: object) -> Any:
        return self.result(self.start(method, *args, **kwargs))

    def processes(self) -> list[psutil.Process]:
        """The engine's process and all that it started."""
        self._known = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        return self._known

    def end(self) -> None:
        """Kill what is left."""
        if self._process.is_alive():
            self.processes()
            self._process.kill()
        self._process.join(10)
        for process in self._known:
            if process.is_running():
                process.kill()

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._process.is_alive():
                self.processes()
                self.call("close")
        finally:
            self.end()


def _serve(pipe: Connection, args: tuple, kwargs: dict, capture: bool, settings: dict) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    lock = threading.Lock()

    def reply(ticket: int, work: Any) -> None:
        try:
            good, value = True, work()
        except Exception as error:
            good, value = False, error
        with lock:
            pipe.send((ticket, good, value))

    engine, sent = None, []

    def make() -> None:
        nonlocal engine
        from qurl_ray.engines.vllm import engine as vllm_engine

        class Server(vllm_engine.VllmServer):
            def __init__(self, given: dict, **limits: Any) -> None:
                super().__init__({**given, **settings}, **limits)

        vllm_engine.VllmServer = Server
        if capture:
            from tests.engines.vllm_capture import capturing

            capturing()
        engine = vllm_engine.VllmEngine(*args, **kwargs)
        start = engine._server.start
        engine._server.start = lambda *asked: sent.append(asked[0]) or start(*asked)

    reply(0, make)
    while engine is not None:
        ticket, method, args, kwargs = pipe.recv()

        def work(method: str = method, args: tuple = args, kwargs: dict = kwargs) -> Any:
            if method == "sent":  # methods of vLLM's workers that were called since the last time
                return [sent.pop(0) for _ in range(len(sent))]
            if method in _INSIDE:
                return _INSIDE[method](engine, *args)
            found = getattr(engine, method)
            return found(*args, **kwargs) if callable(found) else found

        threading.Thread(target=reply, args=(ticket, work), daemon=True).start()


def cached_tokens(engine: Any, prompt: list[int]) -> int:
    """How many tokens of a prompt vLLM finds in its prefix cache: it says so itself."""
    from vllm.sampling_params import SamplingParams

    server = engine._server

    async def ask() -> int:
        answers = server._llm.generate(
            {"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, detokenize=False), "x"
        )
        return [answer.num_cached_tokens async for answer in answers][-1]

    return server._call(ask(), "vLLM's prefix cache", 30)


def drawing(engine: Any, answers: int = 4) -> None:
    """Return once tokens of so many answers have come that are not done: a test keeps at most three."""
    states = engine._server._llm.output_processor.request_states
    while sum(state.detokenizer.num_output_tokens() > 0 for state in list(states.values())) < answers:
        time.sleep(0.01)


def format_of(_: Any, settings: dict, module: str) -> str | None:
    """What the plugin makes of a linear, from its settings."""
    from qurl_ray.engines.vllm.plugin import QurlConfig

    config = QurlConfig.from_config({"quant_method": "qurl", **settings})
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    fmt = config.format_of(module)
    return fmt.name if fmt else None


def wake_with(engine: Any, manifest: Any, buckets: Any) -> None:
    """Sleep, and wake up with weights that nobody sent. (Sleep itself needs CUDA.)"""
    control = engine._server.control
    engine._server.control = lambda method, *rest, **kwargs: (
        None if method in ("sleep", "wake_up") else control(method, *rest, **kwargs)
    )
    engine._sleep_mode = True
    engine.sleep()
    engine._server.workers("begin")
    engine._place(manifest, buckets)
    engine.wake()
    engine._server.control, engine._sleep_mode = control, False


def wake_with_scales(engine: Any, scales: dict) -> None:
    """Wake up with scales of keys and values that nobody measured."""
    engine._server.workers("scale_keys", scales)
    engine._slept = True


def die(_: Any) -> None:
    """As an actor dies that is killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def asked(engine: Any, name: str) -> Any:
    """Ask vLLM's only worker, which has the methods of vllm_capture.Capturing."""
    return engine._server.control("collective_rpc", f"qurl_{name}")[0]


_INSIDE = {
    "cached_tokens": cached_tokens,
    "drawing": drawing,
    "format_of": format_of,
    "wake_with": wake_with,
    "wake_with_scales": wake_with_scales,
    "die": die,
    **{name: partial(asked, name=name) for name in ("record", "replayed", "addresses", "compilations")},
}
