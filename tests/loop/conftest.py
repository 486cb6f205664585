"""A Ray for the tests of a module."""

import pytest
import ray

from tests.loop.runs import ROOT


@pytest.fixture(scope="module")
def cluster():
    """One local Ray for the runs of a module; it finds tests.loop.rewards on PYTHONPATH."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()
