"""Scaling to more machines: python benchmarks/scaling.py (about 15 minutes), or --only here, --only simulated.

- here: one and two rollout workers, one and two learner ranks, a core each, on the step of fixed size.
- simulated: the real coordinator around modelled engines and learners (simulation.py), up to 10 000 GPUs. A 7B policy
  on H100s in INT8 generates answers of 512 tokens on average, 4 for each GPU and step; three quarters of the GPUs roll
  out. Syncs are full or deltas, over 400 Gb/s for each GPU, or 1 Gb/s for each node, as across the internet.
"""

import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import ray
import typer
from matplotlib import pyplot as plt
from peers import ours, step_values
from shared import RESULTS, ROOT, machine
from simulation import Scenario, Simulation, call_cost

from qurl_ray.config import load_config
from qurl_ray.planning.machines import GPUS, NODE
from qurl_ray.planning.shapes import find_shape
from qurl_ray.planning.speed import EngineRoofline
from qurl_ray.planning.workload import Workload
from qurl_ray.training.driver.early import check_early
from qurl_ray.training.driver.prepare import check_run, prepare

SIZES = (16, 64, 256, 1024, 4096, 10_000)
NETWORKS = {"400 Gb/s a GPU": 50e9 * NODE, "1 Gb/s a node": 0.125e9}
ARMS = {"1 + 1": (1, 1), "2 rollout workers": (2, 1), "2 learner ranks": (1, 2)}


def here(rounds: int, runs: Path) -> dict[str, dict[str, float]]:
    """Measure the seconds of rollouts and of updates for each arm, medians over rounds."""
    found: dict[str, dict[str, list[float]]] = {name: {"rollout": [], "update": []} for name in ARMS}
    for round_ in range(rounds):
        for name, (workers, ranks) in ARMS.items():
            settings = (f"rollout.workers={workers}", f"learner.workers={ranks}", "rollout.threads=1")
            events = ours("bench_step", runs, *settings, "learner.threads=1", "evaluation.problems=8", f"seed={round_}")
            for phase, seconds in found[name].items():
                seconds.append(statistics.median(step_values(events, f"time/{phase}")[1:]))
    return {name: {phase: statistics.median(one) for phase, one in phases.items()} for name, phases in found.items()}


def simulated(sizes: tuple[int, ...], steps: int, each: int, mean: int) -> list[dict[str, Any]]:
    """Return a row of figures for each cluster, network and form of sync."""
    rows = []
    cost = call_cost(answers=max(1, round(each / 0.75)), prompt=128, tokens=mean)
    print(f"a call that sends requests costs its caller {1e6 * cost:.0f} µs, with the answers")
    for gpus in sizes:
        prompts = each * gpus // 8
        work = Workload(prompts=prompts, response=2 * mean, mean=mean, updates=4, prompt=128)
        with tempfile.TemporaryDirectory() as folder:
            config = load_config(
                None,
                [
                    "model.cold_start=false",
                    f"output_dir={folder}",
                    f"rollout.workers={gpus * 3 // 4}",
                    f"learner.workers={gpus - gpus * 3 // 4}",
                    "rollout.slots=512",
                    f"rollout.prompts_per_step={prompts}",
                    f"rollout.max_new_tokens={2 * mean}",
                    f"model.max_length={2 * mean + 256}",
                    "algorithm.dynamic_sampling=false",
                    "algorithm.updates_per_rollout=4",
                    "guard.enabled=false",
                    "sync.probe_tokens=0",
                    "tracking.samples_per_step=0",
                ],
            )
            prepared = prepare(config, check_run(check_early(config)), lambda *_: None)
            engine = EngineRoofline(shape=find_shape("Qwen2.5-7B"), gpu=GPUS["h100"], precision="int8")
            for (network, speed), delta in ((one, form) for one in NETWORKS.items() for form in (False, True)):
                scenario = Scenario(
                    gpus=gpus, rollout_share=0.75, config=config, work=work, roofline=engine, network=speed,
                    delta=delta, steps=steps,
                )  # fmt: skip
                actor = ray.remote(num_cpus=0)(Simulation).remote()
                row = ray.get(actor.run.remote(scenario, prepared, cost))
                ray.kill(actor)
                rows.append(row | {"network": network, "sync": "delta" if delta else "full"})
                print(json.dumps(rows[-1]), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| GPUs | network | sync | trajectories | step s | waits s | slowest engine s | learns s | syncs s | of it, "
        "bytes on their way s | engines idle % |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {r['gpus']:,} | {r['network']} | {r['sync']} | {r['trajectories']:,} | {r['step_s']:.1f} | "
        f"{r['wait_s']:.1f} | {r['slowest_engine_s']:.1f} | {r['learn_s']:.1f} | {r['sync_s']:.2f} | "
        f"{r['load_s']:.2f} | {100 * r['engines_idle']:.0f} |"
        for r in rows
    ]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the seconds of a step over the size of the cluster."""
    figure, axis = plt.subplots(figsize=(6, 4), constrained_layout=True)
    for network, sync, style in [
        (n, s, st) for n, st in zip(NETWORKS, ("-", "--"), strict=True) for s in ("full", "delta")
    ]:
        some = [row for row in rows if (row["network"], row["sync"]) == (network, sync)]
        color = {"full": "#D55E00", "delta": "#0072B2"}[sync]
        axis.plot(
            [r["gpus"] for r in some], [r["step_s"] for r in some], style, color=color, label=f"{sync}, {network}"
        )
    axis.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="seconds of a step")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main(
    only: Annotated[Literal["here", "simulated"] | None, typer.Option(help="One of both.")] = None,
    sizes: Annotated[list[int] | None, typer.Option(help=f"GPUs to simulate; {SIZES} if absent.")] = None,
    steps: Annotated[int, typer.Option(help="Number of steps of a simulation; the first is left out.")] = 3,
    rounds: Annotated[int, typer.Option(help="Number of rounds of measurements on this machine.")] = 3,
    each: Annotated[int, typer.Option(help="Answers for each GPU and step.")] = 4,
    mean: Annotated[int, typer.Option(help="Tokens of an answer.")] = 512,
    out: Annotated[Path, typer.Option(help="The JSON file; picture and table go beside it.")] = RESULTS
    / "scaling.json",
) -> None:
    """Measure up to two workers and ranks on this machine, and simulate large clusters."""
    figures = json.loads(out.read_text()) if out.exists() else {}
    machines = figures.setdefault("machines", {})
    if only != "simulated":
        figures["here"], machines["here"] = here(rounds, ROOT / "runs" / "scaling"), machine()
    if only != "here":
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        figures["simulated"], machines["simulated"] = simulated(tuple(sizes or SIZES), steps, each, mean), machine()
        draw(figures["simulated"], out.with_suffix(".png"))
    command = shlex.join(["python", "benchmarks/scaling.py", *sys.argv[1:]])
    text = [f"`{command}`", *(f"- {name}: {where}" for name, where in machines.items()), ""]
    if "here" in figures:
        text += ["| a core each | rollouts s | updates s |", "|---|---|---|"]
        text += [f"| {name} | {one['rollout']:.2f} | {one['update']:.2f} |" for name, one in figures["here"].items()]
    if "simulated" in figures:
        text += ["", *table(figures["simulated"]), "", f"![seconds of a step]({out.stem}.png)"]
    print("\n".join(text))
    out.write_text(json.dumps(figures, indent=2) + "\n")
    out.with_suffix(".md").write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    typer.run(main)
