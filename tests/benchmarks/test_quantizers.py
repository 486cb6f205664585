"""Stochastic rounding, error feedback and clipped ranges, by their identities and against plain Python."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.quantizers import Rounding, quantize_clipped, quantize_stochastic, quantize_with_feedback
from qurl_ray.errors import QuantizationError
from qurl_ray.quant.formats import FORMATS, get_format
from qurl_ray.quant.quantize import dequantize, quantize
from tests.quant.grid import E4M3

INT4 = replace(FORMATS["int4"], dtype=torch.int8, codec=None)  # a byte per code
ALL = [*(fmt for fmt in FORMATS.values() if fmt.codec is None), INT4]
names = lambda fmt: fmt.name  # noqa: E731


def weight(seed: int, rows=6, columns=256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def neighbours(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The codes below and above each x."""
    grid = np.concatenate([-E4M3[:0:-1], E4M3]) if name.startswith("fp8") else np.arange(-127.0, 128.0)
    above = np.searchsorted(grid, x).clip(1, len(grid) - 1)
    above = np.where(grid[above - 1] == x, above - 1, above)
    return np.where(grid[above] == x, grid[above], grid[above - 1]), grid[above]


def spread(q) -> torch.Tensor:
    rows, columns = q.codes.shape
    scale = q.scale.repeat_interleave(q.fmt.rows, dim=0)[:rows]
    return scale.repeat_interleave(q.fmt.group or columns, dim=1)[:, :columns]


@pytest.mark.parametrize("fmt", ALL, ids=names)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_stochastic_codes_are_next_to_the_weight(fmt, seed):
    w = weight(seed)
    q = quantize_stochastic(w, fmt, seed)
    assert torch.equal(q.scale, quantize(w, fmt).scale)
    x = (w / spread(q)).clamp(-fmt.weight_max, fmt.weight_max).numpy()  # as float32 has it
    below, above = neighbours(x, fmt.name)
    codes = q.codes.float().numpy()
    assert ((codes == below) | (codes == above)).all()


@pytest.mark.parametrize("fmt", [fmt for fmt in ALL if fmt.rows == 1], ids=names)
def test_stochastic_rounding_is_unbiased(fmt):
    """The mean of n draws is within 5.5 standard errors of the weight, each step · sqrt(p (1 - p) / n)."""
    w, n = weight(1, rows=4), 2000
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([quantize_stochastic(w, fmt, generator).codes.float() for _ in range(n)]).double()
    x = (w / spread(quantize(w, fmt))).clamp(-fmt.weight_max, fmt.weight_max).double().numpy()
    below, above = neighbours(x, fmt.name)
    share = np.divide(x - below, above - below, out=np.zeros_like(x), where=above > below)
    allowed = 5.5 * (above - below) * np.sqrt((share * (1 - share)).clip(1 / n) / n)
    assert (np.abs(draws.mean(dim=0).numpy() - x) <= allowed + 1e-6).all()
    assert draws.std(dim=0).max() > 0.1


def test_a_seed_repeats_the_codes():
    w = weight(2)
    one, same, other = (quantize_stochastic(w, FORMATS["int8"], seed).codes for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_weights_on_the_grid_are_not_moved():
    q = quantize(weight(3), FORMATS["int8"])
    exact = q.codes.float()
    exact[:, 0] = 127  # so that the scale is 1
    assert torch.equal(quantize_stochastic(exact, FORMATS["int8"], 0).codes.float(), exact)


@pytest.mark.parametrize("fmt", ALL, ids=names)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), versions=st.integers(1, 5))
def test_codes_and_residual_are_the_weights(fmt, seed, versions):
    """Of one version, dequantized + residual' = w + residual; of several, the sums differ by the last residual."""
    residual, sent, meant = None, torch.zeros(6, 256), torch.zeros(6, 256)
    for version in range(versions):
        w = weight((seed + version) % 2**31)
        target = w if residual is None else w + residual
        q, residual = quantize_with_feedback(w, fmt, residual)
        torch.testing.assert_close(dequantize(q) + residual, target, rtol=1e-6, atol=1e-8)
        sent, meant = sent + dequantize(q), meant + w
    torch.testing.assert_close(sent + residual, meant, rtol=1e-5, atol=1e-6)


