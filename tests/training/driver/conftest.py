"""A whole run for the tests of this folder."""

import pickle

import pytest
from filelock import FileLock

from qurl_ray.config import load_config
from qurl_ray.training.driver.run import RunResult, run
from tests.training.runs import CERTIFIED, ROOT


@pytest.fixture(scope="package")
def whole(tmp_path_factory) -> RunResult:
    """An undisturbed run with certificates, tracked in MLflow. Tests change only copies of it. Processes of
    pytest-xdist share it."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if folder.name.startswith("popen-") else folder) / "whole"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if (found := folder / "result.pickle").exists():
            return pickle.loads(found.read_bytes())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(ROOT))  # a Ray that the run starts finds tests.training.rewards there
            result = run(load_config(None, [*CERTIFIED, "tracking.mlflow=true", f"output_dir={folder}"]))
        found.write_bytes(pickle.dumps(result))
        return result
