"""Train through the codes that generate (Jet-RL): python jobs/jet_rl.py --config jet_rl"""

from qurl_ray.config.cli import training_app
from qurl_ray.loop.driver.job import train

if __name__ == "__main__":
    training_app(None, train, __doc__)()
