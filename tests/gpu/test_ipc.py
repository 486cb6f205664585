"""Weights from GPU to GPU: `ipc` between two processes on one. int8 has run, on an H200.

python -m pytest -m gpu tests/gpu/test_ipc.py, with qurl-ray[gpu]
"""

import numpy as np
import pytest
import torch

from qurl_ray.quant.formats import get_format
from qurl_ray.quant.units import units
from qurl_ray.weights.stream import Publisher, assemble_manifest
from qurl_ray.weights.transports.direct import SharedMemory
from qurl_ray.weights.transports.protocol import Link
from tests.engines.test_torch_engine import weights_of
from tests.engines.test_vllm_engine import policy, spec  # noqa: F401
from tests.engines.vllm_process import EngineProcess

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytest.importorskip("vllm", reason="needs the extra gpu")

KEEP = (r"lm_head\.", r"embed_tokens\.")


@pytest.mark.parametrize("format_name", ["int8", "fp8"])
def test_an_engine_opens_the_memory_of_a_rank_on_its_gpu(spec, format_name):  # noqa: F811
    made = {"format_name": format_name, "keep": KEEP, "graphs": True, "dtype": "bfloat16", "timeout_s": 600}
    with EngineProcess(spec, slots=8, kv_cache_bytes=1 << 28, **made) as engine:
        engine.call("load", *weights_of(policy(spec, 0), format_name, 1))
        model, fmt = policy(spec, 1).cuda(), get_format(format_name)
        publisher = Publisher(units(model, KEEP), bucket_bytes=100_000)

        def take(bucket):
            ticket = engine.start("take", bucket, 0)
            return lambda: engine.result(ticket)

        def accept(records, failed):
            assert failed is None
            engine.call("accept", assemble_manifest(2, fmt, [tuple(records)]))
            return []

        link = Link(
            name="ipc",
            publisher=publisher,
            verify=lambda *_: [],
            host="127.0.0.1",
            timeout_s=60,
            expect=lambda: {0: engine.call("expect", 2, format_name)},
            take=take,
            accept=accept,
        )
        transport = SharedMemory(link)
        parameters = transport.staged(model.named_parameters(), fmt, "bfloat16")
        transport.announce(publisher.prepare(parameters, fmt, version=2, unquantized="bfloat16"), fmt, "bfloat16")
        transport.send()
        transport.verify()
        assert engine.call("version") == 2
        for payload in (payload for bucket in publisher.resend() for payload in bucket.payloads):
            if payload.encoding == "codes":
                assert np.array_equal(engine.call("resident", payload.name)[0], payload.parts[0])
