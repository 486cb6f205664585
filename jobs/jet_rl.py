"""Train through the codes that generate (Jet-RL): python jobs/jet_rl.py --config jet_rl"""

from qurl_ray.config.cli import training_app
from qurl_ray.training.driver.job import run_job

if __name__ == "__main__":
    training_app(None, run_job, __doc__)()
