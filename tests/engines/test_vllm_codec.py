"""A format from outside the package in vLLM: its bytes arrive, are read back, and multiply as they are defined."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from qurl_ray.errors import SyncError
from qurl_ray.learner.batching import to_tensors
from qurl_ray.policy.load import load_model
from qurl_ray.policy.logprobs import token_logprobs
from qurl_ray.quant.formats import FORMATS
from qurl_ray.quant.quantize import dequantize, quantize
from qurl_ray.quant.units import units
from qurl_ray.weights.receiver import decode_buckets
from qurl_ray.weights.stream import Publisher, assemble_manifest
from tests.conftest import arrays_of, requests_for
from tests.engines.test_vllm_engine import spec as spec  # a fixture
from tests.engines.test_vllm_engine import tokenizer as tokenizer  # a fixture
from tests.engines.vllm_process import EngineProcess
from tests.learner.test_flow import trajectories
from tests.weights.nibbles import NIBBLES

pytest.importorskip("vllm", reason="needs the extra cpu or gpu")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_vllm_takes_it_whole_and_as_changes_and_sees_damage(spec, tokenizer, monkeypatch, ranks):
    monkeypatch.setitem(FORMATS, "nibbles", NIBBLES)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'weights' / 'outside'}")
    model = load_model(spec)
    names = units(model, [r"lm_head\."])
    publisher = Publisher(names)
    options = {"slots": 8, "threads": 1, "timeout_s": 240, "kernel": "emulation", "tensor_parallel": ranks}
    with EngineProcess(spec, **options) as engine:
        for version in (1, 2):
            base = version - 1 or None
            buckets = list(publisher.prepare(model.named_parameters(), NIBBLES, version=version, base_version=base))
            manifest = assemble_manifest(version, NIBBLES, [bucket.records for bucket in buckets])
            payloads = [bucket.payloads for bucket in buckets]
            decoded = [dict(b) for b in decode_buckets(payloads, manifest, partial(engine.call, "resident"))]
            engine.call("load", manifest, decoded)
            for name in list(names)[:: max(1, len(names) // 6)]:
                expected = arrays_of(quantize(model.get_parameter(name), NIBBLES))
                assert all(map(np.array_equal, engine.call("resident", name), expected))
            requests = requests_for(tokenizer, 4, 2, max_new_tokens=8, ignore_eos=True)
            batch = to_tensors(trajectories(requests, engine.call("generate", requests, version=version), seed=1))
            with torch.no_grad():
                own = load_model(spec)
                for name, parameter in own.named_parameters():
                    values = model.get_parameter(name)
                    parameter.copy_(dequantize(quantize(values, NIBBLES)) if name in names else values)
                found_BT = token_logprobs(own, batch.token_ids_BT, batch.mask_BT, 1.0)
                assert (found_BT - batch.behavior_BT)[batch.mask_BT].abs().max() < 1e-3
                model.model.layers[0].mlp.up_proj.weight[:3] *= 1.5
        assert engine.call("kernels") == ["emulation of nibbles"]
        name = next(n for bucket in decoded for n in bucket if n.endswith("down_proj.weight"))
        for bucket in decoded:
            if name in bucket:
                packed, scales, outer = bucket[name]
                scales = scales.copy()
                scales[1, 0] ^= 1
                bucket[name] = (packed, scales, outer)
        with pytest.raises(SyncError, match="down_proj"):
            engine.call("load", manifest, decoded)
