"""Which correction to pick: python benchmarks/objectives.py (80 seconds on one core), or --quick for a look.

Every correction of qurl_ray.config.algorithm.PRESETS is put through the real objective. The gradient that it gives from
answers of b, the quantized engine, is compared with the gradient that the same clipped objective gives from answers of
p, the policy to be trained. A policy of three tokens, with logits that depend on the last two, is small enough for sums
over all answers of six tokens: expectations are exact. Longer answers are sampled.

    b         p with noise on the logits, half of its variance per context and half per prefix: gaussian, or heavy tails
              (Student's t with 2 degrees of freedom), scaled to the requested KL(b‖p) per token
    theta     p after a step along the gradient: first update, theta = p; later update, R = theta/p up to 2 or down to ½
    A         (r - mean r) / std r among the answers of its policy; r = 1 for the best by a sum of random scores
    bias      ‖E_b g - E_p g‖ / ‖E_p g‖
    noise     sqrt(trace Cov_b g) / ‖E_p g‖ of a single answer
    rms       sqrt(bias² + noise²/512), the error of an update of 512 answers; no update at all has an error of 1
    direction the error of an update of the best length, sqrt(1 - <E_b g, E_p g>² / (‖E_p g‖² E‖update‖²))
    ess       (E w)² / E w² of the final weights of tokens; for naive, whose weights are within its ratio, of rho

Figures are medians over random policies with fixed seeds.
"""

import json
import math
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from objectives_report import (
    ANSWERS,
    LONG_KLS,
    ON_POLICY,
    SHORT,
    SHOWN_KL,
    UNCAPPED,
    Results,
    V,
    advice,
    draw,
    rows,
    table,
)
from shared import RESULTS, machine

from qurl_ray.config.algorithm import DAPO, PRESETS
from qurl_ray.rl.corrections import CorrectionSettings, correct, strength
from qurl_ray.rl.objective import Denominators, ObjectiveSettings, objective
from qurl_ray.rl.ratios import log_ratio
from qurl_ray.training.rank.objectives import correction_settings

CONTEXTS = 9
KLS = (1e-4, 5e-4, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.3)
LENGTHS = (8, 32, 128, 512)
CHUNK, PILOT = 256, 256
NOISES = {True: "heavy-tailed", False: "gaussian"}

torch.set_default_dtype(torch.float64)


def corrections() -> dict[str, CorrectionSettings]:
    """Return the presets without duplicates and metrics-only ones, and one correction that has no bias at all."""
    found = {name: correction_settings(preset) for name, preset in PRESETS.items() if not preset.metrics_only}
    first = {settings: name for name, settings in reversed(found.items())}
    return {name: one for name, one in found.items() if first[one] == name} | {
        UNCAPPED: CorrectionSettings(weight="sequence")
    }


# --- policies and answers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A random policy p, noise for its contexts, and the scores that decide the reward. K contexts, V tokens."""

    logits_KV: torch.Tensor
    noise_KV: torch.Tensor
    scores_KV: torch.Tensor
    draw: Callable[..., torch.Tensor]
    """Function that draws noise of a given shape."""
    random: torch.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """All possible answers, or sampled ones."""

    exact: bool
    tokens_BT: torch.Tensor
    contexts_BT: torch.Tensor
    noise_BTV: torch.Tensor
    """Noise of the logits before each token."""


def problem(seed: int, *, heavy: bool) -> Problem:
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        noise = torch.randn(*shape, generator=random)
        return noise / torch.empty(*shape).exponential_(generator=random).sqrt() if heavy else noise

    return Problem(
        logits_KV=1.5 * torch.randn(CONTEXTS, V, generator=random),
        scores_KV=torch.randn(CONTEXTS, V, generator=random),
        noise_KV=draw(CONTEXTS, V),
        draw=draw,
        random=random,
    )


def enumerated(given: Problem) -> Answers:
    """Return all answers of six tokens."""
    tokens_BT = torch.cartesian_prod(*[torch.arange(V)] * SHORT)
    padded_BT = torch.nn.functional.pad(tokens_BT, (2, 0))
    contexts_BT = padded_BT[:, :SHORT] * V + padded_BT[:, 1 : SHORT + 1]
    # answers with the same first t tokens are adjacent
    noises = [given.draw(V**t, V).repeat_interleave(V ** (SHORT - t), dim=0) for t in range(SHORT)]
    noise_BTV = (torch.stack(noises, dim=1) + given.noise_KV[contexts_BT]) * 0.5**0.5
    return Answers(exact=True, tokens_BT=tokens_BT, contexts_BT=contexts_BT, noise_BTV=noise_BTV)


