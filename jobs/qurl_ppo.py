"""Train with PPO, a value model and quantized rollouts: python jobs/qurl_ppo.py --config gsm8k_ppo"""

from qurl_ray.config.cli import training_app
from qurl_ray.training.driver.job import run_job

if __name__ == "__main__":
    training_app("ppo", run_job, __doc__)()
