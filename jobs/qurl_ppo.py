"""Train with PPO, a value model and quantized rollouts: python jobs/qurl_ppo.py --config gsm8k_ppo"""

from qurl_ray.config.cli import training_app
from qurl_ray.loop.driver.job import train

if __name__ == "__main__":
    training_app("ppo", train, __doc__)()
