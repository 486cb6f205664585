"""The torch engine on a GPU, captured.

python -m pytest -m gpu tests/gpu
"""

import numpy as np
import pytest
import torch

from qurl_ray.engines.torch.engine import TorchEngine
from qurl_ray.engines.torch.graphs import CudaCapture
from tests.engines.test_decoder import policy_of
from tests.engines.test_graphs import MODELS, requests_of
from tests.engines.test_weights import KEEPS, moved, send

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"


def in_common(one, other) -> int:
    """Tokens until two answers part."""
    differ = np.flatnonzero(one.token_ids != other.token_ids)
    return int(differ[0]) if len(differ) else len(one.token_ids)


@pytest.mark.parametrize(("format_name", "kv_cache"), [("none", "full"), ("int8", "full"), ("int8", "fp8")])
def test_captured_steps_draw_the_same(format_name, kv_cache, tmp_path):
    policy = policy_of(*MODELS["qwen3"], tmp_path)
    options = {"slots": 20, "device": DEVICE, "kv_cache": kv_cache}
    fast, plain = TorchEngine(policy.spec, **options, capture=CudaCapture), TorchEngine(policy.spec, **options)
    requests = requests_of(30, longest=150)
    for version in (1, 2):
        moved(policy, version)
        for engine in (fast, plain):
            send(engine, policy, format_name, KEEPS["the head"], version)
        answers = (engine.generate(requests, version=version) for engine in (fast, plain))
        pairs = [(one, other, in_common(one, other)) for one, other in zip(*answers, strict=True)]
        # Sums over more padded keys may be made in another order than over fewer. Quantization then turns some last
        # bits into other codes, and those now and then into other tokens.
        gaps = np.concatenate([abs(one.logprobs - other.logprobs)[:count] for one, other, count in pairs])
        assert gaps.mean() < (1e-4 if format_name == "none" else 0.05)
        if format_name == "none":
            assert all(count == len(one.token_ids) for one, _, count in pairs)
        else:
            assert len(gaps) > sum(len(one.token_ids) for one, _, _ in pairs) / 2
