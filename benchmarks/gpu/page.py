"""The page of figures: one HTML file with drawings in SVG, which loads nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks.gpu.bench import Figures
from qurl_ray import report
from qurl_ray.report.axes import linear_axis, short

STYLE = """
svg { max-width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--text); } .end { text-anchor: end; }
.mid { text-anchor: middle; } .bar { fill: var(--c); } .grid { stroke: var(--grid); }
.line { fill: none; stroke: var(--c); stroke-width: 2; } .dashed { stroke-dasharray: 6 4; }
figure { margin: 14px 0; } figcaption { font-weight: 600; } ul { padding-left: 20px; } li { overflow-wrap: anywhere; }
"""
COLORS = {"none": 1, "int8": 2, "fp8": 3, "fp8_block": 4}
"""Numbers of the style sheet's colours, by number format; other things have the fifth."""
_NO_PARTS = ("machine", "errors", "skipped", "seconds")
_CATEGORIES = 10
"""Largest number of different x that are drawn evenly spaced, each with its value below."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart."""

    label: str
    points: Sequence[tuple[float, float]]
    color: int
    dashed: bool = False


def page(figures: Figures) -> str:
    """Return the page of a file of figures, as HTML."""
    machine, parts = figures["machine"], [key for key in figures if key not in _NO_PARTS]
    sections = [_listed("Machine", [f"{key}: {value}" for key, value in machine.items()])]
    if machine["sizes"] == "tiny":
        sections.append("<p><strong>Tiny shapes: this page shows that the kit runs, and no speed.</strong></p>")
    for name in parts:
        drawings = "".join(PICTURES[name](figures[name])) if name in PICTURES and figures[name] else ""
        lines = [f"{key}: {one['summary']}" for key, one in figures[name].items()]
        sections.append(_listed(f"{name}, {figures['seconds'].get(name, 0.0):.0f} s", lines, drawings))
    for kind in ("errors", "skipped"):
        if figures[kind]:
            sections.append(_listed(kind, [f"{key}: {why}" for key, why in figures[kind].items()]))
    style = Path(report.__path__[0], "page.css.j2").read_text(encoding="utf-8") + STYLE
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(str(machine['device']))}</title><style>{style}</style></head>\n"
        f"<body><main><h1>{escape(str(machine['device']))}</h1>\n{''.join(sections)}</main></body></html>\n"
    )


def _listed(title: str, lines: Sequence[str], drawings: str = "") -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<section class="card"><h2>{escape(title)}</h2>{drawings}<ul>{items}</ul></section>\n'


# --- what is drawn of each part --------------------------------------------------------------------------------------


def _runs(found: Figures) -> Iterator[str]:
    shares = {f"{name}, {when}": one[f"accuracy_{when}"] for name, one in found.items() for when in ("before", "after")}
    yield bars("Share of held-out problems solved", shares)
    yield bars("Seconds of a step and of its phases", _phases(found))


def _unified(found: Figures) -> Iterator[str]:
    for shape, one in found.items():
        yield bars(
            f"{shape}: one layer's linears, both passes, ms", {k: w["ms_of_a_layer"] for k, w in one["ways"].items()}
        )


def _gradients(found: Figures) -> Iterator[str]:
    for size, one in found.items():
        parts = {f"{way}, {p}": 1000 * s for way, parts in one["seconds"].items() for p, s in parts.items()}
        yield bars(f"{size}, {one['tokens']} tokens: a linear's products, ms", parts)


def _step(found: Figures) -> Iterator[str]:
    speeds = {
        f"{key}, {name}": speed
        for key, one in found.items()
        for name, speed in one.get("extrapolated_tokens_per_second", {}).items()
    }
    if speeds:
        yield bars("Tokens of a learner's step per second, extrapolated to all layers", speeds)


def _rollout(found: Figures) -> Iterator[str]:
    for shape, keys in _by_shape(found):
        lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for key in keys:
            _, way, batch = key.split(", ")
            for name, one in found[key]["formats"].items():
                point = (float(batch.removeprefix("batch ")), one["extrapolated_tokens_per_second"])
                lines.setdefault((name, way), []).append(point)
        yield chart(f"{shape}, torch engine: tokens per second by batch, extrapolated to all layers", _by_way(lines))


def _vllm(found: Figures) -> Iterator[str]:
    for shape, keys in _by_shape(found):
        lines = {}
        for key in keys:
            _, way, name = key.split(", ", 2)
            lines[name, way] = [(float(b), one["tokens_per_second"]) for b, one in found[key]["batches"].items()]
        yield chart(f"{shape}, vLLM: tokens per second by batch", _by_way(lines))
        if rows := [row for key in keys for row in _beside_limits(key, found[key])]:
            yield table(f"{shape}, vLLM: milliseconds of a decode step, and the least that the data sheet allows", rows)


def _beside_limits(key: str, figures: Figures) -> Iterator[Mapping[str, str]]:
    """Yield a row for each batch whose limits are known."""
    _, _, name = key.split(", ", 2)
    for count, one in figures["batches"].items():
        if limits := one.get("limit_ms"):
            on_gpu, share = one.get("on_the_gpu_ms", {}).get("all"), one.get("saved_share")
            yield {
                "format": name,
                "sequences": count,
                "measured": f"{one['ms']:.2f}",
                "of it on the GPU": "" if on_gpu is None else f"{on_gpu:.2f}",
                "at best": f"{limits['all']:.2f}",
                **{part: f"{ms:.2f}" for part, ms in limits.items() if part != "all"},
                "saved, of the saved bytes' time": "" if share is None else f"{share:.2f}",
            }


