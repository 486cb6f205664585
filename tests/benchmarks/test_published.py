"""The planner against measurements of other software, and figures of papers."""

from benchmarks.published import fitted_points, points


def test_most_published_figures_are_met():
    errors = [abs(point.error()) for point in points() if not point.fitted]
    assert sum(error <= 0.15 for error in errors) >= 0.75 * len(errors)
    assert max(errors) < 0.4


def test_the_steps_that_constants_were_fitted_to_are_met():
    errors = [abs(point.error()) for point in fitted_points()]
    assert sum(errors) / len(errors) < 0.015
    assert max(errors) < 0.06
