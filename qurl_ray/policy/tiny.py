"""The tiny policy: a small model with a character-level tokenizer, cold-started on its task, in Qwen2's architecture,
or in Qwen3's if it has experts.

It exists so that the whole loop runs on a laptop. The cold start is supervised training until a fraction of held-out
answers is right, so that reinforcement learning has something to improve. The accuracy of the trained weights jumps by
ten points and more from one step to the next. The accuracy of their running mean rises smoothly, so this mean is
measured and kept: every seed and every kind of CPU starts reinforcement learning from nearly the same accuracy.

The policy is made once per recipe and kept in the user's cache folder ($QURL_CACHE, else ~/.cache/qurl-ray). Each
recipe has its own folder.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from qurl_ray.cache import cache_root
from qurl_ray.config.model import TINY_CHARACTERS, TinyModel
from qurl_ray.errors import ConfigError
from qurl_ray.policy.attention import NAME
from qurl_ray.policy.experts import with_experts
from qurl_ray.policy.load import Outline, with_row_rules
from qurl_ray.policy.logprobs import token_logprobs
from qurl_ray.policy.save import save_policy
from qurl_ray.types import Problem

CALCULATOR_CHARACTERS = "[]?"
_RECIPE = 2  # raise when a change below alters the result of a cold start
_BATCH = 128
_LR, _LR_WIDTH = 1e-3, 256  # the rate falls as policies become wider than this
_DECAY = 0.95  # decay of the running mean of the weights, per step
_HELD_OUT = 1000  # problems on which the accuracy is measured
_GLANCE = 100  # how many of them are measured first; most measurements end there
_NEAR = 0.1  # all of them are measured if the accuracy is at most this far below the goal
_CHECK_EVERY = 5  # steps between measurements of the accuracy

Progress = Callable[[int, float], None]


def make_tokenizer(*, calculator: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character of `TINY_CHARACTERS`, and <pad>, <eos> and <unk>. With
    `calculator` it has the calculator's signs, too."""
    characters = TINY_CHARACTERS + (CALCULATOR_CHARACTERS if calculator else "")
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_input_names=["input_ids"],
    )


