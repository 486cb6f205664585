"""A process of its own in which vLLM takes itself for one on an H100: python vllm_cuda.py CHECK.

Neither a GPU nor vLLM's CUDA library is there. Operations of that library have their schemas, as the wheel of vLLM
0.32.0 for CUDA has them (`make gpu-contract` compares), shapes of results for fake tensors, and on a CPU a plain
definition of what they compute.
"""

import json
import re
import sys
import types
from itertools import product
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

LIBRARY = torch.library.Library("_C", "FRAGMENT")
SCHEMAS = {
    "dynamic_scaled_int8_quant": "(Tensor! result, Tensor input, Tensor! scale, Tensor!? azp) -> ()",
    "dynamic_per_token_scaled_fp8_quant": "(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
    "per_token_group_fp8_quant": (
        "(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, float fp8_min, float fp8_max, "
        "bool scale_ue8m0, bool dummy_is_scale_transposed, bool dummy_is_tma_aligned) -> ()"
    ),
    "cutlass_scaled_mm": "(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, Tensor? bias) -> ()",
    "cutlass_scaled_mm_supports_fp8": "(int cuda_device_capability) -> bool",
    "cutlass_scaled_mm_supports_block_fp8": "(int cuda_device_capability) -> bool",
}
"""Operations of the CUDA path, by name."""
WIDTHS = {"int8": (48, 32), "fp8": (48, 24), "fp8_block": (256, 128)}
"""(outputs, inputs) of a layer; CUTLASS' FP8 pads its inputs."""
NO_WORK = {"empty", "empty_like", "empty_strided", "view", "_unsafe_view", "t", "transpose", "slice", "alias", "detach",
           "device", "reshape", "expand", "permute", "as_strided", "select", "unsqueeze", "squeeze"}  # fmt: skip
"""Operations that allocate or view, and start nothing on a device."""


def scaled_mm(out: Any, a: Any, b: Any, a_scales: Any, b_scales: Any, bias: Any) -> None:
    """Products of codes, [M, K] · [K, N], in float64, with a scale for each row and column, or each block."""
    left, right = a.double(), b.double()
    if b_scales.numel() != b.shape[1]:
        left = left * a_scales.repeat_interleave(128, dim=1)
        right = right * b_scales.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
        found = left @ right
    else:
        found = (left @ right) * a_scales.reshape(-1, 1) * b_scales.reshape(1, -1)
    out.copy_(found if bias is None else found + bias)


def quantized(result: Any, input: Any, scale: Any, largest: float, group: int | None = None) -> None:
    """Codes of activations, one scale per row or per group of columns."""
    x = input.float()
    parts = x.view(len(x), -1, group or x.shape[1])
    step = parts.abs().amax(-1, keepdim=True) / largest
    codes = (parts / step).reshape(x.shape)
    result.copy_(codes.round() if result.dtype == torch.int8 else codes)
    scale.copy_(step[..., 0])


