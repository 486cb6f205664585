"""A policy of a known shape with random weights, and random answers to learn from: for timings and memory alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from qurl_ray.planning.shapes import Shape
from qurl_ray.planning.workload import Workload
from qurl_ray.types import PolicySpec, Trajectory

_CONTEXT, _MOST_TOKENS = 1024, 128  # least context of a policy, and most tokens of a prompt or an answer


def shape_spec(shape: Shape, work: Workload, folder: Path) -> PolicySpec:
    """Write the config.json of a Llama with this shape to `folder`, or of a Qwen3-MoE if it has experts, and return its
    spec."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
        "max_position_embeddings": max(2 * _CONTEXT, work.prompt + work.response + 1),
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if shape.experts > 1:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.active,
            "moe_intermediate_size": shape.intermediate,
            "norm_topk_prob": True,
        }
    (folder / "config.json").write_text(json.dumps(config))
    return PolicySpec(source=str(folder))


def trajectory(shape: Shape, work: Workload, index: int) -> Trajectory:
    """Return a sequence of random tokens, of the workload's lengths, or shorter where those are long."""
    rng = np.random.default_rng(index)
    prompt, answer = min(work.prompt, _MOST_TOKENS), min(max(1, round(work.answer)), _MOST_TOKENS)
    return Trajectory(
        uid=f"{index}/0",
        prompt_ids=rng.integers(shape.vocab, size=prompt).astype(np.int32),
        token_ids=rng.integers(shape.vocab, size=answer).astype(np.int32),
        logprobs=np.full(answer, -float(np.log(shape.vocab)), dtype=np.float32),
        reward=1.0,
        advantage=1.0 - 2 * (index % 2),
        versions=np.zeros(answer, dtype=np.int32),
        group=index,
    )
