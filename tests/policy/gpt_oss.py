"""A tiny gpt-oss with random weights, written by stock transformers, and the same one in MXFP4."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from qurl_ray.policy.load import load_tokenizer
from qurl_ray.types import PolicySpec


def written(folder: Path, tokenizer_of: PolicySpec, *, scale: float = 0.3, **settings) -> PolicySpec:
    """Write a checkpoint; by default, of four layers, six experts and a window of five tokens. Scores of sinks are near
    those of keys, so that they matter."""
    tokenizer = load_tokenizer(tokenizer_of)
    sizes: dict = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32, "intermediate_size": 96, "num_local_experts": 6, "num_experts_per_tok": 2}
    sizes |= {"sliding_window": 5, "max_position_embeddings": 64, "vocab_size": len(tokenizer)}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 150000.0}
    sizes["rope_parameters"] = yarn | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    sizes |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(GptOssConfig(**sizes | settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = name.endswith("norm.weight")
            parameter.copy_((1.0 if norm else 0.0) + scale * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return PolicySpec(source=str(folder))


def random_mxfp4(*shape: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks and scales of weights [..., outputs, inputs], most below 1."""
    random = torch.Generator().manual_seed(seed)
    *outer, inputs = shape
    blocks = torch.randint(0, 256, (*outer, inputs // 32, 16), generator=random, dtype=torch.uint8)
    return blocks, torch.randint(120, 126, blocks.shape[:-1], generator=random, dtype=torch.uint8)


def in_mxfp4(spec: PolicySpec, folder: Path) -> tuple[PolicySpec, PolicySpec]:
    """Return a checkpoint with other experts in MXFP4, beside one that holds them as transformers dequantizes them."""
    tensors = load_file(Path(spec.source) / "model.safetensors")
    packed, plain = dict(tensors), dict(tensors)
    for seed, name in enumerate(name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))):
        experts, inputs, outputs = tensors[name].shape
        blocks, scales = random_mxfp4(experts, outputs, inputs, seed=seed)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales).float()
    specs = []
    for kind, chosen in (("packed", packed), ("plain", plain)):
        shutil.copytree(spec.source, folder / kind)
        save_file(chosen, folder / kind / "model.safetensors", metadata={"format": "pt"})
        specs.append(PolicySpec(source=str(folder / kind)))
    path = folder / "packed" / "config.json"
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    return specs[0], specs[1]
