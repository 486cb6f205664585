"""The frozen actor: how far one update moves the codes that generate, and what they generate. Used by reproduce.py.

All arms make the same updates, on answers that the starting policy generated in INT8. Arms differ only in the fold of
UAQ, the learning rate and the rounding. Under AdamW, except for its eps and the clipping of gradients, a fold by s
equals a learning rate of s times on the folded linears and of 1/s on their norms. The control rows make such updates
without a fold.
"""

import copy
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter
from quantizers import Rounding
from rounding import with_codes
from shared import ROOT
from transformers import PreTrainedModel

from qurl_ray.config import RunConfig, load_config
from qurl_ray.data.answers import items_to_judge
from qurl_ray.data.prompts import encode_prompt
from qurl_ray.data.tasks import Task, load_task
from qurl_ray.engines.requests import make_requests
from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.learner.batching import plan
from qurl_ray.learner.learner import make_learner
from qurl_ray.policy.load import load_model, load_tokenizer, stop_ids
from qurl_ray.policy.tiny import cached_tiny_policy
from qurl_ray.quant.formats import get_format
from qurl_ray.quant.quantize import QTensor, quantize
from qurl_ray.quant.uaq import fold, folded_offsets
from qurl_ray.quant.units import units
from qurl_ray.rewards.scorers import exact
from qurl_ray.rl.advantages import advantages, grpo
from qurl_ray.training.rank.objectives import objective_settings
from qurl_ray.types import PolicySpec, Problem, SamplingParams, Trajectory
from qurl_ray.weights.local import quantize_into

