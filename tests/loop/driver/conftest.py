"""A whole run for the tests of this folder."""

import pytest

from qurl_ray.config import load_config
from qurl_ray.loop.driver.run import RunResult, run
from tests.loop.runs import FOLDED, ROOT


@pytest.fixture(scope="package")
def whole(tmp_path_factory) -> RunResult:
    """An undisturbed run, tracked in MLflow. Tests change only copies of it."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # a Ray that the run starts finds tests.loop.rewards there
        return run(load_config(None, [*FOLDED, "tracking.mlflow=true", f"output_dir={folder}"]))