def sampled(given: Problem, scale: float, count: int, length: int) -> Answers:
    """Draw answers from p with `scale` times the noise, which is new for each prefix of each answer."""
    tokens_BT, contexts_BT = torch.zeros(2, count, length, dtype=torch.long)
    noise_BTV = given.draw(count, length, V)
    context_B = torch.zeros(count, dtype=torch.long)
    for t in range(length):
        contexts_BT[:, t] = context_B
        noise_BTV[:, t] = (noise_BTV[:, t] + given.noise_KV[context_B]) * 0.5**0.5
        logits_BV = given.logits_KV[context_B] + scale * noise_BTV[:, t]
        tokens_BT[:, t] = torch.multinomial(logits_BV.softmax(-1), 1, generator=given.random)[:, 0]
        context_B = context_B % V * V + tokens_BT[:, t]
    return Answers(exact=False, tokens_BT=tokens_BT, contexts_BT=contexts_BT, noise_BTV=noise_BTV)


def logprobs(given: Problem, answers: Answers, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs of the tokens under b (p with `scale` times the noise), and KL(b‖p) before each; both [B, T]."""
    logits_BTV = given.logits_KV[answers.contexts_BT]
    p_BTV, b_BTV = logits_BTV.log_softmax(-1), (logits_BTV + scale * answers.noise_BTV).log_softmax(-1)
    chosen_BT = b_BTV.gather(-1, answers.tokens_BT[:, :, None])[:, :, 0]
    return chosen_BT, (b_BTV.exp() * (b_BTV - p_BTV)).sum(-1)


def shares(answers: Answers, logprobs_BT: torch.Tensor) -> torch.Tensor:
    """Weight [B] of each answer in an expectation over the policy of these log-probs, which drew the samples."""
    return logprobs_BT.sum(1).exp() if answers.exact else torch.full((len(logprobs_BT),), 1 / len(logprobs_BT))


def scale_for(given: Problem, answers: Answers, kl: float) -> float:
    """Return the scale of the noise that gives this KL(b‖p) per token."""

    if not answers.exact:  # p's own contexts are used in place of those of b
        fields = ("tokens_BT", "contexts_BT", "noise_BTV")
        answers = Answers(exact=False, **{name: getattr(answers, name)[:PILOT] for name in fields})

    def small(log_scale: float) -> bool:
        chosen_BT, kl_BT = logprobs(given, answers, math.exp(log_scale))
        return float(shares(answers, chosen_BT) @ kl_BT.mean(1)) < kl

    return math.exp(bisect(small, -12.0, 6.0))


def bisect(below: Callable[[float], bool], low: float, high: float, *, rounds: int = 30) -> float:
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return low


# --- the estimator -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Answers in the form that the objective takes. Rows of all fields belong together."""

    tokens_BT: torch.Tensor
    contexts_BT: torch.Tensor
    prox_BT: torch.Tensor
    behavior_BT: torch.Tensor
    advantages_B: torch.Tensor
    share_B: torch.Tensor

    def parts(self) -> Iterator["Rollouts"]:
        for at in range(0, len(self.share_B), CHUNK):
            yield Rollouts(**{name: getattr(self, name)[at : at + CHUNK] for name in self.__slots__})

    def rho(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log(p/b) and the mask, which is True everywhere."""
        mask_BT = torch.ones_like(self.prox_BT, dtype=torch.bool)
        return log_ratio(self.prox_BT, self.behavior_BT, mask_BT), mask_BT


def bar(given: Problem, answers: Answers) -> float:
    """Return the score that 40 % of p's answers reach."""
    share_B = shares(answers, logprobs(given, answers, 0.0)[0])
    score_B, order_B = scores(given, answers).sort()
    return float(score_B[int((share_B[order_B].cumsum(0) < 0.6).sum())])


def scores(given: Problem, answers: Answers) -> torch.Tensor:
    return given.scores_KV[answers.contexts_BT, answers.tokens_BT].sum(1)


def rollouts(given: Problem, answers: Answers, scale: float, least: float, *, baseline: str = "own") -> Rollouts:
    """Return rollouts of b, or of p if `scale` is 0. Scores from `least` on are rewarded.

    Baseline "p", for exact answers only, takes mean and deviation of the reward from p. With it, products of rho have
    no bias; in practice, however, an engine's answers are compared among themselves.
    """
    (behavior_BT, _), (prox_BT, _) = (logprobs(given, answers, one) for one in (scale, 0.0))
    share_B, reward_B = shares(answers, behavior_BT), (scores(given, answers) >= least).double()
    mean = float((share_B if baseline == "own" else shares(answers, prox_BT)) @ reward_B)
    return Rollouts(
        tokens_BT=answers.tokens_BT,
        contexts_BT=answers.contexts_BT,
        prox_BT=prox_BT,
        behavior_BT=behavior_BT,
        advantages_B=(reward_B - mean) / (mean * (1 - mean)) ** 0.5,
        share_B=share_B,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Moments of the gradient of one answer, and effective sample size of the tokens' weights."""

    mean_N: torch.Tensor
    variance: float
    ess: float
    count: float
    """Number of samples; infinite where expectations are exact."""

    def length2(self) -> float:
        """Return ‖E g‖² without the part that sampling adds to it."""
        return max(0.0, float(self.mean_N.square().sum()) - self.variance / self.count)


CLIP = (DAPO().clip_low, DAPO().clip_high)


def moments(
    given: Rollouts,
    theta_KV: torch.Tensor,
    correction: CorrectionSettings,
    *,
    exact: bool,
    clip: tuple[float, float] = CLIP,
) -> Moments:
    """Return the moments of the objective with the bounds 1 - clip[0] and 1 + clip[1]."""
    lam = 1.0
    if correction.ess_floor is not None:
        total = sum(_weighted(part, correct(*part.rho(), correction).weight_BT) for part in given.parts())
        lam = strength(total, correction.ess_floor)
    mean_N, square, total = torch.zeros(CONTEXTS * V), 0.0, torch.zeros(3)
    for part in given.parts():
        gradient_BN = gradients(part, theta_KV, correction, lam, clip)
        mean_N += part.share_B @ gradient_BN
        square += float(part.share_B @ gradient_BN.square().sum(1))
        log_rho_BT, mask_BT = part.rho()
        weight_BT = correct(log_rho_BT, mask_BT, correction, lam).weight_BT
        total += _weighted(part, log_rho_BT.exp() if correction.ratio == "behavior" else weight_BT)
    return Moments(
        mean_N=mean_N,
        variance=max(0.0, square - float(mean_N.square().sum())),
        ess=float(total[1] ** 2 / total[2]) if total[2] else 0.0,
        count=math.inf if exact else len(given.share_B),
    )


def _weighted(part: Rollouts, weight_BT: torch.Tensor) -> torch.Tensor:
    """Means of w > 0, w and w²; rl.reduce.moments has their sums over a batch."""
    powers = ((weight_BT > 0).to(weight_BT.dtype), weight_BT, weight_BT.square())
    return torch.stack([part.share_B @ power_BT.mean(1) for power_BT in powers])


def gradients(
    part: Rollouts, theta_KV: torch.Tensor, correction: CorrectionSettings, lam: float, clip: tuple[float, float]
) -> torch.Tensor:
    """Gradient [B, K·V] of each answer's objective with respect to theta's logits."""
    at_BT = part.contexts_BT * V + part.tokens_BT
    logprobs_BT = theta_KV.log_softmax(-1).flatten()[at_BT].requires_grad_()
    settings = ObjectiveSettings(correction=correction, clip_low=clip[0], clip_high=clip[1])
    loss, _ = objective(logprobs_BT, part.prox_BT, part.behavior_BT, part.advantages_B, part.rho()[1],
                        Denominators(tokens=at_BT.shape[1], sequences=1), settings, strength=lam)  # fmt: skip
    (slope_BT,) = torch.autograd.grad(-loss, logprobs_BT)
    slope_BKV = torch.zeros(len(at_BT), CONTEXTS * V).scatter_add_(1, at_BT, slope_BT).view(-1, CONTEXTS, V)
    return (slope_BKV - slope_BKV.sum(2, keepdim=True) * theta_KV.softmax(-1)).flatten(1)


def later(given: Problem, on_p: Rollouts, ratio: float = 2.0) -> torch.Tensor:
    """Return theta after a step along the gradient, the longest one with R from 1/ratio to ratio for all tokens."""
    step_KV = moments(on_p, given.logits_KV, CorrectionSettings(), exact=True).mean_N.view(CONTEXTS, V)
    step_KV = step_KV / step_KV.norm()
    before_KV = given.logits_KV.log_softmax(-1)

    def small(size: float) -> bool:
        moved_KV = (given.logits_KV + size * step_KV).log_softmax(-1) - before_KV
        return float(moved_KV.abs().max()) < math.log(ratio)

    return given.logits_KV + bisect(small, 0.0, 100.0) * step_KV


def compared(b: Moments, p: Moments) -> dict[str, float]:
    """Return the figures that the docstring of this file defines."""
    size2 = p.length2()
    bias2 = max(0.0, float((b.mean_N - p.mean_N).square().sum()) - b.variance / b.count - p.variance / p.count) / size2
    noise2 = b.variance / size2
    update2 = b.length2() / size2 + noise2 / ANSWERS
    along = 1.0 if b is p else float(b.mean_N @ p.mean_N) / size2
    return {
        "bias": bias2**0.5,
        "noise": noise2**0.5,
        "ess": b.ess,
        "rms": (bias2 + noise2 / ANSWERS) ** 0.5,
        "direction": max(0.0, 1 - along**2 / update2) ** 0.5 if update2 else 1.0,
    }


# --- experiments -------------------------------------------------------------------------------------------------


def short_answers(seeds: int, kls: Sequence[float]) -> Results:
    """Return a map from (noise, update, baseline, correction, KL) to figures."""
    found = defaultdict(list)
    for heavy, seed in product((True, False), range(seeds)):
        progress(f"short answers, {NOISES[heavy]} noise, policy {seed + 1} of {seeds}")
        given = problem(seed, heavy=heavy)
        answers = enumerated(given)
        best = bar(given, answers)
        on_p = rollouts(given, answers, 0.0, best)
        thetas = {"first": given.logits_KV, "later": later(given, on_p)}
        right = {update: moments(on_p, theta, CorrectionSettings(), exact=True) for update, theta in thetas.items()}
        for kl in kls:
            scale = scale_for(given, answers, kl)
            for update, baseline in (("first", "own"), ("later", "own"), ("later", "p")):
                key, on_b = (NOISES[heavy], update, baseline), rollouts(given, answers, scale, best, baseline=baseline)
                found[*key, ON_POLICY, kl].append(compared(right[update], right[update]))
                for name, correction in corrections().items():
                    estimate = moments(on_b, thetas[update], correction, exact=True)
                    found[*key, name, kl].append(compared(estimate, right[update]))
    return medians(found)


def long_answers(seeds: int, lengths: Sequence[int], count: int) -> Results:
    """Return a map from (correction, KL, length) to figures, with heavy tails, in the first update: theta = p."""
    found = defaultdict(list)
    for seed, length in product(range(seeds), lengths):
        progress(f"answers of {length} tokens, policy {seed + 1} of {seeds}")
        given = problem(1000 + seed, heavy=True)
        answers = sampled(given, 0.0, count, length)
        best = bar(given, answers)
        right = moments(rollouts(given, answers, 0.0, best), given.logits_KV, CorrectionSettings(), exact=False)
        for kl in LONG_KLS:
            scale = scale_for(given, answers, kl)
            on_b = rollouts(given, sampled(given, scale, count, length), scale, best)
            found[ON_POLICY, kl, length].append(compared(right, right))
            for name, correction in corrections().items():
                estimate = moments(on_b, given.logits_KV, correction, exact=False)
                found[name, kl, length].append(compared(estimate, right))
    return medians(found)


def medians(found: dict[tuple[Any, ...], list[dict[str, float]]]) -> Results:
    return {key: {name: statistics.median(one[name] for one in many) for name in many[0]}
            for key, many in found.items()}  # fmt: skip


def progress(text: str) -> None:
    print(f"{text:<60}", end="\r", file=sys.stderr, flush=True)


# --- results -----------------------------------------------------------------------------------------------------


def records(results: Results, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    return [dict(zip(keys, at, strict=True)) | {name: float(f"{x:.5g}") for name, x in figures.items()}
            for at, figures in results.items()]  # fmt: skip


def main(
    out: Annotated[Path | None, typer.Option(help="Folder of the results; benchmarks/results, none if quick.")] = None,
    quick: Annotated[bool, typer.Option(help="Two policies, answers of 8 and 32 tokens.")] = False,
) -> None:
    """Print bias, noise, effective sample size and error of every correction; write table, figures and picture."""
    torch.set_num_threads(1)
    started = time.process_time()
    short = short_answers(2 if quick else 11, KLS)
    long = long_answers(2 if quick else 5, LENGTHS[:2] if quick else LENGTHS, 2048)
    seconds = time.process_time() - started
    check = max(figures["bias"] for key, figures in short.items()
                if key[0] == "gaussian" and key[2:4] == ("p", UNCAPPED) and key[4] <= SHOWN_KL)  # fmt: skip
    print("\n".join(rows(short)))
    print(f"\n{table(short, long)}\n\ncheck: with p's baseline, uncapped sequence weights have a bias of {check:.1e}")
    out = out or (None if quick else RESULTS)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    command = "python benchmarks/objectives.py" + " --quick" * quick
    figures = {"command": command, "machine": machine(), "cpu_seconds": round(seconds, 1), "check_bias": check}
    figures["short_answers"] = records(short, ("noise_kind", "update", "baseline", "correction", "kl"))
    figures["long_answers"] = records(long, ("correction", "kl", "tokens"))
    text = re.sub(r"\n   +|\n  (?=})", " ", json.dumps(figures, indent=1))  # one line per record
    (out / "objectives.json").write_text(f"{text}\n")
    draw(short, long, out / "objectives.png")
    parts = ["# Which correction to pick", f"`{command}`", machine(), "![curves](objectives.png)"]
    (out / "objectives.md").write_text("\n\n".join([*parts, table(short, long), advice(short, long)]))


if __name__ == "__main__":
    typer.run(main)
