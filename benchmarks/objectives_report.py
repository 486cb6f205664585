"""Results of benchmarks/objectives.py as a picture, a table and sentences; and the sizes that both files need."""

import math
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

V, SHORT, ANSWERS = 3, 6, 512
"""Tokens of the vocabulary; tokens of a short answer; answers of an update."""
LONG_KLS = (0.005, 0.025)
ON_POLICY, UNCAPPED = "on policy", "sequence, no cap"

Results = dict[tuple[Any, ...], dict[str, float]]
"""Figures by the keys that short_answers and long_answers define."""

SHOWN, SHOWN_KL = ("heavy-tailed", "later", "own"), 0.1
FIGURES = ("bias", "noise", "ess", "rms", "direction")
FAMILIES = {  # each with its colour and its corrections
    "samples of p": ("#777777", (ON_POLICY,)),
    "no weights": ("#000000", ("ignore",)),
    "clipped ratio to b": ("#D55E00", ("naive",)),
    "weights of tokens": ("#0072B2", ("flashrl", "qurl", "mis", "decoupled", "veto", "ais")),
    "weights of answers": ("#009E73", ("sequence_tis", "sequence_mis", UNCAPPED)),
    "answers dropped": ("#CC79A7", ("geometric", "k2", "k3")),
}
LINES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
STYLES = {name: (color, line) for color, names in FAMILIES.values() for name, line in zip(names, LINES, strict=False)}


def draw(short: Results, long: Results, path: Path) -> None:
    """Draw six panels: four against the mismatch, two against the length."""
    figure, axes = plt.subplots(3, 2, figsize=(11, 12.5))
    figure.subplots_adjust(left=0.06, right=0.85, top=0.895, bottom=0.045, wspace=0.62, hspace=0.3)
    kls = sorted({key[-1] for key in short if key[-1] <= SHOWN_KL})
    lengths = sorted({key[-1] for key in long})
    for at, name, limits, title in (
        (0, "rms", (0.2, 3), f"Error of an update of {ANSWERS} short answers"),
        (2, "bias", (1e-3, 3), "Its bias: what more answers do not cure"),
        (3, "noise", (0.5, 100), "Its noise, of one answer"),
        (4, "ess", (0.008, 1.3), "Effective sample size, share of tokens"),
    ):
        curves = {
            one: [short[*SHOWN, one, kl][name] for kl in kls] for one in STYLES if (name, one) != ("bias", ON_POLICY)
        }
        panel(axes.flat[at], kls, curves, limits, title)
        axes.flat[at].axvspan(0.002, 0.025, color="#000000", alpha=0.07, lw=0)
        axes.flat[at].set_xlabel("KL(b‖p), nats per token (grey: reported runs)")
    for at, name, title in (
        (1, "rms", "The same with longer answers"),
        (5, "direction", "Longer answers: error of the direction alone"),
    ):
        curves = {one: [long[one, LONG_KLS[0], length][name] for length in lengths] for one in STYLES}
        panel(axes.flat[at], lengths, curves, (0.13, 1.8), title)
        axes.flat[at].set_xticks(lengths, lengths)
        axes.flat[at].set_xlabel(f"tokens of an answer (first update, KL = {LONG_KLS[0]})")
    figure.suptitle("How far the policy gradient from a quantized engine b is from the true one of p", fontsize=15)
    figure.text(0.06, 0.945, "Unit: the true gradient's length, so that an error of 1 is that of no update at all. "
                f"Short: {SHORT} tokens, later update.", fontsize=10)  # fmt: skip
    for (family, (color, _)), x in zip(FAMILIES.items(), (0.06, 0.2, 0.33, 0.51, 0.68, 0.86), strict=True):
        figure.text(x, 0.924, f"■ {family}", color=color, fontsize=10)
    figure.savefig(path, dpi=100)


def panel(
    axes: Any, x: Sequence[float], curves: dict[str, list[float]], limits: tuple[float, float], title: str
) -> None:
    """Draw curves with their names at the right. Curves that coincide are drawn once."""
    axes.set(xscale="log", yscale="log", ylim=limits)
    axes.set_title(title, loc="left", fontsize=12)
    axes.minorticks_off()
    ticks = [tick for tick in (0.001, 0.01, 0.1, 0.2, 0.3, 0.5, 1, 2, 3, 10, 100) if limits[0] <= tick <= limits[1]]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.grid(alpha=0.25)
    groups: list[list[str]] = []
    for name, ys in curves.items():
        family = [one for one in groups if STYLES[one[0]][0] == STYLES[name][0]]
        alike = (one for one in family if close(ys, curves[one[0]], limits[0]))
        group = next(alike, None)
        groups.append([name]) if group is None else group.append(name)
    heights = []
    for group in groups:
        color, style = STYLES[group[0]]
        ys = [max(y, limits[0]) for y in curves[group[0]]]
        axes.plot(x, ys, color=color, linestyle=style, lw=2)
        heights.append(min(1.0, math.log(ys[-1] / limits[0]) / math.log(limits[1] / limits[0])))
    labels = [textwrap.fill(", ".join(group).replace("e, no", "e,\u00a0no"), 17) for group in groups]
    places = spread(heights, [0.058 * (1 + label.count("\n")) for label in labels])
    for group, height, label, place in zip(groups, heights, labels, places, strict=True):
        color, _ = STYLES[group[0]]
        axes.plot([1, 1.05], [height, place], color=color, lw=0.8, transform=axes.transAxes, clip_on=False)
        axes.text(1.06, place, label, color=color, va="center", linespacing=1, transform=axes.transAxes)


