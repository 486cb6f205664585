"""vLLM on a GPU: its own kernels in fixed memory, under CUDA graphs. int8 and fp8 have run, on an H200.

python -m pytest -m gpu tests/gpu/test_vllm.py, with qurl-ray[gpu]
"""

import numpy as np
import pytest
import torch

from tests.conftest import requests_for
from tests.engines.test_torch_engine import weights_of
from tests.engines.test_vllm_engine import gaps, policy, spec, tokenizer  # noqa: F401
from tests.engines.vllm_process import EngineProcess

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytest.importorskip("vllm", reason="needs the extra gpu")

KERNELS = {"int8": "CutlassInt8ScaledMMLinearKernel", "fp8": "CutlassFP8ScaledMMLinearKernel"}


@pytest.mark.parametrize("format_name", ["int8", "fp8", "fp8_block"])
def test_captured_steps_follow_every_load(spec, tokenizer, format_name):  # noqa: F811
    requests = requests_for(tokenizer, 20, 2, max_new_tokens=32, ignore_eos=True)
    made = {"format_name": format_name, "keep": (r"lm_head\.", r"embed_tokens\."), "graphs": True, "dtype": "bfloat16"}
    with EngineProcess(spec, slots=64, kv_cache_bytes=1 << 30, timeout_s=600, capture=True, **made) as engine:
        places = {}
        for version in range(3):
            model = policy(spec, version)
            engine.call("load", *weights_of(model, format_name, version))
            found = engine.call("addresses")
            assert found == (places := places or found)
            off = gaps(model, requests, engine.call("generate", requests, version=version), format_name)
            assert np.median(off) < 0.1  # bfloat16; weights of another version are off by 1 and more
        if format_name in KERNELS:
            assert engine.call("kernels") == [KERNELS[format_name]]
