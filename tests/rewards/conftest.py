"""Fixtures of the tests of rewards."""

from pathlib import Path

import pytest


@pytest.fixture
def bad_rewards_can_be_imported(monkeypatch):
    """Put this folder on the path, so that settings may name bad_rewards:function."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
