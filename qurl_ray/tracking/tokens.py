"""Sampled rollouts as a page shows them: every token coloured by how differently engine and learner see it.

The text comes from a policy, so it may hold anything. It is escaped here, and what would be invisible, or would turn
the line around, is shown as a sign.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any

from markupsafe import Markup, escape

from qurl_ray.tracking.axes import short, signed
from qurl_ray.tracking.run_files import finite

GAP_BOUNDS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Nats. A gap of at least the i-th bound has the i-th colour; fixed, so that runs can be compared."""
PROBABILITY_BOUNDS = (0.9, 0.5, 0.1, 0.01)
"""A probability below the i-th bound has the i-th colour."""
_MAX_LOG_RHO = 20.0
"""As in the objective."""
_HEAD, _TAIL = 400, 200
"""Tokens shown of a long answer."""
_TOKEN_CHARACTERS, _TEXT_CHARACTERS = 200, 4000
_WIDE_FROM = 160
"""Characters of prompt or answer from which a sample gets the whole width."""
_CONTROL_PICTURES = 0x2400


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """Of one answer: how differently engine and learner see its tokens."""

    gap: float
    """The largest by size, engine's log-prob minus the learner's, in nats."""
    max_rho: float
    ess: float
    """(Σ rho)² / (n Σ rho²), effective sample size as a share of the n tokens that both have seen."""


def mismatch(engine: Sequence[float | None], learner: Sequence[float | None]) -> Mismatch | None:
    """None if no token has a log-prob of both."""
    gaps = [b - p for b, p in zip(engine, learner, strict=False) if b is not None and p is not None]
    if not gaps:
        return None
    rhos = [_rho(gap) for gap in gaps]
    ess = math.fsum(rhos) ** 2 / (len(rhos) * math.fsum(rho * rho for rho in rhos))
    return Mismatch(gap=max(gaps, key=abs), max_rho=max(rhos), ess=ess)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """One sampled rollout, ready for the page."""

    uid: str
    prompt: Markup
    answer: Markup
    expected: Markup | None
    reward: str
    solved: bool
    status: str
    note: str
    """How far apart engine and learner are, if both are known."""
    coloring: str
    """`gap`, `probability` or `none`: what the colours of the tokens mean."""
    wide: bool


def view(sample: dict[str, Any]) -> SampleView:
    """A line of samples.jsonl; whatever it lacks is left out."""
    tokens = sample.get("tokens")
    tokens = tokens if isinstance(tokens, list) and all(isinstance(token, str) for token in tokens) else None
    engine, learner = numbers(sample.get("logprobs")), numbers(sample.get("proximal_logprobs"))
    found = mismatch(engine, learner)
    coloring = "none" if not tokens or not any(b is not None for b in engine) else "gap" if found else "probability"
    answer = _tokens(tokens, engine, learner) if tokens else visible(str(sample.get("answer", "")))
    prompt, expected = str(sample.get("prompt", "")), sample.get("expected")
    reward = finite(sample.get("reward"))
    return SampleView(
        uid=str(sample.get("uid", "")),
        prompt=visible(prompt, spaces=False),
        answer=answer,
        expected=None if expected is None else visible(str(expected), spaces=False),
        reward="–" if reward is None else short(reward),
        solved=reward is not None and reward > 0.5,
        status=str(sample.get("status", "")),
        note=f"largest gap {signed(format(found.gap, '+.3g'))} nats" if tokens and found else "",
        coloring=coloring,
        wide=max(len(prompt), len("".join(tokens or [])), len(str(sample.get("answer", "")))) > _WIDE_FROM,
    )


def visible(text: str, *, spaces: bool = True, limit: int = _TEXT_CHARACTERS) -> Markup:
    """`text` escaped, with signs for what cannot be seen (for spaces too, if asked), and at most `limit` characters."""
    shown = text[:limit]
    parts: list[Markup] = []
    for as_it_is, chars in groupby(shown, key=lambda char: char.isprintable() and (char != " " or not spaces)):
        run = "".join(chars)
        parts += [escape(run)] if as_it_is else map(_sign, run)
    if len(text) > limit:
        parts.append(Markup('<i class="cut">… {:,} characters more</i>').format(len(text) - limit))
    return Markup("").join(parts)


def gap_class(gap: float) -> str:
    """`e1` … `e6` where the engine thinks the token likelier, `l1` … `l6` where the learner does, "" if neither."""
    level = sum(abs(gap) >= bound for bound in GAP_BOUNDS)
    return f"{'e' if gap > 0 else 'l'}{level}" if level else ""


def probability_class(logprob: float) -> str:
    """`q1` (below 0.9) … `q4` (below 0.01), "" for a token that was nearly certain."""
    level = sum(logprob < math.log(bound) for bound in PROBABILITY_BOUNDS)
    return f"q{level}" if level else ""


def _tokens(tokens: Sequence[str], engine: Sequence[float | None], learner: Sequence[float | None]) -> Markup:
    rows = list(zip_longest(tokens, engine[: len(tokens)], learner[: len(tokens)]))
    if len(rows) <= _HEAD + _TAIL:
        return Markup("").join(_token(*row) for row in rows)
    cut = Markup('<i class="cut">… {:,} tokens that only samples.jsonl has …</i>').format(len(rows) - _HEAD - _TAIL)
    return Markup("").join([*(_token(*row) for row in rows[:_HEAD]), cut, *(_token(*row) for row in rows[-_TAIL:])])


def _token(token: str, b: float | None, p: float | None) -> Markup:
    """A token with its colour, and its numbers for the pointer. b is the engine's log-prob, p the learner's."""
    kind, title = "", "no log-prob was recorded"
    if b is not None and p is not None:
        kind = gap_class(b - p)
        title = f"engine {_nats(b)} · learner {_nats(p)} · gap {_nats(b - p, '+')} nats · rho {_rho(b - p):.4g}"
    elif b is not None:
        kind, title = probability_class(b), f"engine {_nats(b)} · probability {short(math.exp(min(0.0, b)))}"
    text = visible(token, limit=_TOKEN_CHARACTERS) or Markup('<i class="sign">∅</i>')
    return Markup('<span class="{}" title="{}">{}</span>').format(f"t {kind}".rstrip(), title, text)


def _sign(char: str) -> Markup:
    """What stands for a character that has no picture of its own."""
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
    """A list's finite numbers, None for what is none; [] if it is no list."""
    return [finite(value) for value in values] if isinstance(values, list) else []
