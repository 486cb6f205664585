"""Batch invariance on this machine: do engine and learner have equal bits for a model, by which rules, or why not?"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from qurl_ray.numerics.processor import processor_name
from qurl_ray.numerics.rules import Product, Rule, extra_cost
from qurl_ray.numerics.selfcheck import attention_rule, linear_rule, thread_counts

STEP_ROWS = 32  # rows of the decode step for which costs are reported
MOST_COST = 0.05
"""Largest share of a step's multiplications that rules may add."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInvariance:
    """The rules of a model's float32 products on this machine, and whether they give equal bits.

    Example:
        invariance_of({(256, 768): 6, (256, 18): 1}, head_dim=32).sentence()
    """

    linears: tuple[tuple[Product, Rule | None], ...]
    attention: Rule | None
    head_dim: int

    @property
    def missing(self) -> tuple[str, ...]:
        """Products that have no rule, in words."""
        shapes = [f"products of {p.inner} → {p.outputs}" for p, rule in self.linears if rule is None]
        return (*shapes, *([] if self.attention else [f"attention with heads of {self.head_dim}"]))

    @property
    def cost(self) -> float:
        """Multiplications that the rules add to a decode step of STEP_ROWS rows, attention aside, as a share."""
        return extra_cost(self.linears, rows=STEP_ROWS)

    @property
    def kept(self) -> bool:
        """True if engine and learner compute equal bits here."""
        return not self.missing and self.cost <= MOST_COST

    def sentence(self) -> str:
        """Return the sentence that a run, a dry run and the tests' header report."""
        counts = thread_counts()
        where = f"{processor_name()}, {counts[0]} to {counts[-1]} threads"
        if self.missing:
            reason = "no rule makes rows independent of the batch for " + ", ".join(self.missing)
        elif not self.kept:
            reason = f"the rules that it needs add {self.cost:.0%} to a decode step of {STEP_ROWS} rows"
        else:
            rules = Counter(str(rule) for _, rule in self.linears)
            by_rule = "; ".join(
                rule if len(rules) == 1 else f"{rule} ({n} shape{'s' * (n > 1)})" for rule, n in rules.items()
            )
            return f"equal bits of engine and learner on {where}: linears {by_rule}; attention {self.attention}"
        return (
            f"equal bits of engine and learner are not promised on {where}: {reason}; sync/probe_gap and "
            "mismatch/abs_logprob_gap tell how far they are apart"
        )


def invariance_of(linears: Mapping[tuple[int, int], int], *, head_dim: int) -> BatchInvariance:
    """Return the batch invariance of a model on this machine. Rules that are not known yet are measured.

    Args:
        linears: number of linears by (inputs, outputs), the head included.
        head_dim: width of an attention head.
    """
    products = [Product(inner=inner, outputs=outputs, count=n) for (inner, outputs), n in sorted(linears.items())]
    rules = tuple((product, linear_rule(product.inner, product.outputs)) for product in products)
    return BatchInvariance(linears=rules, attention=attention_rule(head_dim), head_dim=head_dim)


def invariance_for(model: nn.Module, *, head_dim: int) -> BatchInvariance:
    """Return the batch invariance of all linears of a model, whose weights may be on the meta device."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return invariance_of(Counter((linear.in_features, linear.out_features) for linear in linears), head_dim=head_dim)