RATES = (1e-6, 4e-5)
"""Learning rates: the papers', and the quickstart's."""
UPDATES = 10
FORMAT = get_format("int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Difference of an arm: the fold, the learning rate of the weights that would be folded, or the rounding."""

    scale: float = 1.0
    control: float = 1.0
    rounding: str = "nearest"


ARMS = {
    "s = 1": Arm(),
    "s = 1.5": Arm(scale=1.5),
    "s = 2": Arm(scale=2.0),
    "lr × 1.5 there, no fold": Arm(control=1.5),
    "lr × 2 there, no fold": Arm(control=2.0),
    "stochastic": Arm(rounding="stochastic"),
    "error feedback": Arm(rounding="error_feedback"),
}


class Setting:
    """The quickstart's cold-started policy of one seed, and the answers that it gives in INT8."""

    def __init__(self, seed: int) -> None:
        self.config = load_config(
            ROOT / "qurl_ray" / "configs" / "quickstart.yaml",
            [f"seed={seed}", "rollout.prompts_per_step=64", "rollout.samples_per_prompt=8"],
        )
        task = load_task(self.config.task, eval_problems=64)
        self.spec = PolicySpec(source=str(cached_tiny_policy(self.config.model, task.train, lambda *_: None)))
        self.updates, self.held_out = _answers(self.config, task, self.spec)


def _answers(config: RunConfig, task: Task, spec: PolicySpec) -> tuple[list[list], list[tuple[torch.Tensor, int]]]:
    """Return the mini-batches of each update, and the held-out prompts with their answers.

    The latter are pairs: ids [B, T], and the number of the T tokens that belong to the prompt.
    """
    tokenizer, engine = load_tokenizer(spec), TorchEngine(spec, slots=config.rollout.slots)
    quantize_into(engine, load_model(spec), "int8", config.quantization.model_copy(update={"equalize": False}))
    encode = partial(encode_prompt, tokenizer=tokenizer, task=config.task)
    sampling = SamplingParams(
        temperature=1.0, max_new_tokens=config.rollout.max_new_tokens, stop_ids=stop_ids(spec, tokenizer)
    )

    def groups(problems: list[Problem], samples: int) -> list[list[Trajectory]]:
        requests = make_requests(problems, encode, samples=samples, sampling=sampling, seed=config.seed, salt="frozen")
        made = engine.generate(requests, version=1)
        owners = [problem for problem in problems for _ in range(samples)]
        judged = items_to_judge(made, owners, tokenizer, sampling.stop_ids)
        rewards_PG = np.array([exact(text, problem) for text, problem in judged]).reshape(-1, samples)
        credit = advantages(rewards_PG, grpo).ravel()
        found = [
            Trajectory(
                uid=one.uid, prompt_ids=request.prompt_ids, token_ids=one.token_ids, logprobs=one.logprobs,
                reward=float(reward), advantage=float(advantage), versions=one.versions,
            )
            for one, request, reward, advantage in zip(made, requests, rewards_PG.ravel(), credit, strict=True)
        ]  # fmt: skip
        return [found[i : i + samples] for i in range(0, len(found), samples)]

    order = np.random.default_rng(config.seed).permutation(len(task.train))[: 64 * UPDATES]
    drawn = groups([task.train[i] for i in order], 8)
    updates = [
        plan(drawn[i : i + 64], updates=1, ranks=1, token_budget=config.learner.tokens_per_micro_batch, seed=i)[0]
        for i in range(0, len(drawn), 64)
    ]
    by_length = defaultdict(list)
    for (one,) in groups(list(task.held_out), 1):
        by_length[len(one.prompt_ids), one.length].append([*one.prompt_ids, *one.token_ids])
    return updates, [(torch.tensor(rows), prompt) for (prompt, _), rows in by_length.items()]


def follow(setting: Setting, arm: Arm, lr: float) -> Iterator[dict[str, float]]:
    """Yield after each update: share of codes that the sync changes, KL of the new actor to the last, and KL(b‖p)."""
    config = setting.config
    model = load_model(setting.spec)
    paths = [unit.module for unit in units(model, config.quantization.keep).values()]
    if arm.scale != 1:
        fold(model, arm.scale)
    learner = make_learner(
        model,
        config.learner.model_copy(update={"lr": lr, "lr_final_share": 1.0}),
        objective_settings(config),
        temperature=1.0,
        total_updates=UPDATES,
    )
    rounding = Rounding(arm.rounding, config.seed) if arm.rounding != "nearest" else None
    first = codes = _codes(model, paths, rounding)
    actor = _logprobs(with_codes(model, codes), setting.held_out)
    for update in setting.updates:
        before = copy.deepcopy(model.state_dict())
        learner.learn(update)
        _stretch(model, before, arm.control)
        last, codes = codes, _codes(model, paths, rounding)
        behind, actor = actor, _logprobs(with_codes(model, codes), setting.held_out)
        yield {
            "changed": _changed(last, codes),
            "changed_since_start": _changed(first, codes),
            "kl": _kl(actor, behind),
            "kl_to_policy": _kl(actor, _logprobs(model, setting.held_out)),
        }


@torch.no_grad()
def _stretch(model: PreTrainedModel, before: dict[str, torch.Tensor], factor: float) -> None:
    """Make the last update `factor` times as long on the linears that UAQ folds, and 1 / `factor` on the norms before
    them.

    A learning rate of that factor makes the same update: AdamW's moments do not depend on the weights.
    """
    if factor == 1:
        return
    for name, offset in folded_offsets(model).items():
        weight, by = model.get_parameter(name), factor if offset is None else 1 / factor
        weight.copy_(before[name] + by * (weight - before[name]))


@torch.no_grad()
def _codes(model: PreTrainedModel, paths: list[str], rounding: Rounding | None) -> dict[str, QTensor]:
    weights = {path: model.get_submodule(path).weight for path in paths}
    return {path: rounding(path, w, FORMAT) if rounding else quantize(w, FORMAT) for path, w in weights.items()}


def _changed(before: dict[str, QTensor], after: dict[str, QTensor]) -> float:
    """Share of the codes that differ."""
    changed = sum(int((before[path].codes != q.codes).sum()) for path, q in after.items())
    return changed / sum(q.codes.numel() for q in after.values())


@torch.inference_mode()
def _logprobs(model: PreTrainedModel, texts: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
    """Log-probs of all tokens of the vocabulary at each position of the answers, float64 [tokens, V]."""
    logits = [model(ids_BT).logits[:, prompt - 1 : -1] for ids_BT, prompt in texts]
    return torch.cat([one_BTV.double().log_softmax(-1).flatten(0, 1) for one_BTV in logits])


def _kl(a_NV: torch.Tensor, b_NV: torch.Tensor) -> float:
    """KL(a‖b), in nats per token."""
    return float((a_NV.exp() * (a_NV - b_NV)).sum(-1).mean())


def measure(seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return {learning rate: {arm: means over the updates}}; `changed_since_start` is that of the last update."""
    setting, found = Setting(seed), {}
    for lr in RATES:
        for name, arm in ARMS.items():
            steps = list(follow(setting, arm, lr))
            means = {key: statistics.mean(step[key] for step in steps) for key in steps[0]}
            means["changed_since_start"] = steps[-1]["changed_since_start"]
            found.setdefault(f"{lr:g}", {})[name] = means
    return found


def rows(cells: list[dict]) -> list[str]:
    """Return a Markdown table of means over seeds."""
    lines = [
        f"| lr | | codes changed by a sync % | in all {UPDATES} % | KL of actor to the last | KL(b‖p) |",
        "|---|---|---|---|---|---|",
    ]
    for lr in map("{:g}".format, RATES):
        for name in ARMS:
            m = {key: statistics.mean(c[lr][name][key] for c in cells) for key in cells[0][lr][name]}
            lines.append(
                f"| {lr} | {name} | {100 * m['changed']:.3f} | {100 * m['changed_since_start']:.2f} | {m['kl']:.2e} | "
                f"{m['kl_to_policy']:.2e} |"
            )
    return lines


def draw(cells: list[dict], path: Path) -> None:
    """Draw a bar for each arm, and a dot for each seed."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 5), sharey=True, constrained_layout=True)
    for row, lr in zip(axes, map("{:g}".format, RATES), strict=True):
        for axis, (key, label) in zip(
            row, {"changed": "codes changed by a sync", "kl": "KL of an actor to the last, nats"}.items(), strict=True
        ):
            least, most = (pick(cell[lr][name][key] for cell in cells for name in ARMS) for pick in (min, max))
            for at, (name, arm) in enumerate(ARMS.items()):
                values = [cell[lr][name][key] for cell in cells]
                color = "#D55E00" if arm.rounding != "nearest" else "#999999" if arm.control != 1 else "#0072B2"
                axis.barh(at, statistics.mean(values), color=color)
                axis.plot(values, [at] * len(values), "k.", markersize=3)
            axis.set(xscale="log", title=f"{label}; lr {lr}", yticks=range(len(ARMS)), yticklabels=list(ARMS))
            axis.set_xlim(10 ** math.floor(math.log10(least)), 10 ** math.ceil(math.log10(most)))
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.grid(alpha=0.3, axis="x")
    axes[0, 0].invert_yaxis()  # all panels share the axis
    figure.savefig(path, dpi=110)
