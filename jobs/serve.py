"""Serve a trained policy with OpenAI's API: python jobs/serve.py policy=runs/quickstart"""

from qurl_ray.config.serving import serving_app
from qurl_ray.serving.job import serve

if __name__ == "__main__":
    serving_app(serve, __doc__)()
