"""Encode the prompt that a client sends as the tokens that a policy reads."""

from collections.abc import Sequence
from typing import cast

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from qurl_ray.config.shown import shortened
from qurl_ray.serving.protocol import ApiError

Messages = Sequence[dict[str, str]]


def tokenize_prompt(
    prompt: str | Sequence[int] | Messages, tokenizer: PreTrainedTokenizerBase, *, template: str
) -> np.ndarray:
    """Return the token ids of a prompt, int32 [length].

    Args:
        prompt: plain text, token ids, or messages of a chat. Messages go through the tokenizer's chat template. If it
            has none, their contents, joined by newlines, replace {prompt} in `template`.

    Raises:
        ApiError: 400: the prompt has no tokens, ids are out of range, or the chat template refuses the messages.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    elif not prompt or isinstance(prompt[0], int):
        ids = list(prompt)
        if ids and not 0 <= min(ids) <= max(ids) < len(tokenizer):
            raise ApiError(400, f"token ids must be in 0 … {len(tokenizer) - 1}", param="prompt")
    elif tokenizer.chat_template is not None:
        ids = _chat(cast(Messages, prompt), tokenizer)
    else:
        said = "\n".join(message["content"] for message in cast(Messages, prompt))
        ids = tokenizer(template.replace("{prompt}", said))["input_ids"]
    if len(ids) == 0:
        raise ApiError(400, "the prompt has no tokens", param="prompt" if isinstance(prompt, str) else None)
    return np.asarray(ids, dtype=np.int32)


def _chat(messages: Messages, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    try:
        return tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    except jinja2.TemplateError as error:  # the text is from the policy's template, and only about messages
        raise ApiError(
            400, f"the chat template refuses the messages: {shortened(str(error))}", param="messages"
        ) from None
