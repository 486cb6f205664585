"""Where ACR differs from TIS, and whether that helps: python benchmarks/regime.py, or one of its parts, exact and runs.

ACR (QuRL) is TIS with a wider upper clip bound for tokens with rho = p/b above C: (1 + εh)·rho/C in place of 1 + εh.
It acts on a token with A > 0 whose ratio R lies between the two.

Part `exact`: policies small enough for sums over all answers of six tokens (objectives.py). Axes are KL(b‖p), C, and
how far the policy has moved since the rollouts (the largest R). Each figure is a median over policies of fixed seeds.

    acts      share of tokens that ACR has a gradient for and TIS has not, in an expectation over b
    cut       share of tokens with A > 0 and R > 1 + εh
    error     ‖E_b g - E_p g‖ / ‖E_p g‖, where E_p g is the same objective's gradient from answers of p
    control   TIS with the smallest larger εh that admits as many tokens as ACR does

Errors are given against the clipped objective on policy, and against that without any clip.

Part `runs`: reinforcement learning of a tiny policy, one axis at a time from a centre. Runs are kept (cells.py), and a
second call makes missing ones only. Seeds differ in the policy, its cold start, and what is drawn.
"""

import json
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import objectives
import torch
import typer
from cells import Arm, Cell, cell
from matplotlib import pyplot as plt
from objectives import CLIP, Answers, Problem, Rollouts, V
from reproduce import CELL, FORMATS, FULL, NO_UAQ, long_task, write_long_task
from shared import RESULTS, ROOT, machine

from qurl_ray.rl.corrections import CorrectionSettings

PARTS = ("exact", "runs")
KLS, CAPS, MOVED = (0.002, 0.02, 0.05, 0.12, 0.45), (1.0, 1.1, 1.5, 2.0, 8.0), (1.5, 2.0, 4.0)
NO_CLIP = (1.0, float("inf"))
TARGETS = ("clipped", "unclipped")


# --- all answers of a small policy -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """All tokens of all answers: their share in an expectation over b, and the quantities that decide about a clip."""

    share_BT: torch.Tensor
    ratio_BT: torch.Tensor
    rho_BT: torch.Tensor
    good_BT: torch.Tensor

    def between(self, low: float, high_BT: torch.Tensor | float) -> float:
        """Return the share of tokens with A > 0 and a ratio above `low`, up to `high`."""
        return float((self.share_BT * (self.good_BT & (self.ratio_BT > low) & (self.ratio_BT <= high_BT))).sum())

    def bound_that_admits(self, share: float, bound: float) -> float:
        """Return the smallest upper bound, of those at which it matters, that admits so many tokens beyond `bound`."""
        ratios = self.ratio_BT[self.good_BT & (self.ratio_BT > bound)].unique().tolist()
        return next((ratio for ratio in [bound, *ratios] if self.between(bound, ratio) >= share), math.inf)


def tokens_of(given: Rollouts, theta_KV: torch.Tensor) -> Tokens:
    at_BT = given.contexts_BT * V + given.tokens_BT
    count = at_BT.shape[1]
    return Tokens(
        share_BT=(given.share_B[:, None] / count).expand_as(at_BT),
        ratio_BT=(theta_KV.log_softmax(-1).flatten()[at_BT] - given.prox_BT).exp(),
        rho_BT=(given.prox_BT - given.behavior_BT).exp(),
        good_BT=(given.advantages_B > 0)[:, None].expand_as(at_BT),
    )


