"""Train with GRPO and quantized rollouts: python jobs/qurl_grpo.py --config quickstart_grpo"""

from qurl_ray.config.cli import training_app
from qurl_ray.training.driver.job import run_job

if __name__ == "__main__":
    training_app("grpo", run_job, __doc__)()
