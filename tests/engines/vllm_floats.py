"""A process of its own for vLLM with the plugin alone: python vllm_floats.py FOLDER... < asked.json > found.

Each folder is a float checkpoint; the first is loaded at the start, the others through vLLM's own `reload_weights`.
"""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from qurl_ray.engines.vllm.shards import TensorShard, join_shards
from qurl_ray.quant.formats import get_format


def digest(parts: Sequence[np.ndarray]) -> str:
    """Of a tensor's arrays."""
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


def whole(llm: Any, name: str, shape: tuple[int, ...], format_name: str) -> tuple[np.ndarray, ...]:
    """A tensor as the ranks hold it together."""
    found = []
    for _, shards in llm.collective_rpc("qurl", args=("resident", name)):
        for start, stop, columns, wire in shards:
            arrays = tuple(np.frombuffer(data, dtype).reshape(part) for dtype, part, data in wire)
            found.append((TensorShard(start=start, stop=stop, at=0, columns=columns), arrays))
    return join_shards(name, shape, get_format(format_name) if len(found[0][1]) == 2 else None, found)


def main(folders: list[str], settings: dict, prompts: list[list[int]], shapes: dict, ranks: int) -> None:
    from vllm import LLM, SamplingParams

    import qurl_ray.engines.vllm.plugin  # noqa: F401

    llm = LLM(
        folders[0],
        dtype="float32",
        quantization="qurl",
        hf_overrides={"quantization_config": {"quant_method": "qurl", **settings}},
        enforce_eager=True,
        skip_tokenizer_init=True,
        tensor_parallel_size=ranks,
        max_num_seqs=8,
        kv_cache_memory_bytes=1 << 25,
        logprobs_mode="processed_logprobs",
        worker_extension_cls="qurl_ray.engines.vllm.worker.WorkerExtension",
    )
    sampling = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True, logprobs=0, detokenize=False)
    found = []
    for number, folder in enumerate(folders):
        if number:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
            llm.reset_prefix_cache()
        answers = []
        for ids in prompts:  # one at a time, so that nothing depends on the batch
            (request,) = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
            answer = request.outputs[0]
            steps = zip(answer.token_ids, answer.logprobs, strict=True)
            answers.append({"ids": list(answer.token_ids), "logprobs": [step[token].logprob for token, step in steps]})
        resident = {name: digest(whole(llm, name, tuple(shape), settings["format"])) for name, shape in shapes.items()}
        found.append({"answers": answers, "resident": resident})
    sys.stdout.write(f"FOUND {json.dumps(found)}\n")


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no further process that a deadline would leave behind
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # other tests run on the same cores
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    given = json.load(sys.stdin)
    main(sys.argv[1:], **given)
