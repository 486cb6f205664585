"""Encode the prompt that a client sends as the tokens that a policy reads, as training does."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from qurl_ray.config.shown import shortened
from qurl_ray.data.prompts import chat_ids, check_variables, conversation, text_ids
from qurl_ray.data.trained import kept_settings
from qurl_ray.errors import DataError
from qurl_ray.serving.protocol import ApiError


def prompt_ids(prompt: str | Sequence[int], tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Return the token ids of a text, or of ids, int32 [length].

    Raises:
        ApiError: 400: there are no tokens, ids are out of range, or the tokenizer refuses the text.
    """
    if isinstance(prompt, str):
        return _ids(lambda: text_ids(prompt, tokenizer), "the tokenizer refuses the prompt", "prompt")
    if prompt and not 0 <= min(prompt) <= max(prompt) < len(tokenizer):
        raise ApiError(400, f"token ids must be in 0 … {len(tokenizer) - 1}", param="prompt")
    return _ids(lambda: prompt, "", "prompt")


def chat_prompt_ids(
    messages: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str = "{prompt}",
    tools: Sequence[dict[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Return the token ids of a chat, int32 [length].

    Args:
        messages: they go through the tokenizer's chat template. If it has none, their contents, joined by newlines,
            replace {prompt} in `template`.
        tools: descriptions for the chat template, in OpenAI's format.
        variables: of the chat template; they replace those that the policy was trained with.

    Raises:
        ApiError: 400: there are no tokens, or the chat template or the tokenizer refuses the messages.
    """
    if tokenizer.chat_template is None:
        if variables:
            raise ApiError(400, "the policy has no chat template", param="chat_template_kwargs")
        text = template.replace("{prompt}", "\n".join(message["content"] for message in messages))
        return _ids(lambda: text_ids(text, tokenizer), "the tokenizer refuses the messages", "messages")
    if variables and "tools" in variables:
        raise ApiError(400, "tools are a parameter of the request", param="chat_template_kwargs")
    try:
        check_variables(variables or {}, tokenizer, "chat_template_kwargs")
    except DataError as error:
        raise ApiError(400, str(error), param="chat_template_kwargs") from None
    trained = kept_settings(tokenizer)
    given = trained.variables | dict(variables or {}) | ({"tools": list(tools)} if tools else {})
    return _ids(
        lambda: chat_ids(conversation(messages, tokenizer, trained.system_prompt), tokenizer, given),
        "the chat template refuses the messages",
        "messages",
    )


def _ids(encode: Callable[[], Sequence[int]], refusal: str, param: str) -> np.ndarray:
    try:
        ids = encode()
    except Exception as error:  # a template is a program of the policy's, and tokenizers raise Exception itself
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        raise ApiError(400, f"{refusal}: {kind}{shortened(str(error))}", param=param) from None
    if len(ids) == 0:
        raise ApiError(400, "the prompt has no tokens", param=param)
    return np.asarray(ids, dtype=np.int32)
