"""A process of its own for vLLM: python vllm_generate.py FOLDER... < prompts.json > greedy tokens and log-probs.

In float32, so that nothing but the arithmetic of the quantized linears is between its log-probs and ours.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no further process that a deadline would leave behind
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # other tests run on the same cores
os.environ["TORCH_COMPILE_DISABLE"] = "1"  # and so no compiler, and no cache that other processes read
os.environ["VLLM_NO_USAGE_STATS"] = "1"


def greedy(folder: str, prompts: list[list[int]]) -> list[dict]:
    """{"ids", "logprobs"} of 12 tokens after each prompt."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=8,
        logprobs_mode="processed_logprobs",
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    found = []
    for request in llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False):
        answer = request.outputs[0]
        steps = zip(answer.token_ids, answer.logprobs, strict=True)
        found.append({"ids": list(answer.token_ids), "logprobs": [step[token].logprob for token, step in steps]})
    return found


if __name__ == "__main__":
    import torch

    # On CPUs with AMX, vLLM 0.32 prefers an INT8 kernel for 16-bit activations only; its other one takes float32.
    torch.cpu._is_amx_tile_supported = lambda: False
    prompts = json.load(sys.stdin)
    answers = [greedy(folder, prompts) for folder in sys.argv[1:]]
    sys.stdout.write(f"FOUND {json.dumps(answers)}\n")
