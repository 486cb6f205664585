"""Rollouts without loss against full precision: python benchmarks/lossless.py (15 minutes on 2 cores).

SmolLM2-135M-Instruct draws answers at temperature 1 to the problems of its settings file, so many at a time as there
are streams, on two engines that take turns. Each round has other problems. Lossless answers must equal those of full
precision bit for bit. On a machine with other work, the ratio of processor time, with one thread, tells more.

Then two whole runs, in full precision and without loss, learn side by side, a thread for each process, so that other
work delays both. Their parameters must be equal, bit for bit.

The figures go to benchmarks/results/lossless.json after every round; a second call makes only missing ones. `make
smollm2` installs the weights.
"""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import engines
import numpy as np
import torch
import typer
from cells import Arm, cell
from resume import parameters
from shared import RESULTS, ROOT, Figures

from qurl_ray.config.load import load_config
from qurl_ray.data.prompts import encode_prompt
from qurl_ray.data.tasks import load_task
from qurl_ray.engines.torch.drafts import Drafter
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.policy.load import load_tokenizer
from qurl_ray.types import Completion, Request, SamplingParams
from qurl_ray.weights.local import load_into

CONFIG = ROOT / "qurl_ray" / "configs" / "smollm2_135m.yaml"
ARMS = [
    Arm(name=name, settings=(f"rollout.lossless={lossless}",), color="")
    for name, lossless in (("full precision", "false"), ("lossless", "true"))
]
FEW = (
    *("rollout.quantization=none", "algorithm.correction=ignore", "quantization.uaq_scale=1", "rollout.slots=2"),
    *("rollout.prompts_per_step=2", "algorithm.dynamic_sampling=false", "rollout.threads=1", "learner.threads=1"),
    *("evaluation.problems=8", "checkpoint.every=0"),
)
"""Settings of whole runs: two answers at a time."""


class Counted(Drafter):
    """A drafter that remembers how many drafts it chose."""

    def __init__(self) -> None:
        super().__init__(emulate=False)
        self.counts: list[int] = []

    def count(self, rows: int, most: int) -> int:
        self.counts.append(super().count(rows, most))
        return self.counts[-1]


def learn(steps: int, runs: Path) -> dict[str, float]:
    """Return what two whole runs took, full precision over lossless, after their parameters were compared."""
    runs.mkdir(parents=True, exist_ok=True)
    config = str(CONFIG.relative_to(ROOT))

    def made(arm: Arm) -> Path:
        run = cell("lossless", config, (*FEW, f"steps={steps}"), arm, 0, runs, quiet=True)
        assert run
        phases = run.summary["phase_seconds"]
        seconds[arm.name] = {"training": run.summary["train_seconds"], "rollouts": phases["rollout"]}
        return run.folder / "policy"

    seconds: dict[str, dict[str, float]] = {}
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(made, ARMS)
    assert torch.equal(parameters(first), parameters(second))
    full, lossless = (seconds[arm.name] for arm in ARMS)
    return {f"{what}, full precision over lossless": full[what] / lossless[what] for what in full} | {
        f"{what}, s, {name}": value for name, figures in seconds.items() for what, value in figures.items()
    }


def main(
    streams: Annotated[str, typer.Option(help="Numbers of answers at a time.")] = "1,2,4",
    rounds: Annotated[int, typer.Option(help="Rounds of both engines, for each of them.")] = 5,
    new_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    threads: Annotated[int, typer.Option(help="Threads of each engine.")] = 2,
    steps: Annotated[int, typer.Option(help="Steps of the whole runs; 0 leaves them out.")] = 60,
    runs: Annotated[Path, typer.Option(help="Where the whole runs are kept.")] = ROOT / "runs" / "lossless",
    out: Annotated[Path, typer.Option(help="The JSON file.")] = RESULTS / "lossless.json",
) -> None:
    """Time the rounds that are missing, and write their figures."""
    torch.set_num_threads(threads)
    spec, model = engines.smollm2()
    config, tokenizer = load_config(CONFIG, []), load_tokenizer(spec)
    task = load_task(config.task, eval_problems=1)
    encode = partial(encode_prompt, tokenizer=tokenizer, task=config.task)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=new_tokens, ignore_eos=True)

    def asked(first: int, count: int) -> list[Request]:
        return [
            Request(uid=problem.uid, prompt_ids=encode(problem), sampling=sampling, seed=first + i)
            for i, problem in enumerate(task.train[first : first + count])
        ]

    lossless = TorchEngine(spec, slots=8, drafts=True)
    lossless._drafter = drafter = Counted()
    load_into(lossless, model.named_parameters(), None, quantized={})
    full = engines.engine(spec, model, "none", slots=8)
    for one in (full, lossless):
        one.generate(asked(0, 2), version=1)  # weights are packed after so many passes
    figures = Figures(out)
    figures.keep("threads", threads)
    figures.keep("tokens of an answer", new_tokens)
    assert drafter._costs
    figures.keep("seconds of a pass", asdict(drafter._costs))
    counts = [int(count) for count in streams.split(",")]
    for place, count in ((place, count) for place in range(rounds) for count in counts):
        name = f"{count} streams"
        if len(figures.values.get(f"{name}, lossless over full precision", [])) > place:
            continue
        drafter.counts.clear()
        requests = asked(10 + count * place, count)
        wall, processor = {full: 0.0, lossless: 0.0}, {full: 0.0, lossless: 0.0}
        answers: dict[TorchEngine, list[Completion]] = {}
        # There and back, so that a load that grows or shrinks meanwhile affects both.
        for one in (full, lossless, lossless, full):
            started = time.perf_counter(), time.process_time()
            answers[one] = one.generate(requests, version=1)
            wall[one] += time.perf_counter() - started[0]
            processor[one] += time.process_time() - started[1]
        for one, other in zip(answers[lossless], answers[full], strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)
            assert np.array_equal(one.logprobs, other.logprobs)
        tokens = sum(len(c.token_ids) for c in answers[lossless])
        agreed, judged = (sum(getattr(c, field) for c in answers[lossless]) for field in ("agreed", "drafted"))
        figures.add(f"{name}, full precision, tokens/s", 2 * tokens / wall[full], place)
        figures.add(f"{name}, share of drafts that agree", agreed / max(1, judged), place)
        figures.add(f"{name}, tokens per pass", tokens / (tokens - agreed), place)
        figures.add(f"{name}, drafts per pass", statistics.mean(drafter.counts), place)
        figures.add(
            f"{name}, lossless over full precision, processor time", processor[full] / processor[lossless], place
        )
        figures.add(f"{name}, lossless over full precision", wall[full] / wall[lossless], place)
    for count in counts:
        for what in ("lossless over full precision", "lossless over full precision, processor time"):
            ratios = figures.values[f"{count} streams, {what}"]
            figures.keep(f"{count} streams, median of {what}", statistics.median(ratios))
    if steps:
        figures.keep(f"whole runs of {steps} steps", learn(steps, runs.resolve()))


if __name__ == "__main__":
    typer.run(main)
