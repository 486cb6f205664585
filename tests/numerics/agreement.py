"""Run by test_other_kernels.py in processes of their own: do engine and learner agree to the bit, with any threads?

    python tests/numerics/agreement.py THREADS …

It prints one JSON object: what the machine promises, and the cases in which they differ.
"""

import json
import os
import sys
import tempfile
from itertools import product
from pathlib import Path

import torch

from qurl_ray.config.model import TinyModel
from qurl_ray.numerics.invariance import invariance_for
from qurl_ray.policy.load import load_model, load_tokenizer
from qurl_ray.policy.settings import head_dim
from qurl_ray.policy.tiny import cached_tiny_policy
from qurl_ray.types import PolicySpec
from tests.conftest import SUMS, requests_for
from tests.engines.test_torch_engine import engine_with, learner_logprobs, with_quantized_linears

FORMATS = ("none", "int8", "fp8")


def differing() -> list[str]:
    """Cases whose log-probs are not those of the learner with one thread."""
    config = TinyModel(cold_start=False, layers=2, hidden_size=128, heads=4, kv_heads=2, intermediate_size=288)
    spec = PolicySpec(source=str(cached_tiny_policy(config, SUMS, lambda *_: None)))
    tokenizer, found = load_tokenizer(spec), []
    requests = requests_for(tokenizer, 8, 2, max_new_tokens=12, ignore_eos=True)
    for name in FORMATS:
        model = load_model(spec)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4 if parameter.ndim == 2 else 1)
        engines = {slots: engine_with(spec, model, name, slots=slots) for slots in (1, 64)}
        model = with_quantized_linears(model, name)
        expected = None
        for threads, (slots, engine) in product(map(int, sys.argv[1:]), engines.items()):
            torch.set_num_threads(threads)
            few = requests[::7] if slots == 1 else requests
            completions = engine.generate(few, version=1)
            learned = learner_logprobs(model, few, completions)
            same = all((c.logprobs == lp).all() for c, lp in zip(completions, learned, strict=True))
            if slots == 64:
                bits = [lp.tobytes() for lp in learned]
                expected = expected or bits
                same = same and bits == expected
            found += [] if same else [f"{name}, {threads} threads, {slots} slots"]
        torch.set_num_threads(1)
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["QURL_CACHE"] = folder
        cases = differing()
        spec = PolicySpec(source=str(next(Path(folder).glob("tiny-*"))))
        model = load_model(spec)
        invariance = invariance_for(model, head_dim=head_dim(model.config))
    sys.stdout.write(
        json.dumps({"kept": invariance.kept, "sentence": invariance.sentence(), "differing": cases}) + "\n"
    )
