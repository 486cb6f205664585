"""Sampled rollouts as HTML: every token is coloured by the difference of its log-probs between engine and learner.

The text comes from a policy and may contain anything. It is escaped here. Characters that are invisible, or that would
reverse the direction of the line, are shown as signs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any

from markupsafe import Markup, escape

from qurl_ray.report.axes import short, signed
from qurl_ray.runs.files import finite

GAP_BOUNDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Bounds of gaps, in nats. A gap of at least the i-th bound has the i-th colour; fixed, so that runs are comparable."""
PROBABILITY_BOUNDS = (0.9, 0.5, 0.1, 0.01)
"""Bounds of probabilities. A probability below the i-th bound has the i-th colour."""
_MAX_LOG_RHO = 20.0
"""Limit of |log rho|, the same as in the objective (rl.ratios)."""
_HEAD, _TAIL = 400, 200
"""Numbers of tokens shown at the beginning and at the end of a long answer."""
_TOKEN_CHARACTERS, _TEXT_CHARACTERS = 200, 4000
_WIDE_FROM = 160
"""Length of prompt or answer, in characters, above which a sample gets the whole width."""
_CONTROL_PICTURES = 0x2400
_NEW_ROW = Markup('<i class="cut">new row: the conversation as the chat template writes it</i>')


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Mismatch between the log-probs of engine and learner for the tokens of one answer."""

    gap: float
    """Gap with the largest absolute value, engine's log-prob minus the learner's, in nats."""
    max_rho: float
    ess: float
    """Effective sample size (Σ rho)² / (n Σ rho²), as a share of the n tokens with log-probs of both."""


def mismatch(engine: Sequence[float | None], learner: Sequence[float | None]) -> Mismatch | None:
    """Compute the mismatch from both log-probs of each token. Return None if no token has both."""
    gaps = [b - p for b, p in zip(engine, learner, strict=False) if b is not None and p is not None]
    if not gaps:
        return None
    rhos = [_rho(gap) for gap in gaps]
    ess = math.fsum(rhos) ** 2 / (len(rhos) * math.fsum(rho * rho for rho in rhos))
    return Mismatch(gap=max(gaps, key=abs), max_rho=max(rhos), ess=ess)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """One sampled rollout, formatted for the page."""

    uid: str
    prompt: Markup
    answer: Markup
    expected: Markup | None
    reward: str
    solved: bool
    status: str
    note: str
    """Text on the largest gap between engine and learner; "" if one of them is unknown."""
    turns: str
    """Text on the rewards and advantages that differ between the turns; "" if there are none."""
    coloring: str
    """Meaning of the token colours: `gap`, `probability` or `none`."""
    wide: bool


def view(sample: dict[str, Any]) -> SampleView:
    """Format a line of samples.jsonl. Missing fields are omitted."""
    tokens = sample.get("tokens")
    tokens = tokens if isinstance(tokens, list) and all(isinstance(token, str) for token in tokens) else None
    engine, learner = numbers(sample.get("logprobs")), numbers(sample.get("proximal_logprobs"))
    comparison = mismatch(engine, learner)
    if not tokens or not any(b is not None for b in engine):
        coloring = "none"
    else:
        coloring = "gap" if comparison else "probability"
    answer = visible(str(sample.get("answer", "")))
    if tokens:
        answer = _tokens(tokens, engine, learner, said_by(sample), new_rows(sample))
    prompt, expected = str(sample.get("prompt", "")), sample.get("expected")
    reward = finite(sample.get("reward"))
    turns = turn_views(sample)
    figures = {
        "rewards": ["–" if turn.reward is None else short(turn.reward) for turn in turns],
        "advantages": ["–" if turn.advantage is None else signed(f"{turn.advantage:+.3f}") for turn in turns],
    }
    differing = {name: texts for name, texts in figures.items() if len(set(texts)) > 1}
    return SampleView(
        uid=str(sample.get("uid", "")),
        prompt=visible(prompt, spaces=False),
        answer=answer,
        expected=None if expected is None else visible(str(expected), spaces=False),
        reward="–" if reward is None else short(reward),
        solved=reward is not None and reward > 0.5,
        status=str(sample.get("status", "")),
        turns=" · ".join(f"{name} of turns {', '.join(texts)}" for name, texts in differing.items()),
        note=f"largest gap {signed(format(comparison.gap, '+.3g'))} nats" if tokens and comparison else "",
        coloring=coloring,
        wide=max(len(prompt), len("".join(tokens or [])), len(str(sample.get("answer", "")))) > _WIDE_FROM,
    )


def visible(text: str, *, spaces: bool = True, limit: int = _TEXT_CHARACTERS) -> Markup:
    """Escape at most `limit` characters of `text`, with signs for invisible ones (and for spaces, if `spaces`)."""
    shown = text[:limit]
    parts: list[Markup] = []
    for as_it_is, chars in groupby(shown, key=lambda char: char.isprintable() and (char != " " or not spaces)):
        run = "".join(chars)
        parts += [escape(run)] if as_it_is else map(_sign, run)
    if len(text) > limit:
        parts.append(Markup('<i class="cut">… {:,} characters more</i>').format(len(text) - limit))
    return Markup("").join(parts)


def gap_class(gap: float) -> str:
    """Style class: `e1` … `e6` if the engine's log-prob is larger, `l1` … `l6` if the learner's, "" for a small gap."""
    level = sum(abs(gap) >= bound for bound in GAP_BOUNDS)
    return f"{'e' if gap > 0 else 'l'}{level}" if level else ""


def probability_class(logprob: float) -> str:
    """Style class: `q1` (probability below 0.9) … `q4` (below 0.01), "" for a token that was nearly certain."""
    level = sum(logprob < math.log(bound) for bound in PROBABILITY_BOUNDS)
    return f"q{level}" if level else ""


def said_by(sample: dict[str, Any]) -> list[bool]:
    """Return for each token of a line of samples.jsonl whether an environment gave it; [] if nothing is recorded."""
    runs = sample.get("versions")
    try:
        return [number < 0 for number, count in runs for _ in range(count)] if isinstance(runs, list) else []
    except (TypeError, ValueError):
        return []


def new_rows(sample: dict[str, Any]) -> list[int]:
    """Return the numbers of tokens of a line of samples.jsonl after which a new row begins; [] if nothing valid is
    recorded."""
    rows = sample.get("rows")
    return rows if isinstance(rows, list) and all(isinstance(row, int) for row in rows) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnView:
    """Turn of a trajectory, as samples.jsonl has it."""

    end: int
    """Number of tokens of the answer up to its end."""
    reward: float | None
    advantage: float | None
    """Advantage of its tokens; None if they have that of the trajectory, or it is not known."""


def turn_views(sample: dict[str, Any]) -> list[TurnView]:
    """Return the turns of a line of samples.jsonl; [] if nothing valid is recorded."""
    turns = sample.get("credit")
    if not isinstance(turns, list):
        return []
    if not all(isinstance(turn, dict) and isinstance(turn.get("end"), int) for turn in turns):
        return []
    return [
        TurnView(end=turn["end"], reward=finite(turn.get("reward")), advantage=finite(turn.get("advantage")))
        for turn in turns
    ]


def _tokens(
    tokens: Sequence[str],
    engine: Sequence[float | None],
    learner: Sequence[float | None],
    said: Sequence[bool],
    new_rows: Sequence[int],
) -> Markup:
    columns = zip_longest(tokens, engine[: len(tokens)], learner[: len(tokens)], said[: len(tokens)])
    shown = [(_NEW_ROW if t in new_rows else Markup("")) + _token(*column) for t, column in enumerate(columns)]
    if len(shown) <= _HEAD + _TAIL:
        return Markup("").join(shown)
    cut = Markup('<i class="cut">… {:,} tokens that only samples.jsonl has …</i>').format(len(shown) - _HEAD - _TAIL)
    return Markup("").join([*shown[:_HEAD], cut, *shown[-_TAIL:]])


def _token(token: str, b: float | None, p: float | None, said: bool | None) -> Markup:
    """Format a token with its colour, and a tooltip with its numbers. b is the engine's log-prob, p the learner's."""
    kind, title = "", "no log-prob was recorded"
    if said:
        kind, title = "said", "from the environment"
    elif b is not None and p is not None:
        kind = gap_class(b - p)
        title = f"engine {_nats(b)} · learner {_nats(p)} · gap {_nats(b - p, '+')} nats · rho {_rho(b - p):.4g}"
    elif b is not None:
        kind, title = probability_class(b), f"engine {_nats(b)} · probability {short(math.exp(min(0.0, b)))}"
    text = visible(token, limit=_TOKEN_CHARACTERS) or Markup('<i class="sign">∅</i>')
    return Markup('<span class="{}" title="{}">{}</span>').format(f"t {kind}".rstrip(), title, text)


def _sign(char: str) -> Markup:
    """Return the sign that represents an invisible character."""
    code = ord(char)
    if char == "\n":
        return Markup('<i class="sign">⏎</i><br>')
    if char == " ":
        return Markup('<i class="sign">·</i>')
    if char == "\t":
        return Markup('<i class="sign">⇥</i>')
    sign = chr(_CONTROL_PICTURES + code) if code < ord(" ") else f"U+{code:04X}"
    return Markup('<i class="sign">{}</i>').format(sign)


def _rho(gap: float) -> float:
    return math.exp(min(_MAX_LOG_RHO, max(-_MAX_LOG_RHO, -gap)))


def _nats(value: float, sign: str = "") -> str:
    return signed(format(value, f"{sign}.4f"))


def numbers(values: Any) -> list[float | None]:
    """Return the finite numbers of a list, with None for other entries; [] if `values` is not a list."""
    return [finite(value) for value in values] if isinstance(values, list) else []