def compared(given: Problem, answers: Answers, kl: float, moved: float) -> dict[float, dict[str, float]]:
    """Return the figures of the docstring by C."""
    best = objectives.bar(given, answers)
    on_p = objectives.rollouts(given, answers, 0.0, best)
    on_b = objectives.rollouts(given, answers, objectives.scale_for(given, answers, kl), best)
    theta_KV = objectives.later(given, on_p, moved)
    seen, bound = tokens_of(on_b, theta_KV), 1 + CLIP[1]

    def mean(rollouts: Rollouts, correction: CorrectionSettings, clip: tuple[float, float]) -> torch.Tensor:
        return objectives.moments(rollouts, theta_KV, correction, exact=True, clip=clip).mean_N

    targets = {
        "clipped": mean(on_p, CorrectionSettings(), CLIP),
        "unclipped": mean(on_p, CorrectionSettings(), NO_CLIP),
    }
    found = {}
    for cap in CAPS:
        acts = seen.between(bound, bound * (seen.rho_BT / cap).clamp(min=1.0))
        wide = seen.bound_that_admits(acts, bound) - 1
        tis = CorrectionSettings(weight="token", cap=cap)
        arms = {
            "tis": mean(on_b, tis, CLIP),
            "acr": mean(on_b, CorrectionSettings(weight="token", cap=cap, adaptive_clip=True), CLIP),
            "control": mean(on_b, tis, (CLIP[0], wide)),
        }
        found[cap] = {"acts": acts, "cut": seen.between(bound, float("inf")), "control_clip_high": wide} | {
            f"{arm}, {target}": float((mean_N - right_N).norm() / right_N.norm())
            for (arm, mean_N), (target, right_N) in product(arms.items(), targets.items())
        }
    return found


def exact(policies: int) -> list[dict[str, Any]]:
    """Return medians over policies, by kind of noise, movement, KL and C."""
    records = []
    for heavy, moved, kl in product((True, False), MOVED, KLS):
        by_cap = defaultdict(list)
        for seed in range(policies):
            given = objectives.problem(seed, heavy=heavy)
            for cap, figures in compared(given, objectives.enumerated(given), kl, moved).items():
                by_cap[cap].append(figures)
        for cap, many in by_cap.items():
            medians = {name: float(f"{statistics.median(one[name] for one in many):.4g}") for name in many[0]}
            records.append({"noise": objectives.NOISES[heavy], "moved": moved, "kl": kl, "cap": cap} | medians)
        objectives.progress(f"{objectives.NOISES[heavy]} noise, R up to {moved:g}, KL {kl:g}")
    return records


# --- runs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Settings of a group of runs that differ in their correction alone."""

    format_name: str = "five levels"
    digits: int = 8
    updates: int = 8
    cap: float = 1.0
    lr: float = 8e-5
    clip_high: float = CLIP[1]

    def settings(self) -> tuple[str, ...]:
        """Return the settings that full precision shares."""
        clip = () if self.clip_high == CLIP[1] else (f"algorithm.clip_high={self.clip_high:g}",)
        return (
            *long_task(self.digits),
            *clip,
            f"algorithm.updates_per_rollout={self.updates}",
            f"learner.lr={self.lr:g}",
        )


LEVELS = {
    "INT8": FORMATS["INT8"],
    "INT4": FORMATS["INT4"],
    "seven levels": FORMATS["seven levels"],
    "five levels": ("rollout.quantization=int4", "quantization.weight_max_code=2"),
}
CENTRE = Point()
TITLE = "ACR acts on few tokens, and TIS with a wider clip does no worse"
AXES: dict[str, tuple[str, Sequence[Any]]] = {
    "format_name": ("number format of the rollouts", list(LEVELS)),
    "clip_high": ("εh", (0.05, 0.1, CLIP[1])),
    "updates": ("updates per rollout", (1, 4, 8, 16)),
    "cap": ("C", CAPS),
    "lr": ("learning rate", (2e-5, 8e-5, 1.6e-4)),
    "digits": ("length of an answer, tokens", (4, 8, 16, 32)),
}
CONTROL = 0.4
"""εh of the control, which is .28 elsewhere: in every cell it admits more tokens than ACR does."""
COMMON = (
    *CELL,
    "guard.enabled=false",
    "rollout.prompts_per_step=32",
    "algorithm.max_refill_rounds=2",
    "algorithm.dual_clip=10",
    "learner.lr_final_share=1",
    "evaluation.problems=1000",
    "steps=30",
)
COLORS = {
    "full precision": "#777777",
    "naive": "#D55E00",
    "TIS": "#E69F00",
    "TIS, wider clip": "#009E73",
    "ACR": "#0072B2",
}


