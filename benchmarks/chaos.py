"""Faults while a run trains: python benchmarks/chaos.py (about 2 hours), or --only ROW, --quick.

Each row injects a fault into training jobs, waits until they have recovered, and injects it again. At the end each job
must have drawn and answered the same prompts as an undisturbed run, and must have the same parameters, bit for bit.
Every fault is printed with the message in which the run reported it. Other rows:

- sync: damaged weights. rewards: some hang or crash.
- soak: resources that the processes of a long run hold.
- overhead: time of an undisturbed run over that of another checkout, --against PATH.

Measured rows are kept in the runs folder: a second call measures only missing ones. Tables and a picture go to
benchmarks/results/chaos.{json,md,png}. The rows disk-full and read-only mount file systems, which needs root.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from chaos_faults import FAULTS
from chaos_jobs import Finding, Job, Place, Row, Strike, without_places
from chaos_soak import Sample, draw, overhead, soak, soak_lines
from shared import RESULTS, ROOT, machine

_TIMES = {name: fault.times for name, fault in FAULTS.items()} | {"sync": 10, "rewards": 3}
_ROWS = (*_TIMES, "soak", "overhead")
_JUDGED = (
    "steps=8",
    "model.layers=6",
    "model.hidden_size=512",
    "model.intermediate_size=1024",
    "algorithm.dynamic_sampling=false",
    "task.reward_timeout_s=1",
    "task.verifiers=4",
)
"""Settings of the jobs of the row rewards. As in real runs, a step takes several times the deadline of a reward,
because it waits for the last reward that hangs. Without dynamic sampling no group is replaced, so both kinds of jobs
generate and judge the same number of samples."""
_THROUGHPUT = 0.8
_OVERHEAD = 1.03
_HEAD = (
    "| fault | times | runs that ended well | every prompt answered once | final parameters equal | recovery s, median "
    "(largest) | as promised |",
    "|---|---|---|---|---|---|---|",
)


def corrupted_syncs(times: int) -> Row:
    """Damage the weights that one of two workers receives, in every way in turn, and count how often that is detected.

    The real sender and workers run in one process. Right after the damaged worker refused the load, it is asked to
    generate, and must refuse that as well.
    """
    import pytest

    from qurl_ray.config.model import TinyModel
    from qurl_ray.policy.load import load_tokenizer
    from qurl_ray.policy.tiny import cached_tiny_policy
    from qurl_ray.types import PolicySpec
    from tests.conftest import SUMS
    from tests.weights import test_sync as refit

    small = TinyModel(cold_start=False, layers=2, hidden_size=128, intermediate_size=256)
    spec = PolicySpec(source=str(cached_tiny_policy(small, SUMS, lambda *_: None)))
    flip, cut = refit.each(refit.flip), refit.each(refit.truncate)
    whole = [flip, cut, refit.drop_bucket, refit.swap_layers]
    kinds = [(damage, False) for damage in whole]
    kinds += [(damage, True) for damage in (*whole, refit.foreign_base, refit.stale_version)]
    row = Row(label="corrupted weight sync", times=times)
    caught = 0
    with pytest.MonkeyPatch.context() as patch:  # buckets are passed directly, not through Ray
        patch.setattr("qurl_ray.actors.rollout_worker.ray.get", lambda bucket: bucket)
        patch.setattr("qurl_ray.weights.transports.object_store.ray.put", list)
        for number in range(times):
            damage, second = kinds[number % len(kinds)]
            caught += _caught(refit.Rig(spec, load_tokenizer(spec)), damage, second)
    row.result, row.ok = f"{caught} of {times} caught before any token", caught == times
    return row


def _caught(rig: Any, damage: Callable, second: bool) -> bool:
    """Return True if the damage was detected before any token was drawn, and then repaired."""
    from qurl_ray.errors import QurlError, StaleWeights

    worker, refused = rig.workers[1], []
    commit = worker.commit

    def load_and_ask(manifest: Any, buckets: Any, probe: Any) -> Any:
        try:
            return commit(manifest, buckets, probe)
        except QurlError:
            for version in (manifest.version - 1, manifest.version):
                try:
                    worker.generate(rig.requests, version, 9.0)
                except StaleWeights:
                    refused.append(version)
            raise

    if second:
        rig.sender.send("int8")
        rig.move()
    worker.commit, worker.damage = load_and_ask, (damage, False)
    rig.sender.send("int8")
    print(f"corrupted sync: {'; '.join(rig.warnings) or 'nothing was noticed'}", flush=True)
    return len(refused) == 2 and len(rig.warnings) == 1 and rig.answers(0) == rig.answers(1)


def vicious_rewards(place: Place, pairs: int) -> Row:
    """Compare the throughput of jobs in which one reward in twenty hangs or kills its process with that of clean ones.

    Throughput is samples generated and judged per second. The row's result is the median ratio.
    """
    row = Row(label="5 % of rewards hang or crash", times=pairs)
    ratios = []
    for pair in range(pairs):
        rates = {}
        for reward in ("parity", "vicious"):
            job = Job(place, f"rewards-{reward}-{pair}", *_JUDGED, f"task.reward=chaos_rewards:{reward}").begin()
            try:
                if status := job.end():
                    row.result, row.ok = f"{reward}: exit status {status}; {job.last_words()}", False
                    return row
            finally:
                job.abandon()
            rates[reward] = json.loads((job.run_dir / "summary.json").read_text())["samples_per_second"]
        ratios.append(rates["vicious"] / rates["parity"])
        print(f"rewards: {rates['vicious']:.1f} samples/s of {rates['parity']:.1f}: {ratios[-1]:.2f}", flush=True)
    ratio = statistics.median(ratios)
    row.result, row.ok = f"{ratio:.2f} of the throughput of clean ones", ratio >= _THROUGHPUT
    return row


def measure(name: str, place: Place, times: int) -> Row:
    """Measure one row of the table."""
    if name == "sync":
        return corrupted_syncs(times)
    if name == "rewards":
        return vicious_rewards(place, times)
    steps = FAULTS[name].steps
    undisturbed = Job(place, f"undisturbed-{steps}", f"steps={steps}")
    if not (undisturbed.run_dir / "summary.json").exists() and undisturbed.begin().end():
        raise SystemExit(f"the undisturbed run failed; its log is {undisturbed.log}")
    return FAULTS[name].measure(name, place, undisturbed.run_dir, times)


def _restored(row: dict[str, Any]) -> Row:
    strikes, jobs = [Strike(**strike) for strike in row["strikes"]], [Finding(**job) for job in row["jobs"]]
    return Row(**row | {"strikes": strikes, "jobs": jobs})


def report(kept: dict[str, Any], runs: Path, out: Path) -> None:
    """Print and write the tables of all rows that were measured so far."""
    rows = {name: _restored(row) for name, row in kept.get("rows", {}).items()}
    text = ["`python benchmarks/chaos.py`", *_where(kept.get("machines", {})), "", *_HEAD]
    text += [row.markdown() for row in rows.values()]
    if ratios := kept.get("overhead"):
        median = statistics.median(ratios)
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        promised = "at most" if median <= _OVERHEAD else "NOT at most"
        text += ["", f"Undisturbed, over the tree before: {median:.3f} ({each}), {promised} {_OVERHEAD}"]
    samples = [Sample(**sample) for sample in kept.get("soak", [])]
    if samples:
        text += ["", *soak_lines(samples)]
        draw(samples, out.with_suffix(".png"))
    for name, row in rows.items():
        text += ["", f"**{name}**", "", *row.details()] if row.strikes else []
    print("\n".join(text))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".md").write_text(without_places("\n".join(text), runs) + "\n")
    out.write_text(without_places(json.dumps(kept, indent=1), runs) + "\n")


def _where(machines: dict[str, str]) -> list[str]:
    """Return one line per machine with the rows that were measured on it; not all rows need be measured at once."""
    return [""] + [
        f"- {machine}: {', '.join(name for name, one in machines.items() if one == machine)}"
        for machine in dict.fromkeys(machines.values())
    ]


def main(
    only: Annotated[
        list[str] | None, typer.Option(help=f"Rows to measure, of {', '.join(_ROWS)}; all if absent.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A fifth of the times.")] = False,
    minutes: Annotated[float, typer.Option("--soak", metavar="MINUTES", help="How long the row soak is.")] = 30,
    pairs: Annotated[int, typer.Option(help="Jobs of either tree, in the row overhead.")] = 5,
    against: Annotated[Path | None, typer.Option(help="Checkout that the row overhead compares with.")] = None,
    runs: Annotated[Path, typer.Option(help="Where the runs and the rows are kept.")] = ROOT / "runs" / "chaos",
    out: Annotated[Path, typer.Option(help="The JSON file; the table and the picture go beside it.")] = RESULTS
    / "chaos.json",
) -> None:
    """Inject faults into training runs, and check that they end as an undisturbed run does."""
    runs = runs.resolve()
    runs.mkdir(parents=True, exist_ok=True)
    place, file = Place(runs=runs, logs=runs), runs / "rows.json"
    kept = json.loads(file.read_text()) if file.exists() else {"rows": {}, "machines": {}}
    for name in only or _ROWS:
        before = json.dumps(kept)
        if name == "soak":
            if not kept.get(name):
                kept[name] = [asdict(sample) for sample in soak(place, minutes)]
        elif name == "overhead":
            if against and not kept.get(name):
                kept[name] = overhead(runs, against, pairs)
        else:
            times, row = max(1, _TIMES[name] // (5 if quick else 1)), kept["rows"].get(name)
            if not (row and row["ok"] and row["times"] >= times):
                kept["rows"][name] = asdict(measure(name, place, times))
        if json.dumps(kept) != before:
            kept["machines"][name] = machine()
        file.write_text(json.dumps(kept))
    report(kept, runs, out)


if __name__ == "__main__":
    typer.run(main)
