"""The part `vllm` of the GPU kit, as far as it needs no engine: its variants, and how it reaches vLLM's workers."""

import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu.vllm import VARIANTS, measuring, variants, with_options
from qurl_ray.engines.vllm import engine as vllm_engine
from qurl_ray.planning.shapes import SHAPES
from qurl_ray.quant.formats import FORMATS


def test_variants_with_a_head_in_codes_are_of_shapes_that_have_one_of_their_own():
    shapes = [SHAPES[name] for name in ("Qwen2.5-1.5B", "Qwen2.5-7B")]
    assert [shape.tied for shape in shapes] == [True, False]
    heads = {name for name, variant in VARIANTS.items() if variant.head_in_codes}
    assert heads == {"fp8, head in codes", "int8, head in codes"}
    assert [heads & {*variants(shape)} for shape in shapes] == [set(), heads]
    assert not any(re.search(pattern, "lm_head.weight") for name in heads for pattern in VARIANTS[name].keep)


@pytest.mark.parametrize("format_name", [None, "int8"])
def test_random_weights_are_codes_in_a_head_that_was_made_for_them(format_name):
    pytest.importorskip("vllm", reason="needs the extra cpu or gpu")
    from benchmarks.gpu.in_worker import Measuring
    from qurl_ray.engines.vllm.plugin import QurlHeadMethod, QurlLinearMethod

    model = torch.nn.ModuleDict({"o_proj": torch.nn.Module(), "lm_head": torch.nn.Module()})
    for part, method, fmt in (("o_proj", QurlLinearMethod, None), ("lm_head", QurlHeadMethod, format_name)):
        model[part].output_partition_sizes, model[part].input_size_per_partition = [6], 4
        model[part].quant_method = method(fmt and FORMATS[fmt], tensors=1, emulate=False, fixed=True)
    worker = Measuring()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    found = [module for module, _, size in worker._qurl_linears() if size == (6, 4)]
    assert found == [model["o_proj"], *([model["lm_head"]] if format_name else [])]


def test_engines_have_the_kits_methods_in_their_workers_and_a_variants_options(tiny_spec, monkeypatch):
    """Both are set after the engine's module was imported."""
    made = []
    monkeypatch.setattr(vllm_engine, "EXTENSION", vllm_engine.EXTENSION)
    monkeypatch.setattr(vllm_engine, "VllmServer", lambda settings, **_: made.append(settings))
    for options in ({}, VARIANTS["fp8, with FP8 keys"].options):
        with_options(options)
        vllm_engine.VllmEngine(tiny_spec, slots=2)
        measuring()
    assert [settings["worker_extension_cls"].rpartition(".")[2] for settings in made] == [
        "WorkerExtension",
        "Measuring",
    ]
    assert [settings["kv_cache_dtype"] for settings in made] == ["auto", "fp8"]