def points() -> list[Point]:
    """Return the centre, then the others, axis by axis."""
    moved = [Point(**{name: value}) for name, (_, values) in AXES.items() for value in values]
    return list(dict.fromkeys([CENTRE, *moved]))


def arms(point: Point) -> list[Arm]:
    """Return the arms of a point; full precision is the same for every format and C, naive for every C."""
    form, weights = LEVELS[point.format_name], f"algorithm.correction.is_cap={point.cap:g}"
    settings = {
        "full precision": FULL,
        "naive": (*form, NO_UAQ, "algorithm.correction=naive"),
        "TIS": (*form, NO_UAQ, "algorithm.correction.type=tis", weights),
        "TIS, wider clip": (*form, NO_UAQ, "algorithm.correction.type=tis", weights, f"algorithm.clip_high={CONTROL}"),
        "ACR": (*form, NO_UAQ, "algorithm.correction.type=acr", weights),
    }
    return [Arm(name=name, settings=own, color=COLORS[name]) for name, own in settings.items()]


def run(seeds: int, jobs: int, until: float, folder: Path) -> dict[Point, dict[str, list[Cell]]]:
    """Make the runs that are missing, begin none after `until`, and return those that there are."""
    places = [(seed, point, arm) for seed in range(seeds) for point in points() for arm in arms(point)]
    key = {place: (place[0], place[1].settings(), place[2]) for place in places}
    wanted = list(dict.fromkeys(key.values()))
    began, made = time.monotonic(), 0

    def one(seed: int, settings: tuple[str, ...], arm: Arm) -> Cell | None:
        nonlocal made
        start = time.monotonic()
        common = (*settings, *COMMON, f"model.seed={seed}")
        found = cell(
            "regime", "qurl_ray/configs/quickstart.yaml", common, arm, seed, folder, begin=start < until, quiet=True
        )
        if found and time.monotonic() - start > 1:  # else it existed before
            made += 1
            minutes = (time.monotonic() - began) / 60
            place = wanted.index((seed, settings, arm)) + 1
            solved = f"{100 * found.summary['accuracy_after']:.1f} %"
            told = " ".join([*settings[-3:], *arm.settings, f"seed={seed}"])
            print(f"{place} of {len(wanted)}, {made} made in {minutes:.0f} min: {solved} with {told}", flush=True)
        return found

    with ThreadPoolExecutor(jobs) as pool:
        made_cells = dict(zip(wanted, pool.map(lambda place: one(*place), wanted), strict=True))
    cells: dict[Point, dict[str, list[Cell]]] = {point: {name: [] for name in COLORS} for point in points()}
    for place in places:
        if found := made_cells[key[place]]:
            cells[place[1]][place[2].name].append(found)
    return cells


# --- results -----------------------------------------------------------------------------------------------------


def record(point: Point, name: str, one: Cell) -> dict[str, Any]:
    """Return the part of a run that goes into the JSON file."""
    steps = [step["values"] for step in one.steps]

    def mean(key: str) -> float:
        values = [value for step in steps if (value := step.get(key)) is not None]
        return float(f"{statistics.mean(values):.4g}") if values else 0.0

    tokens = sum(step["rollout/tokens"] for step in steps)
    return asdict(point) | {
        "arm": name,
        "seed": one.seed,
        "before": one.summary["accuracy_before"],
        "after": one.summary["accuracy_after"],
        "kl": mean("mismatch/kl"),
        "ess": mean("mismatch/ess"),
        "max_rho": one.summary["max_rho"],
        "cut_above": mean("clip/upper"),
        "acr_tokens": one.summary["acr_active_tokens"],
        "acr_share": one.summary["acr_active_tokens"] / tokens,
        "acr_gradient": mean("clip/admitted_gradient"),
        "seconds": one.summary["train_seconds"],
    }


def of_point(records: Sequence[dict[str, Any]], point: Point) -> list[dict[str, Any]]:
    place = asdict(point)
    return [one for one in records if all(one[key] == place[key] for key in place)]


