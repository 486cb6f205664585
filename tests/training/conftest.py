"""A Ray for the tests of a module, the end of jobs that a failed test left, and a disk that is full."""

import resource

import pytest
import ray

from tests.training.runs import JOBS, ROOT, kill_all


@pytest.fixture(scope="module")
def cluster():
    """One local Ray for the runs of a module; it finds tests.training.rewards on PYTHONPATH."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test():
    """Those of a failed test would take the processor from all others, until these fail, too."""
    yield
    while JOBS:
        job = JOBS.pop()
        if job.poll() is None:
            kill_all(job)
            job.communicate()


@pytest.fixture
def small_files():
    """No file may have more than 100 kB, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
