"""Train with DAPO and quantized rollouts: python jobs/qurl_dapo.py --config quickstart"""

from qurl_ray.config.cli import training_app
from qurl_ray.training.driver.job import run_job

if __name__ == "__main__":
    training_app("dapo", run_job, __doc__)()