def accuracies(records: Sequence[dict[str, Any]], point: Point, name: str) -> dict[int, float]:
    """Return the accuracies after training, in percent, of a point's arm, by seed."""
    return {one["seed"]: 100 * one["after"] for one in of_point(records, point) if one["arm"] == name}


def table(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return a row for each point: accuracies of the arms, and the part of ACR."""
    lines = [f"| | KL(b‖p) | {' | '.join(COLORS)} | tokens kept by ACR | of all tokens % | of the gradient % |",
             "|" + "---|" * (len(COLORS) + 5)]  # fmt: skip
    for axis, (label, values) in AXES.items():
        for value in values:
            point = Point(**{axis: value})
            found = [accuracies(records, point, name).values() for name in COLORS]
            of_acr = [one for one in of_point(records, point) if one["arm"] == "ACR"]
            if not of_acr:
                continue
            kl, tokens, share, gradient = (
                statistics.mean(one[key] for one in of_acr) for key in ("kl", "acr_tokens", "acr_share", "acr_gradient")
            )
            name = f"{label}: {value}" if isinstance(value, str) else f"{label}: {value:g}"
            cells = [" · ".join(f"{one:.1f}" for one in some) for some in found]
            row = [f"{name}{' (centre)' if point == CENTRE else ''}", f"{kl:.2g}", *cells, f"{tokens:.0f}"]
            lines.append(f"| {' | '.join([*row, f'{100 * share:.3f}', f'{100 * gradient:.2f}'])} |")
    return lines


def paired(records: Sequence[dict[str, Any]], first: str, second: str) -> tuple[float, float, int]:
    """Return mean and standard error of the difference in accuracy, in points, over points and seeds; and their number.
    Points at which both arms are the same run by definition (one update per rollout) do not count."""
    values = []
    for point in points():
        if point.updates > 1:
            one, other = (accuracies(records, point, name) for name in (first, second))
            values += [one[seed] - other[seed] for seed in one.keys() & other.keys()]
    spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan
    return statistics.mean(values), spread, len(values)


def draw(small: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Draw accuracies along each axis, and the exact share of tokens on which ACR acts."""
    figure, axes = plt.subplots(2, 3, figsize=(10, 6.4), constrained_layout=True)
    for axis, (name, (label, values)) in zip(axes.flat, AXES.items(), strict=False):
        for arm, color in COLORS.items():
            found = [list(accuracies(records, Point(**{name: value}), arm).values()) for value in values]
            places = [place for place, some in enumerate(found) for _ in some]
            axis.scatter(places, [one for some in found for one in some], s=9, color=color, alpha=0.5)
            shown = [(place, statistics.mean(some)) for place, some in enumerate(found) if some]
            axis.plot(*zip(*shown, strict=True), color=color, linewidth=1.8, label=arm) if shown else None
        axis.set_xticks(
            range(len(values)),
            [f"{value:g}" if not isinstance(value, str) else value.replace(" ", "\n") for value in values],
        )
        axis.set(xlabel=label, ylim=(0, 100))
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("solved after 30 steps, %")
    axes[1, 0].set_ylabel("solved after 30 steps, %")
    axes[0, 0].legend(fontsize=8)
    last = axes.flat[-1]
    grid = [[next(100 * one["acts"] for one in small if (one["noise"], one["moved"], one["kl"], one["cap"]) ==
                  ("gaussian", 2.0, kl, cap)) for kl in KLS] for cap in CAPS]  # fmt: skip
    last.imshow(grid, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for row, line in enumerate(grid):
        for column, value in enumerate(line):
            last.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=9,
                color="white" if value > 0.6 else "black",
            )
    last.set_xticks(range(len(KLS)), [f"{kl:g}" for kl in KLS])
    last.set_yticks(range(len(CAPS)), [f"{cap:g}" for cap in CAPS])
    last.set(xlabel="KL(b‖p)", ylabel="C", title="tokens on which ACR acts, %,\nexact, ratios up to 2")
    figure.suptitle(title, fontsize=13)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(
    parts: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(PARTS)}; both if absent.")] = None,
    policies: Annotated[int, typer.Option(help="Small policies of the part exact.")] = 11,
    seeds: Annotated[int, typer.Option(help="Seeds of each run; each has a policy of its own.")] = 3,
    minutes: Annotated[float, typer.Option(help="Begin no run after so long.")] = float("inf"),
    jobs: Annotated[int, typer.Option(help="Runs at a time, with a core each.")] = 2,
    runs: Annotated[Path, typer.Option(help="Where the runs are kept.")] = ROOT / "runs" / "regime",
    out: Annotated[Path, typer.Option(help="The JSON file; the rest goes beside it.")] = RESULTS / "regime.json",
) -> None:
    """Measure where ACR differs from TIS, and write figures, a table and a picture."""
    torch.set_num_threads(1)
    figures: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"machines": {}}
    if not parts or "exact" in parts:
        figures["exact"] = exact(policies)
        figures["machines"]["exact"] = machine()
        write(figures, out)
    if not parts or "runs" in parts:
        for digits in AXES["digits"][1]:
            write_long_task(digits)
        cells = run(seeds, jobs, time.monotonic() + 60 * minutes, runs.resolve())
        figures["runs"] = [
            record(point, name, one) for point, by_arm in cells.items() for name, many in by_arm.items() for one in many
        ]
        figures["machines"]["runs"] = machine()
        write(figures, out)
    print(out.with_suffix(".md").read_text())


