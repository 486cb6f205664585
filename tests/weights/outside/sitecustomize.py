"""Python imports this at the start of every process of a test that has this folder in PYTHONPATH."""

from tests.weights.nibbles import register

register()