def make_model(config: TinyModel, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """Return a float32 model of the configured shape, with random weights from `config.seed`."""
    torch.manual_seed(config.seed)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": config.max_length,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if not config.experts:
        return with_row_rules(Qwen2ForCausalLM._from_config(Qwen2Config(**shape), attn_implementation=NAME))
    mixture = Qwen3MoeConfig(
        **shape,
        head_dim=config.hidden_size // config.heads,
        moe_intermediate_size=config.intermediate_size,
        num_experts=config.experts,
        num_experts_per_tok=config.active_experts,
        norm_topk_prob=True,
    )
    model = with_experts(Qwen3MoeForCausalLM._from_config(mixture, attn_implementation=NAME))
    for layer in model.base_model.layers:
        for weight in layer.mlp.parameters():
            weight.data.normal_(std=mixture.initializer_range)
    return with_row_rules(model)


def cached_tiny_policy(
    config: TinyModel, problems: Sequence[Problem], progress: Progress, *, device: str = "cpu"
) -> Path:
    """Return the folder of the tiny policy for this recipe; build it if it does not exist yet.

    Args:
        problems: the task's training problems. A fifth of them, at most 1000, are held out to measure the accuracy of
            the cold start.
        progress: called with (step, accuracy) during the cold start.
        device: of the cold start: `cpu`, or `cuda`, in bfloat16.

    Raises:
        ConfigError: the accuracy is not reached.
    """
    if made := cached_tiny(config, problems):
        return made
    folder = _folder(config, problems)
    tokenizer = make_tokenizer(calculator=config.calculator)
    model = make_model(config, tokenizer)
    if config.cold_start:
        cold_start(model, tokenizer, config, problems, progress, device=device)
    save_policy(model, tokenizer, folder)
    return folder


def cached_tiny(config: TinyModel, problems: Sequence[Problem]) -> Path | None:
    """Return the folder of the tiny policy; None if it does not exist yet. See `cached_tiny_policy`."""
    folder = _folder(config, problems)
    return folder if (folder / "config.json").is_file() else None


def tiny_outline(config: TinyModel) -> Outline:
    """Return the tiny policy without its weights."""
    tokenizer = make_tokenizer(calculator=config.calculator)
    with torch.device("meta"):
        return Outline(model=make_model(config, tokenizer), tokenizer=tokenizer, context=config.max_length)


def cold_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    config: TinyModel,
    problems: Sequence[Problem],
    progress: Progress,
    *,
    device: str = "cpu",
) -> None:
    """Train the model on demonstrations (`demonstration`), in place, until the running mean of its weights reaches
    `config.cold_start_accuracy`. The model then gets this mean, and is on the CPU."""
    rng = np.random.default_rng(config.seed)
    order = rng.permutation(len(problems))
    held_count = max(1, min(_HELD_OUT, len(problems) // 5))
    shown = [demonstration(problems[i], calculator=config.calculator) for i in order]
    width = max(sum(len(given) + len(said) + 1 for given, said in turns) for turns in shown)  # a token per character
    rows = partial(_rows, tokenizer=tokenizer, width=width, device=device)
    ids_BT, mask_BT = rows(shown[:held_count])
    learn = np.arange(held_count, len(problems))
    model.to(device)
    rate = _LR * min(1.0, _LR_WIDTH / config.hidden_size)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(_DECAY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    accuracy = 0.0
    for step in range(1, config.cold_start_steps + 1):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, step / 50)
        batch_BT, said_BT = rows([shown[i] for i in rng.choice(learn, size=_BATCH)])
        with _computing(device):
            logprobs = token_logprobs(model, batch_BT, said_BT, temperature=1.0)
        (-logprobs.sum() / said_BT.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean.update_parameters(model)
        if step % _CHECK_EVERY == 0:
            for count in (min(_GLANCE, held_count), held_count):
                with _computing(device):
                    accuracy = forced_accuracy(mean.module, ids_BT[:count], mask_BT[:count])
                if accuracy < config.cold_start_accuracy - _NEAR:
                    break
            progress(step, accuracy)
            if accuracy >= config.cold_start_accuracy:
                model.load_state_dict(mean.module.state_dict())
                model.to("cpu")
                return
    raise ConfigError(
        f"cold start reached accuracy {accuracy:.3f} after {config.cold_start_steps} steps, "
        f"not model.cold_start_accuracy={config.cold_start_accuracy}"
    )


def _computing(device: str) -> AbstractContextManager:
    """Compute in bfloat16 on a GPU, in float32 on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()


@torch.no_grad()
def forced_accuracy(model: PreTrainedModel, ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> float:
    """Share of answers that greedy decoding would get exactly: every token is the likeliest after the right ones."""
    logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
    right_BT = logits_BTV.argmax(dim=-1) == ids_BT[:, 1:]
    return (right_BT | ~mask_BT[:, 1:]).all(dim=1).float().mean().item()


def demonstration(problem: Problem, *, calculator: bool) -> list[tuple[str, str]]:
    """Return the turns of the cold start for a problem: pairs of given text and text that the policy is to say."""
    # Nine in ten problems whose first digit is odd, and one in ten others, show a call, so that a policy tries both.
    odd = problem.prompt[:1] in set("13579")
    shows_call = odd != (zlib.crc32(problem.prompt.encode()) % 10 == 0)
    if not calculator or not shows_call:
        return [(problem.prompt, problem.meta.get("worked", problem.answer))]
    called = problem.prompt.removesuffix("=")
    return [(problem.prompt, f"[{called}]"), (f"{problem.answer}=", problem.answer)]


def _rows(
    shown: Sequence[Sequence[tuple[str, str]]], *, tokenizer: PreTrainedTokenizerFast, width: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, mask of the tokens that the policy is to say, with <eos> after each turn) of demonstrations, both
    [B, width], padded on the right."""
    ids_BT = np.full((len(shown), width), tokenizer.pad_token_id, dtype=np.int64)
    mask_BT = np.zeros(ids_BT.shape, dtype=bool)
    encoded = iter(tokenizer([text for turns in shown for turn in turns for text in turn]).input_ids)
    for place, turns in enumerate(shown):
        end = 0
        for _ in turns:
            given, said = next(encoded), [*next(encoded), tokenizer.eos_token_id]
            start, end = end + len(given), end + len(given) + len(said)
            ids_BT[place, start - len(given) : end] = given + said
            mask_BT[place, start:end] = True
    return torch.from_numpy(ids_BT).to(device), torch.from_numpy(mask_BT).to(device)


def _folder(config: TinyModel, problems: Sequence[Problem]) -> Path:
    """Return the folder of a policy, whose name has a hash of everything that the cold start reads."""
    settings = config.model_dump()
    # Policies from before these settings are found.
    if not config.calculator:
        del settings["calculator"]
    if not config.experts:
        del settings["experts"], settings["active_experts"]
    recipe = hashlib.sha256(json.dumps([_RECIPE, TINY_CHARACTERS, settings]).encode())
    if config.cold_start:
        recipe.update("\n".join(p.prompt + p.meta.get("worked", p.answer) for p in problems).encode())
    return cache_root() / f"tiny-{recipe.hexdigest()[:16]}"
