"""The checks before anything heavy is imported: in their own process, which tells what it has imported by then."""

import subprocess
import sys

import pytest

from tests.training.runs import ALONE

CODE = """
import sys
from qurl_ray.config import load_config
from qurl_ray.errors import QurlError
from qurl_ray.training.driver.job import run_job
try:
    run_job(load_config(None, sys.argv[1:]), dry={dry}, fresh=False)
except QurlError as error:
    print(error)
print(*(name for name in ("torch", "transformers", "ray.train") if name in sys.modules))
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dry", "given", "message", "imported"),
    [
        (True, ["output_dir=/proc/x"], "cannot write to /proc/x", ""),
        (False, ["output_dir=/proc/x"], "cannot write to /proc/x", ""),
        (True, ["model.type=pretrained", "model.path=/nope"], "no such folder: /nope", ""),
        (False, ["environment.type=no.such:Game", "model.calculator=true"], "cannot import no.such", ""),
        (False, ["task.type=dataset", "task.path=/nope.jsonl"], "no such file: /nope.jsonl", "torch"),
        (True, ["task.reward=tests.training.rewards:no_such"], "has no no_such", "torch"),
        (False, ["learner.sequence_parallel=8", "learner.workers=8"], "cannot share the 4 heads", ""),
        (False, ["rollout.max_new_tokens=80"], "exceeds the context 64", "torch"),
        (
            True,
            ["rollout.quantization=int4", "model.intermediate_size=200"],
            "intermediate_size has width 200",
            "torch",
        ),
        (
            False,
            ["task.type=reasoning_gym", "task.dataset=chain_sum", "task.train_size=8"],
            "the tiny policy reads",
            "torch",
        ),
        (False, ["algorithm.objective=tests.training.rewards:length"], "must take (log_ratio_BT, ", "torch"),
    ],
)
def test_a_mistake_is_refused_before_what_it_does_not_need_is_imported(tmp_path, dry, given, message, imported):
    code, folder = CODE.format(dry=dry), f"output_dir={tmp_path}"
    done = subprocess.run(
        [sys.executable, "-c", code, folder, *given], env=ALONE, capture_output=True, text=True, cwd=tmp_path
    )
    told, named = done.stdout.splitlines()[-2:]
    assert message in told, done.stderr
    assert named == imported
    assert list(tmp_path.iterdir()) == []