def write(figures: dict[str, Any], out: Path) -> None:
    """Write the figures, and where both parts have run, table and picture."""
    out.write_text(re.sub(r"\n   +|\n  (?=})", " ", json.dumps(figures, indent=1)) + "\n")  # one line per record
    if not {"exact", "runs"} <= set(figures):
        return
    small, records = figures["exact"], figures["runs"]
    draw(small, records, TITLE, out.with_suffix(".png"))
    lines = [f"# {TITLE}", "", "`python benchmarks/regime.py`; the script defines its words.", ""]
    lines += [f"- {part}: {where}" for part, where in figures["machines"].items()]
    lines += ["", "![the map](regime.png)", "", "## Runs", ""]
    lines += [
        f"Solved of 1000 held-out problems after 30 steps, %, by seed; {len(records)} runs.",
        "",
        *table(records),
        "",
    ]
    for second in ("TIS", "TIS, wider clip", "naive"):
        mean, error, count = paired(records, "ACR", second)
        lines.append(f"- ACR less {second}: {mean:+.1f} ± {error:.1f} points (standard error, {count} pairs)")
    lines += ["", "## Exact gradients", "", *exact_table(small), ""]
    out.with_suffix(".md").write_text("\n".join(lines))


def exact_table(small: Sequence[dict[str, Any]]) -> list[str]:
    """Return a sentence on all settings, and the rows in which ACR differs from TIS."""

    def change(one: dict[str, Any], target: str) -> float:
        return one[f"acr, {target}"] - one[f"tis, {target}"]

    acts = [one for one in small if any(abs(change(one, target)) > 1e-4 for target in TARGETS)]
    farther = sum(change(one, "clipped") > 0 for one in acts)
    nearer = sum(change(one, "unclipped") < 0 for one in acts)
    lines = [
        f"ACR's gradient differs from that of TIS in {len(acts)} of {len(small)} settings (medians over policies).",
        f"It is farther from the gradient of the clipped objective on policy in {farther}, and nearer to that of the",
        f"objective without a clip in {nearer}.",
        "",
        "| noise | largest R | KL | C | acts % | cut % | error, clipped: TIS, ACR, control | without a clip |",
        "|" + "---|" * 8,
    ]
    for one in acts:
        place = f"{one['noise']} | {one['moved']:g} | {one['kl']:g} | {one['cap']:g}"
        errors = (
            ", ".join(f"{one[f'{arm}, {target}']:.3f}" for arm in ("tis", "acr", "control")) for target in TARGETS
        )
        lines.append(f"| {place} | {100 * one['acts']:.2f} | {100 * one['cut']:.1f} | {' | '.join(errors)} |")
    return lines


if __name__ == "__main__":
    typer.run(main)
