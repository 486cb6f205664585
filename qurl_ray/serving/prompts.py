"""Encode the prompt that a client sends as the tokens that a policy reads."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from qurl_ray.config.shown import shortened
from qurl_ray.data.prompts import chat_ids, check_variables, conversation, text_ids
from qurl_ray.data.trained import kept_settings
from qurl_ray.errors import DataError
from qurl_ray.serving.protocol import ApiError

Messages = Sequence[dict[str, Any]]


def tokenize_prompt(
    prompt: str | Sequence[int] | Messages,
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str,
    tools: Sequence[dict[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Return the token ids of a prompt, int32 [length], as training has them.

    Args:
        prompt: plain text, token ids, or messages of a chat. Messages go through the tokenizer's chat template. If it
            has none, their contents, joined by newlines, replace {prompt} in `template`.
        tools: descriptions for the chat template, in OpenAI's format.
        variables: of the chat template; they replace those that the policy was trained with.

    Raises:
        ApiError: 400: the prompt has no tokens, ids are out of range, or the chat template or the tokenizer refuses it.
    """
    if isinstance(prompt, str):
        ids = _ids(prompt, tokenizer, "prompt")
    elif not prompt or isinstance(prompt[0], int):
        ids = list(cast(Sequence[int], prompt))
        if ids and not 0 <= min(ids) <= max(ids) < len(tokenizer):
            raise ApiError(400, f"token ids must be in 0 … {len(tokenizer) - 1}", param="prompt")
    elif tokenizer.chat_template is not None:
        ids = _chat(cast(Messages, prompt), tokenizer, tools, variables or {})
    elif variables:
        raise ApiError(400, "the policy has no chat template", param="chat_template_kwargs")
    else:
        said = "\n".join(message["content"] for message in cast(Messages, prompt))
        ids = _ids(template.replace("{prompt}", said), tokenizer, "messages")
    if len(ids) == 0:
        raise ApiError(400, "the prompt has no tokens", param="prompt" if isinstance(prompt, str) else None)
    return np.asarray(ids, dtype=np.int32)


def _ids(text: str, tokenizer: PreTrainedTokenizerBase, param: str) -> list[int]:
    try:
        return text_ids(text, tokenizer)
    except Exception as error:  # tokenizers raise Exception itself, for text that their vocabulary cannot write
        raise _refused(f"the tokenizer refuses the {param}", error, param) from None


def _chat(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]],
    variables: Mapping[str, Any],
) -> list[int]:
    if "tools" in variables:
        raise ApiError(400, "tools are a parameter of the request", param="chat_template_kwargs")
    try:
        check_variables(variables, tokenizer, "chat_template_kwargs")
    except DataError as error:
        raise ApiError(400, str(error), param="chat_template_kwargs") from None
    trained = kept_settings(tokenizer)
    given = trained.variables | dict(variables) | ({"tools": list(tools)} if tools else {})
    try:
        return chat_ids(conversation(messages, tokenizer, trained.system_prompt), tokenizer, given)
    except Exception as error:  # a template is a program of the policy's: it may raise anything
        raise _refused("the chat template refuses the messages", error, "messages") from None


def _refused(what: str, error: Exception, param: str) -> ApiError:
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    return ApiError(400, f"{what}: {kind}{shortened(str(error))}", param=param)
