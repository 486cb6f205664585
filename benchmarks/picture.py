"""Picture of the README, light and dark: python benchmarks/picture.py (seconds), from results/reproduce.json."""

import json
import statistics
from pathlib import Path
from typing import Annotated

import matplotlib

matplotlib.use("agg")
import typer
from matplotlib import pyplot as plt
from matplotlib.patches import Patch
from shared import RESULTS, ROOT

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
    "DAPO\nternary": ("dapo", "coarse"),
    "PPO\nINT8": ("ppo", "INT8"),
    "PPO\nFP8": ("ppo", "FP8"),
    "PPO\nternary": ("ppo", "coarse"),
}
"""Groups of bars: label under the bars, with table and format of reproduce.py."""
THEMES = {"light": ("white", "#1b1d20"), "dark": ("#0d1117", "#e8e9ea")}
"""Colours of ground and text."""
TAKEAWAY = "INT8 and FP8 rollouts train as well as full precision; with coarse codes, a correction is needed"


def draw(axis: plt.Axes, text: str) -> None:
    """Draw bars of means, with a dot for each seed. `text` is the colour of what is no bar."""
    path = RESULTS / "reproduce.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing: benchmarks/reproduce.py writes it")
    tables = json.loads(path.read_text())
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
            mean = statistics.mean(values)
            axis.bar(x, mean, 0.92 * width, color=COLORS[label])
            axis.plot([x] * len(values), values, ".", color=text, markersize=2.5)
            axis.text(x, max(values) + 1.5, f"{mean:.0f}", ha="center", fontsize=7)
    before = 100 * tables["preset"]["full precision"][0]["accuracy_before"]
    axis.axhline(before, color=text, linestyle=":", linewidth=0.8)
    axis.text(-0.88, before + 1.2, "before", fontsize=7)
    axis.set(xticks=range(len(GROUPS)), xticklabels=GROUPS, xlim=(-0.9, None), ylim=(0, 100))
    axis.set_ylabel("held-out sums solved, %")
    axis.spines[["top", "right"]].set_visible(False)


def main(folder: Annotated[Path, typer.Argument(help="Where the two files go.")] = ROOT / "docs") -> None:
    """Draw docs/results-light.png and docs/results-dark.png."""
    for name, (ground, text) in THEMES.items():
        colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), text)
        with plt.rc_context({"font.size": 9, "axes.facecolor": ground, **colors}):
            figure, axis = plt.subplots(figsize=(8.3, 3.9), facecolor=ground, constrained_layout=True)
            draw(axis, text)
            figure.suptitle(TAKEAWAY, fontsize=10, fontweight="bold")
            handles = [Patch(color=color, label=label) for label, color in COLORS.items()]
            figure.legend(handles=handles, loc="outside lower center", ncols=len(COLORS), fontsize=8, frameon=False)
            figure.savefig(folder / f"results-{name}.png", dpi=200)


if __name__ == "__main__":
    typer.run(main)