def close(ys: list[float], others: list[float], floor: float) -> bool:
    """Return True if the curves look the same."""
    return all(abs(math.log(max(a, floor) / max(b, floor))) < 0.05 for a, b in zip(ys, others, strict=True))


def spread(heights: list[float], sizes: list[float]) -> list[float]:
    """Return the middles of labels, moved apart so that none overlap; the highest is at most 1."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = dict(enumerate(heights))
    for low, high in pairwise(order):
        placed[high] = max(placed[high], placed[low] + (sizes[low] + sizes[high]) / 2)
    placed[order[-1]] = min(placed[order[-1]], 1.0)
    for low, high in reversed(list(pairwise(order))):
        placed[low] = min(placed[low], placed[high] - (sizes[low] + sizes[high]) / 2)
    return [placed[at] for at in range(len(heights))]


def rows(short: Results) -> Iterator[str]:
    """Yield all figures of the short answers as aligned text."""
    yield f"{'noise':<13}{'update':<7}{'baseline':<9}{'correction':<17}{'KL':>7}" + "".join(f"{x:>10}" for x in FIGURES)
    for (noise, update, baseline, name, kl), figures in short.items():
        values = "".join(f"{figures[one]:>10.4f}" for one in FIGURES)
        yield f"{noise:<13}{update:<7}{baseline:<9}{name:<17}{kl:>7g}{values}"


def table(short: Results, long: Results) -> str:
    """Return the most important figures as a Markdown table."""
    tokens, large = max(key[-1] for key in long), LONG_KLS[-1]
    head = ["", f"bias, KL {large}", "noise", "ess", *(f"error, KL {kl}" for kl in (0.002, large, SHOWN_KL))]
    head += [f"{tokens} tokens: {one}, KL {kl}" for one in ("error", "direction", "ess") for kl in LONG_KLS]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in STYLES:
        cells = [short[*SHOWN, name, large][one] for one in ("bias", "noise", "ess")]
        cells += [short[*SHOWN, name, kl]["rms"] for kl in (0.002, large, SHOWN_KL)]
        cells += [long[name, kl, tokens][one] for one in ("rms", "direction", "ess") for kl in LONG_KLS]
        lines.append(f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} |")
    return "\n".join(lines)


def advice(short: Results, long: Results) -> str:
    """Return the conclusions from the figures as Markdown. Check that they still hold if the figures change."""
    tokens = max(key[-1] for key in long)

    def near(name: str, figure: str = "rms", kl: float = 0.025, update: str = "later") -> str:
        return f"{short['heavy-tailed', update, 'own', name, kl][figure]:.2f}"

    def far(name: str, figure: str = "rms", kl: float = 0.005) -> str:
        return f"{long[name, kl, tokens][figure]:.2f}"

    return f"""Error, bias and noise are in units of the true gradient's length, the error that of an update of \
{ANSWERS} answers; heavy tails, {SHORT} tokens and a later update, or {tokens} tokens and the first update. Gaussian \
noise and first updates of short answers are in `objectives.json`; `benchmarks/objectives.py` defines all of it.

- **Weights of tokens, with a cap: `qurl` or `flashrl`.** At KL 0.025 their error is {near("flashrl")}: \
{near("ignore")} with `ignore`, {near("naive")} with `naive`, {near(ON_POLICY)} on policy. The two cannot be told \
apart up to KL 0.1, and `mis` is close. Without a cap (`decoupled`) heavy tails cost little at KL 0.025 \
({near("decoupled")}) and much at 0.1: {near("decoupled", kl=0.1)}, against {near("flashrl", kl=0.1)}. `veto` \
changes nothing here; the floor of `ais` acts from about KL 0.1 on, and at 0.3 its error is {near("ais", kl=0.3)}, \
against {near("flashrl", kl=0.3)}.
- **Never `naive`**: the noise of b carries tokens over the clip bounds. Its bias at KL 0.025 is \
{near("naive", "bias", update="first")} in the first update and {near("naive", "bias")} in a later one.
- **Weights of answers only where answers are short.** With {SHORT} tokens `sequence_tis` has the least error, \
{near("sequence_tis")}; with {tokens} it is {far("sequence_tis")} at KL 0.005, at an effective sample size of \
{far("sequence_tis", "ess")}, and {far("sequence_tis", kl=0.025)} at KL 0.025 ({far("sequence_tis", "ess", 0.025)}). \
`flashrl`: {far("flashrl")} and {far("flashrl", kl=0.025)}.
- **Rejection needs bounds that fit the KL that is logged.** Log rho is -KL in the mean, so that `geometric`, which \
keeps 0.999 to 1.001, drops most answers above KL 0.001, long ones too: with {tokens} tokens and KL 0.005 the \
effective sample size is {far("geometric", "ess")}. `k2` and `k3`, below 0.01, keep long answers at KL 0.005 \
(effective sample size {far("k3", "ess")}) and none at 0.025 ({far("k3", "ess", 0.025)}); they reject many short \
ones.
- **`ignore` loses little on long answers**, as the advantages compare answers of the same engine: with {tokens} \
tokens {far("ignore")} at KL 0.005 and {far("ignore", kl=0.025)} at 0.025, against {far("flashrl")} and \
{far("flashrl", kl=0.025)}. At the lower KL that is no more than the error of sampling.

Limits: a policy over {V} tokens whose gradient is easy to see. A real one is noisier: bias counts less there, \
effective sample size more. In the later update far more tokens are clipped, about a fifth, than in real runs. What \
adds up over hundreds of steps, by which `ignore` falls behind in published runs, is not in figures of one update.
"""
