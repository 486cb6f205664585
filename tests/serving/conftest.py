"""One app for all tests that need one: to start it takes longer than most of them.

It ends with them, because it takes a quarter of a core even when nobody asks it anything.
"""

import pytest

from tests.serving.apps import save_run, serving

SLOTS, QUEUE = 4, 8
LIMITS = (f"slots={SLOTS}", f"queue={QUEUE}", "max_body_kb=64", "max_choices=8")


@pytest.fixture(scope="package")
def runs(tmp_path_factory, _quiet_machine):
    """Two finished runs, "first" and "second"."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("first", 1), ("second", 2)):
        save_run(folder, name, seed=seed)
    return folder


@pytest.fixture(scope="package")
def server(runs):
    """Answers with the run "first"; whoever swaps it swaps it back."""
    with serving(runs, "policy=first", *LIMITS) as server:
        yield server
    assert server.process.returncode == 0
    assert "Traceback" not in server.log.read_text()
