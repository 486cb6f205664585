"""Prompts that are conversations: lists of messages, as chat templates take them."""

from collections.abc import Mapping, Sequence
from typing import Any

from qurl_ray.errors import DataError


def read_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Return the messages of a prompt: mappings with role, content and what else there is, except null fields, which
    Parquet adds.

    Args:
        value: a sequence of mappings, as from JSON or Parquet.
        where: place of the prompt, for errors.

    Raises:
        DataError: it is empty, or a message has no role or no text.
    """
    found = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping):
            raise DataError(f"{where}: message {number} is {type(message).__name__}, expected role and content")
        kept = {str(key): field for key, field in message.items() if field is not None}
        for key in ("role", "content"):
            if isinstance(kept.get(key), str):
                continue
            if key == "content" and isinstance(kept.get(key), Sequence):
                raise DataError(f"{where}: the content of message {number} is a list of parts; prompts are text here")
            raise DataError(f"{where}: message {number} has no {key} (expected role and content, both text)")
        found.append(kept)
    if not found or not any(message["content"].strip() for message in found):
        raise DataError(f"{where}: the conversation is empty")
    return found


def is_conversation(value: Any) -> bool:
    """True if a prompt is a list of messages, and not text or something else."""
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation as text to read: the content of a single message, else each with its role."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