def test_the_first_version_with_feedback_is_the_nearest():
    w = weight(4)
    q, residual = quantize_with_feedback(w, FORMATS["int8"], None)
    assert torch.equal(q.codes, quantize(w, FORMATS["int8"]).codes)
    assert torch.equal(residual, w - dequantize(q))


def test_feedback_makes_the_mean_of_many_versions_exact():
    """Of a weight that stays, the mean of T versions misses residual / T."""
    w, residual, total = weight(5), None, 0
    for _ in range(50):
        q, residual = quantize_with_feedback(w, FORMATS["int8"], residual)
        total = total + dequantize(q)
    nearest = (dequantize(quantize(w, FORMATS["int8"])) - w).norm()
    assert (total / 50 - w).norm() < 0.1 * nearest


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_each_row_gets_the_range_that_errs_least(name):
    fmt, ratios = FORMATS[name], (1.0, 0.8, 0.5)
    w = weight(6)
    w[0, 0] = 30 * w[0].abs().max()  # a row that wants all of its range, another without outliers
    w[1] = w[1].sign() * 0.05
    q = quantize_clipped(w, fmt, ratios)
    for n, row in enumerate(w.double().numpy()):
        errors = []
        for ratio in ratios:
            scale = np.abs(row).max() * ratio / fmt.weight_max
            x = (row / scale).clip(-fmt.weight_max, fmt.weight_max)
            below, above = neighbours(x, name)
            errors.append((((np.where(x - below < above - x, below, above)) * scale - row) ** 2).sum())
        found = float((dequantize(q)[n].double() - w[n].double()).square().sum())
        assert found == pytest.approx(min(errors), rel=1e-4, abs=1e-12)


def test_clipping_never_errs_more_and_one_ratio_is_the_default():
    w, fmt = weight(7), FORMATS["int8"]
    plain, clipped = quantize(w, fmt), quantize_clipped(w, fmt, (1.0, 0.9, 0.7))
    assert ((dequantize(clipped) - w).norm(dim=1) <= (dequantize(plain) - w).norm(dim=1)).all()
    assert torch.equal(quantize_clipped(w, fmt, (1.0,)).codes, plain.codes)
    for name in ("int4", "fp8_block"):
        with pytest.raises(QuantizationError, match="clipped by row"):
            quantize_clipped(w, FORMATS[name], (1.0,))


def test_rounding_by_name_is_reproducible_and_new_at_every_sync():
    weight, fmt = torch.randn(64, 64), get_format("int8")
    one, other = Rounding("stochastic", seed=3), Rounding("stochastic", seed=3)
    first, second = one("a.weight", weight, fmt), one("a.weight", weight, fmt)
    assert torch.equal(first.codes, other("a.weight", weight, fmt).codes)
    assert not torch.equal(first.codes, second.codes)
    assert not torch.equal(first.codes, one("b.weight", weight, fmt).codes)
    assert not torch.equal(first.codes, Rounding("stochastic", seed=4)("a.weight", weight, fmt).codes)


def test_error_feedback_is_kept_by_name():
    weights, fmt = {name: torch.randn(16, 64) for name in ("a.weight", "b.weight")}, replace(INT4, group=64)
    rounding, residuals = Rounding("error_feedback", seed=0), dict.fromkeys(weights)
    for _ in range(3):
        for name, weight in weights.items():
            expected, residuals[name] = quantize_with_feedback(weight, fmt, residuals[name])
            assert torch.equal(rounding(name, weight, fmt).codes, expected.codes)