def _by_shape(found: Figures) -> Iterator[tuple[str, list[str]]]:
    """Yield each shape with its keys, which a later run may have added to."""
    for shape in dict.fromkeys(key.partition(",")[0] for key in found):
        yield shape, [key for key in found if key.startswith(f"{shape},")]


def _by_way(lines: Mapping[tuple[str, str], Sequence[tuple[float, float]]]) -> list[Line]:
    return [
        Line(f"{name}, {way}", sorted(points), _color(name), way == "eager") for (name, way), points in lines.items()
    ]


def _codes(found: Figures) -> Iterator[str]:
    shares = {key: one["share_with_ties"] for key, one in found.items()}
    yield bars("Share of activation codes that differ from the reference's, those between two codes included", shares)


def _loads(found: Figures) -> Iterator[str]:
    lines = []
    for key, one in found.items():
        engine = key.partition(",")[0]
        points = [((i + 1) / len(one["gaps"]), gap) for i, gap in enumerate(one["gaps"])]
        lines.append(Line(key, points, _color(key), engine == "torch"))
    yield chart("Difference to the learner of an answer's log-probs, nats, by share of answers below it", lines)


def _sleeps(found: Figures) -> Iterator[str]:
    lines = [
        Line(f"{engine}, {where}", list(enumerate(values, 1)), 1 if engine == "vllm" else 2, where == "host")
        for engine, one in found.items()
        for where, values in one["mib"].items()
    ]
    yield chart("Memory after each cycle, MiB", lines)


def _sync(found: Figures) -> Iterator[str]:
    yield bars("Seconds of a sync", {key: one["seconds"] for key, one in found.items()})


def _training(found: Figures) -> Iterator[str]:
    yield bars("Seconds of a step and of its phases", _phases(found))


def _phases(found: Figures) -> Mapping[str, float]:
    return {f"{name}, {phase}": s for name, one in found.items() for phase, s in one["seconds"].items()}


PICTURES: dict[str, Callable[[Figures], Iterator[str]]] = {
    "runs": _runs,
    "unified": _unified,
    "gradients": _gradients,
    "step": _step,
    "rollout": _rollout,
    "codes": _codes,
    "vllm": _vllm,
    "loads": _loads,
    "sleeps": _sleeps,
    "sync": _sync,
    "training": _training,
}

# --- drawings --------------------------------------------------------------------------------------------------------


def _drawing(title: str, size: tuple[int, int], content: str, legend: str = "") -> str:
    width, height = size
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>{legend}"
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">{content}</svg></figure>'
    )


def _color(label: str) -> int:
    return next((color for name, color in COLORS.items() if name in label.split(", ")), 5)


def bars(title: str, values: Mapping[str, float]) -> str:
    """Draw a bar for each value, in their order, with its label and number."""
    largest, content = max(values.values()) or 1.0, []
    for at, (label, value) in enumerate(values.items()):
        y, width = 22 * at, 300 * value / largest
        content.append(f'<text class="end" x="290" y="{y + 15}">{escape(label)}</text>')
        content.append(f'<rect class="bar c{_color(label)}" x="300" y="{y + 3}" width="{width:.1f}" height="16"/>')
        content.append(f'<text x="{306 + width:.1f}" y="{y + 15}">{short(value)}</text>')
    return _drawing(title, (700, 22 * len(values)), "".join(content))


def table(title: str, rows: Sequence[Mapping[str, str]]) -> str:
    """Draw a table of rows with equal columns."""
    head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row.values())}</tr>" for row in rows)
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></figure>"
    )


def chart(title: str, lines: Sequence[Line]) -> str:
    """Draw lines from zero. Few different x are spaced evenly, many by their values."""
    left, top, width, height = 70, 10, 600, 220
    xs = sorted({x for line in lines for x, _ in line.points})
    if len(xs) <= _CATEGORIES:
        places = {x: (i + 0.5) / len(xs) for i, x in enumerate(xs)}
        ticks = [(place, short(x)) for x, place in places.items()]
    else:
        axis = linear_axis(0, xs[-1])
        places, ticks = {x: axis.share(x) for x in xs}, [(axis.share(x), text) for x, text in axis.ticks]
    vertical = linear_axis(0, max(y for line in lines for _, y in line.points), zero=True)
    content = []
    for value, text in vertical.ticks:
        y = top + height * (1 - vertical.share(value))
        content.append(f'<path class="grid" d="M{left} {y:.1f}h{width}"/>')
        content.append(f'<text class="end" x="{left - 6}" y="{y + 4:.1f}">{text}</text>')
    for place, text in ticks:
        content.append(f'<text class="mid" x="{left + width * place:.1f}" y="{top + height + 18}">{text}</text>')
    for line in lines:
        path = "L".join(
            f"{left + width * places[x]:.1f} {top + height * (1 - vertical.share(y)):.1f}" for x, y in line.points
        )
        kind = f"line c{line.color}" + " dashed" * line.dashed
        content.append(f'<path class="{kind}" d="M{path}"/>')
    names = "".join(
        f'<li class="c{line.color}"><span class="swatch"></span>{escape(line.label)}{" (dashed)" * line.dashed}</li>'
        for line in lines
    )
    return _drawing(title, (left + width + 20, top + height + 26), "".join(content), f'<ul class="legend">{names}</ul>')