def pretend_h100() -> None:
    """Make vLLM take this machine for an H100."""
    for library in ("_C", "_C_AVX2", "_C_AVX512"):  # those of the wheel for CPUs
        sys.modules[f"vllm.{library}"] = None  # type: ignore[assignment]
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    for name, schema in SCHEMAS.items():
        LIBRARY.define(name + schema)
    on_cpu = {
        "cutlass_scaled_mm": scaled_mm,
        "dynamic_scaled_int8_quant": lambda result, input, scale, azp: quantized(result, input, scale, 127),
        "dynamic_per_token_scaled_fp8_quant": lambda result, input, scale, ub: quantized(result, input, scale, 448),
        "per_token_group_fp8_quant": lambda x, q, s, group, *_: quantized(q, x, s, 448, group),
    }
    for name, function in on_cpu.items():
        LIBRARY.impl(name, function, "CPU")
        LIBRARY.impl(name, lambda *_: None, "Meta")
    for name, least in (("cutlass_scaled_mm_supports_fp8", 89), ("cutlass_scaled_mm_supports_block_fp8", 90)):
        LIBRARY.impl(name, lambda capability, least=least: capability >= least, "CompositeExplicitAutograd")

    import vllm.model_executor.kernels.linear
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class H100(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(major=9, minor=0)

    old, new = vllm.platforms.current_platform, H100()
    vllm.platforms._current_platform = new
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm") and getattr(module, "current_platform", None) is old:
            module.current_platform = new
    import vllm.model_executor.kernels.linear.scaled_mm.cutlass as cutlass

    cutlass.CUTLASS_BLOCK_FP8_SUPPORTED = True


class Operations(TorchDispatchMode):
    """Records the operations that start work on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        if name not in NO_WORK:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def made(
    format_name: str, device: str, widths: tuple[int, int] | None = None, *, compiled: bool = True
) -> tuple[Any, Any]:
    """A layer of vLLM's kind, and its FixedCodes."""
    from qurl_ray.engines.vllm.kernels import FixedCodes
    from qurl_ray.quant.formats import get_format

    outputs, inputs = widths or WIDTHS[format_name]
    layer = torch.nn.Module()
    fixed = FixedCodes(
        layer,
        get_format(format_name),
        [outputs],
        inputs,
        dtype=torch.bfloat16,
        device=torch.device(device),
        name="up",
        compiled=compiled,
    )
    return layer, fixed


def made_head(format_name: str) -> tuple[Any, Any]:
    """A head whose vocabulary vLLM pads by 16 rows, as `made` returns a linear."""
    from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config

    from qurl_ray.engines.vllm.plugin import QurlHeadMethod
    from qurl_ray.quant.formats import get_format

    layer, (outputs, inputs) = torch.nn.Module(), WIDTHS[format_name]
    layer.prefix, layer.params_dtype = "lm_head", torch.bfloat16
    layer.num_org_embeddings_per_partition, layer.num_embeddings_per_partition = outputs, outputs + 16
    method = QurlHeadMethod(get_format(format_name), tensors=1, emulate=False, fixed=True)
    with set_current_vllm_config(VllmConfig(load_config=LoadConfig(load_format="dummy"))):
        method.create_weights(layer, inputs, [outputs + 16], inputs, outputs + 16, torch.bfloat16)

    def multiply(x: Any, bias: Any) -> Any:
        logits = method.apply(layer, x, bias)
        assert logits.shape[1] == outputs + 16
        assert not logits[:, outputs:].any()
        return logits[:, :outputs]

    return layer, types.SimpleNamespace(
        write=lambda q: method.hold(layer, [q]), read=lambda: method.resident()[0], multiply=multiply
    )


def operations() -> dict[str, Any]:
    """Kernel and device operations of one product, by format."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config

    found = {}
    for name, (outputs, inputs) in (WIDTHS | {"fp8": (64, 32)}).items():
        with FakeTensorMode():
            _, fixed = made(name, "cuda", (outputs, inputs))
            x = torch.empty(4, inputs, dtype=torch.bfloat16, device="cuda")
            with Operations() as seen:
                y = fixed.multiply(x, None)
            assert (y.shape, y.dtype, y.device.type) == ((4, outputs), torch.bfloat16, "cuda")
        found[name] = {"kernel": fixed.kernel, "operations": seen.names}
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["none"]))):
        fixed = made("int8", "cpu", compiled=False)[1]
    x = torch.ones(4, WIDTHS["int8"][1], dtype=torch.bfloat16)
    with Operations() as seen:
        fixed.multiply(x, None)
    found["int8 beside the compiled model"] = {"kernel": fixed.kernel, "operations": seen.names}
    return found


def layers() -> dict[str, Any]:
    """Operations that a decoder layer of Qwen2's kind starts, in the graph compiled for a CPU, by format and by who
    quantizes. The layer is made of vLLM's norms, rotary embedding and SiLU; attention is one operation."""
    import vllm.ir
    from torch._inductor.utils import run_and_get_code
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding import get_rope

    for name in ("silu_and_mul", "rotary_embedding"):  # never called: plain operations are compiled in place of them
        LIBRARY.define(f"{name}(Tensor! out, Tensor x) -> ()")
    attention = torch.library.Library("decoder", "DEF")
    attention.define("attention(Tensor q, Tensor k, Tensor v, Tensor! out) -> ()")
    attention.impl("attention", lambda q, k, v, out: (out.copy_(q), None)[1], "CPU")
    attention.impl("attention", lambda *_: None, "Meta")
    hidden, inner, heads, kv_heads, dim = 256, 512, 4, 2, 64
    queries, keys = heads * dim, kv_heads * dim

    def linear(name: str, outputs: int, inputs: int) -> Any:
        if name != "none":
            return made(name, "cpu", (outputs, inputs))[1].multiply
        weight = torch.zeros(outputs, inputs, dtype=torch.bfloat16)
        return lambda x, bias: torch.nn.functional.linear(x, weight, bias)

    def count(name: str, forced: str) -> int:
        with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["none", *forced]))):
            qkv, o = linear(name, queries + 2 * keys, hidden), linear(name, hidden, queries)
            gate_up, down = linear(name, 2 * inner, hidden), linear(name, hidden, inner)
            norms = [RMSNorm(hidden, dtype=torch.bfloat16) for _ in range(2)]
            silu, rope = (
                SiluAndMul(),
                get_rope(dim, 64, dtype=torch.bfloat16, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
            )
            bias = torch.zeros(queries + 2 * keys, dtype=torch.bfloat16)

            def layer(positions: Any, x: Any, residual: Any) -> Any:
                x, residual = norms[0](x, residual)
                q, k, v = qkv(x, bias).split([queries, keys, keys], dim=-1)
                q, k = rope(positions, q, k)
                out = torch.empty_like(q)
                torch.ops.decoder.attention(q, k, v, out)
                x, residual = norms[1](o(out, None), residual)
                return down(silu(gate_up(x, None)), None), residual

            torch._dynamo.reset()
            step = torch.compile(
                lambda positions, *states: layer(positions, *layer(positions, *states)), fullgraph=True
            )
            states = [torch.ones(8, hidden, dtype=torch.bfloat16) for _ in range(2)]
            with torch.no_grad(), vllm.ir.enable_torch_wrap(False):  # norms as on CUDA, where the compiler makes them
                _, (code, *_) = run_and_get_code(step, torch.arange(8), *states)
        started = re.findall(
            r"cpp_fused_\w+\(|torch\.ops\.\w+\.\w+\.\w+\(|extern_kernels\.\w+\(", code[code.index("def call(") :]
        )
        assert len(started) % 2 == 0, started
        return len(started) // 2

    quantizes = {"int8": ["+quant_int8"], "fp8": ["+quant_fp8"], "fp8_block": ["+quant_fp8"]}
    forced = {name: count(name, operation) for name, operation in quantizes.items()}
    return {"none": count("none", []), "forced": forced, "joined": {name: count(name, []) for name in quantizes}}


def memory() -> dict[str, Any]:
    """Whether 20 versions end in the same memory, are read back as they were written, and multiply as defined; with
    vLLM's quantizers ("all"), and with the plain operations that are compiled ("none"); and those of a head."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config

    from qurl_ray.quant.formats import get_format
    from qurl_ray.quant.linear import reference_linear
    from qurl_ray.quant.quantize import quantize

    found = {}
    for name, quantizers in product(WIDTHS, ("all", "none", "head")):
        outputs, inputs = WIDTHS[name]
        if quantizers == "head":
            layer, fixed = made_head(name)
        else:
            with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=[quantizers]))):
                layer, fixed = made(name, "cpu")
        parameters = dict(layer.named_parameters())
        places = {key: parameter.data_ptr() for key, parameter in parameters.items()}
        moved = wrong = 0
        gap = 0.0
        for seed in range(20):
            torch.manual_seed(seed)
            q = quantize(torch.randn(outputs, inputs), get_format(name))
            fixed.write(q)
            now = dict(layer.named_parameters())
            moved += any(now[key] is not parameters[key] or now[key].data_ptr() != places[key] for key in parameters)
            read = fixed.read()
            wrong += not (torch.equal(read.codes.float(), q.codes.float()) and torch.equal(read.scale, q.scale))
            x, bias = torch.randn(3, inputs).bfloat16(), torch.randn(outputs).bfloat16()
            expected = reference_linear(x, q, bias).float()
            gap = max(gap, ((fixed.multiply(x, bias).float() - expected).norm() / expected.norm()).item())
        shapes = {key: [list(p.shape), list(p.stride())] for key, p in parameters.items()}
        found[f"{name}, {quantizers}"] = {"moved": moved, "wrong": wrong, "gap": gap, "parameters": shapes}
    return found


def codes() -> dict[str, list[int]]:
    """The result of benchmarks.gpu.codes.differing, which reads codes of activations from products, in each layout."""
    from benchmarks.gpu.codes import differing, eye
    from qurl_ray.quant.formats import get_format

    found = {}
    for name, size in WIDTHS.items():
        fmt, cpu = get_format(name), torch.device("cpu")
        _, fixed = made(name, "cpu")
        fixed.write(eye(*size, fmt, cpu))
        found[name] = differing(lambda x, own=fixed: own.multiply(x, None), size, fmt, 2000, cpu, torch.bfloat16)
    return found


def fused_experts(x: Any, w1: Any, w2: Any, weights: Any, ids: Any, *rest: Any, **options: Any) -> Any:
    """What vLLM's operation of this name computes, token by token and expert by expert, in float64."""
    names = ("activation", "apply_router_weight_on_input", "use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16")
    names += ("use_int4_w4a16", "ocp_mx_scheme", "per_channel_quant", "global_num_experts", "expert_map", "w1_scale")
    names += ("w2_scale", "w1_zp", "w2_zp", "a1_scale", "a2_scale", "block_shape", "w1_bias", "w2_bias")
    given = dict.fromkeys(names) | {"activation": "silu"} | dict(zip(names, rest, strict=False)) | options
    assert given["activation"] == "silu"
    assert not given["apply_router_weight_on_input"]
    assert bool(given["per_channel_quant"]) == (given["w1_scale"] is not None and not given["block_shape"])
    dtype, group = torch.int8 if given["use_int8_w8a8"] else torch.float8_e4m3fn, 128 if given["block_shape"] else None
    assert given["use_int8_w8a8"] or given["use_fp8_w8a8"] or given["w1_scale"] is None

    def product(rows: Any, weight: Any, scale: Any) -> Any:
        if scale is None:
            return rows.double() @ weight.double().t()
        codes, out = torch.empty(rows.shape, dtype=dtype), torch.empty(len(rows), len(weight), dtype=torch.float64)
        steps = torch.empty(len(rows), rows.shape[1] // (group or rows.shape[1]))
        quantized(codes, rows, steps, 127 if dtype == torch.int8 else 448, group)
        scaled_mm(out, codes, weight.t(), steps, scale.t(), None)
        return out

    y = torch.zeros(x.shape, dtype=torch.float64)
    for token, (of_token, experts) in enumerate(zip(weights, ids, strict=True)):
        for share, expert in zip(of_token, experts, strict=True):
            scales = [None if given[name] is None else given[name][expert] for name in ("w1_scale", "w2_scale")]
            gate, up = product(x[token : token + 1], w1[expert], scales[0]).to(x.dtype).chunk(2, dim=-1)
            hidden = (torch.nn.functional.silu(gate.double()) * up.double()).to(x.dtype)
            y[token] += share * product(hidden, w2[expert], scales[1])[0]
    return y.to(x.dtype)


def experts() -> dict[str, Any]:
    """A layer of six experts over 20 versions: memory, what is read back, the result against the learner's mixture."""
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    from qurl_ray.engines.vllm.experts import QurlExpertsMethod, place_of_expert
    from qurl_ray.engines.vllm.plugin import QurlConfig
    from qurl_ray.policy.experts import Mixture, MixtureMlp
    from qurl_ray.quant.formats import get_format
    from qurl_ray.quant.linear import QuantizedLinear
    from qurl_ray.quant.quantize import quantize

    init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, backend="gloo")
    ensure_model_parallel_initialized(1, 1)
    operations = torch.library.Library("vllm", "IMPL")  # in force as long as it is held
    operations.impl("fused_experts", fused_experts, "CPU", allow_override=True)
    sizes = Mixture(experts=6, active=2, width=128, normalizes=True)
    found = {}
    for name in ("none", "int8", "fp8", "fp8_block"):
        config = QurlConfig(format=name, keep=["lm_head"], weight_max_code=127 if name == "int8" else None)
        layer = torch.nn.Module()
        layer.layer_name, layer.top_k, layer.renormalize = "model.layers.0.mlp.experts", 2, True
        method = QurlExpertsMethod(types.SimpleNamespace(intermediate_size=128), config)
        method.create_weights(layer, 6, 256, 128, torch.bfloat16)
        assert not config.slices
        places = {key: parameter.data_ptr() for key, parameter in layer.named_parameters()}
        wrong, gap = 0, 0.0
        for seed in range(20):
            torch.manual_seed(seed)
            mixture = MixtureMlp(256, sizes, "silu").bfloat16().float()
            for index, expert in enumerate(mixture.experts):
                for part in ("gate_proj", "up_proj", "down_proj"):
                    linear = expert.get_submodule(part)
                    weight = linear.weight.detach().bfloat16().float()
                    parts = weight if name == "none" else quantize(weight, get_format(name))
                    if name != "none":
                        expert.set_submodule(part, QuantizedLinear(parts, None, emulate=True))
                for held, own in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                    vllms = layer.experts[index].get_submodule(held)
                    assert place_of_expert(f"model.layers.0.mlp.experts.{index}.{own[0]}.weight")[0].endswith(
                        f"routed_experts.experts.{index}.{held}.weight"
                    )
                    sent = [expert.get_submodule(part) for part in own]
                    values = [p.weight.detach() if name == "none" else p.resident() for p in sent]
                    vllms.quant_method.hold(vllms, values)
                    if name != "none":
                        (read,) = vllms.quant_method.resident()
                        wrong += not torch.equal(read.codes.float(), torch.cat([v.codes.float() for v in values]))
                        wrong += not torch.equal(read.scale, torch.cat([v.scale for v in values]))
            x = torch.randn(7, 256).bfloat16()
            with torch.no_grad():
                logits = torch.nn.functional.linear(x.float(), mixture.gate.weight)
                y, expected = method.apply_monolithic(layer, x, logits).float(), mixture(x.float()[None])[0]
            gap = max(gap, ((y - expected).norm() / expected.norm()).item())
        moved = {key: p.data_ptr() for key, p in layer.named_parameters()} != places
        found[name] = {"moved": moved, "wrong": wrong, "gap": gap, "parameters": len(places)}
    return found


def refusals() -> dict[str, str]:
    """What is said of layers that no kernel multiplies."""
    from qurl_ray.engines.vllm.kernels import FixedCodes, StackedCodes
    from qurl_ray.errors import QuantizationError
    from qurl_ray.quant.formats import get_format

    found = {}
    for case, (name, width) in {"expert's blocks": ("fp8_block", 192), "expert's int4": ("int4", 128)}.items():
        try:
            StackedCodes(get_format(name), 2, [width, width], 128, dtype=torch.bfloat16, name="mlp.experts.0.gate_up")
        except QuantizationError as error:
            found[case] = str(error)
    for case, (name, widths, dtype) in {
        "blocks": ("fp8_block", (192, 128), torch.bfloat16),
        "width": ("fp8", (40, 128), torch.bfloat16),
        "int4": ("int4", (128, 128), torch.bfloat16),
        "float32": ("int8", (128, 128), torch.float32),
    }.items():
        try:
            FixedCodes(
                torch.nn.Module(), get_format(name), [widths[0]], widths[1],
                dtype=dtype, device=torch.device("cpu"), name="model.layers.0.mlp.up",
            )  # fmt: skip
        except QuantizationError as error:
            found[case] = str(error)
    return found


def main(*wanted: str) -> None:
    pretend_h100()
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config

    checks = (operations, layers, memory, codes, experts, refusals)
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))):
        found = {check.__name__: check() for check in checks if check.__name__ in wanted}
    sys.stdout.write(f"FOUND {json.dumps(found)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
