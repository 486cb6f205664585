"""Picture of the README, light and dark: python benchmarks/picture.py (seconds), from results/regime.json."""

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("agg")
import typer
from matplotlib import pyplot as plt
from regime import CENTRE, COLORS, Point, accuracies, of_point
from shared import RESULTS, ROOT

PANELS = {
    "format_name": ("INT8", "INT4", "seven levels", "five levels"),
    "updates": (1, 4, 8, 16),
    "clip_high": (0.1, CENTRE.clip_high),
}
LABELS = {
    "format_name": "rollouts: number format, KL(b‖p)",
    "updates": "five levels: updates per rollout",
    "clip_high": "five levels: εh of the clip",
}
THEMES = {"light": ("white", "#1b1d20"), "dark": ("#0d1117", "#e8e9ea")}
"""Colours of ground and text."""
TAKEAWAY = "Coarse rollouts need a correction; which one, ACR or TIS, matters little"


def tick(records: list[dict[str, Any]], name: str, value: Any) -> str:
    """Return the label of a place on the axis."""
    if name != "format_name":
        return f"{value:g}"
    kl = statistics.mean(one["kl"] for one in of_point(records, Point(format_name=value)) if one["arm"] == "ACR")
    return f"{value.replace(' ', chr(10))}\n{kl:.1g}"


def draw(axis: plt.Axes, records: list[dict[str, Any]], name: str, text: str) -> None:
    """Draw the mean of each arm along an axis of the map, with a dot for each seed."""
    for arm, color in COLORS.items():
        found = [list(accuracies(records, Point(**{name: value}), arm).values()) for value in PANELS[name]]
        there = [place for place, some in enumerate(found) if some]
        axis.plot(there, [statistics.mean(found[place]) for place in there], color=color, linewidth=1.8, label=arm)
        for place in there:
            axis.plot([place] * len(found[place]), found[place], ".", color=color, markersize=4)
    axis.set_xticks(range(len(PANELS[name])), [tick(records, name, value) for value in PANELS[name]])
    axis.set(xlabel=LABELS[name], ylim=(0, 103), xlim=(-0.3, len(PANELS[name]) - 0.7))
    axis.grid(axis="y", alpha=0.15, color=text)
    axis.spines[["top", "right"]].set_visible(False)


def main(folder: Annotated[Path, typer.Argument(help="Where the two files go.")] = ROOT / "docs") -> None:
    """Draw docs/results-light.png and docs/results-dark.png."""
    path = RESULTS / "regime.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing: benchmarks/regime.py writes it")
    records = json.loads(path.read_text())["runs"]
    for name, (ground, text) in THEMES.items():
        colors = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), text)
        with plt.rc_context({"font.size": 9, "axes.facecolor": ground, **colors}):
            figure, axes = plt.subplots(
                1, 3, figsize=(8.3, 3.5), facecolor=ground, sharey=True, constrained_layout=True
            )
            for axis, panel in zip(axes, PANELS, strict=True):
                draw(axis, records, panel, text)
            axes[0].set_ylabel("held-out problems solved, %")
            figure.suptitle(TAKEAWAY, fontsize=10, fontweight="bold")
            handles, labels = axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
            figure.savefig(folder / f"results-{name}.png", dpi=200)
            plt.close(figure)


if __name__ == "__main__":
    typer.run(main)
