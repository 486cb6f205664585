"""Messages in the form that chat templates take. Training, evaluation, environments and serving all read them here, so
that a policy sees the same conversation everywhere."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from qurl_ray.config.shown import shortened
from qurl_ray.errors import DataError


def read_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Return the messages of a prompt, each as `read_message` has it.

    Args:
        value: a sequence of mappings, as from JSON or Parquet.
        where: place of the prompt, for errors.

    Raises:
        DataError: there is none with text, or one is no message.
    """
    messages = [read_message(message, f"message {number}", where) for number, message in enumerate(value, start=1)]
    if not any(message["content"].strip() for message in messages):
        raise DataError(f"{where}: the conversation is empty")
    return messages


def read_message(message: Any, name: str, where: str) -> dict[str, Any]:
    """Return a message with role, content, tool_calls if there are some, and what else it has.

    - The content is text; parts of text are joined. It is empty beside calls where it is null or missing.
    - A call is {"type": "function", "function": {"name": …, "arguments": an object}}. Arguments may be given as JSON
      text.
    - Fields that are null are left out, also in arguments: tables give each row the keys of all others. Arguments as
      text keep them.
    - The role developer, OpenAI's new name, is system.

    Args:
        name: what errors call the message.
        where: its place, for errors.

    Raises:
        DataError: it has no role, or no content that is text.
    """
    if not isinstance(message, Mapping):
        raise DataError(f"{where}: {name} is {type(message).__name__}, expected a mapping with role and content")
    kept = {str(key): field for key, field in message.items() if field is not None}
    role = kept.get("role")
    if not isinstance(role, str):
        raise DataError(f"{where}: {name} has no role, expected a mapping with role and content")
    if "function_call" in kept:
        raise DataError(f"{where}: {name} has function_call, OpenAI's old form of a call; give it as tool_calls")
    calls = _from_json(kept.pop("tool_calls", None), where)
    if calls:
        if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
            raise DataError(f"{where}: the tool_calls of {name} are no list of mappings")
        kept["tool_calls"] = [_call(call, name, where) for call in calls]
    content = _text(kept.get("content", "" if calls else None), name, where)
    return kept | {"role": "system" if role == "developer" else role, "content": content}


def read_tools(value: Any, where: str) -> list[dict[str, Any]]:
    """Return descriptions of tools in OpenAI's format, in one order, without null fields and "strict": false.

    Args:
        value: a list of descriptions, or its JSON text; without {"type": "function", "function": …} around each, that
            is added.

    Raises:
        DataError: it is something else.
    """
    tools = _from_json(value, where)
    if not isinstance(tools, list | tuple):
        raise DataError(f"{where}: tools is {type(tools).__name__}, expected a list of descriptions, or its JSON text")
    descriptions = []
    for number, tool in enumerate(tools, start=1):
        tool = without_null(_from_json(tool, where))
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{where}: tool {number} is no description with a name")
        first = {key: function[key] for key in ("name", "description", "parameters") if key in function}
        others = {key: field for key, field in function.items() if not (key == "strict" and field is False)}
        descriptions.append({"type": "function", "function": first | others})
    check_text(descriptions, where)
    return descriptions


def read_variables(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the variables of the chat template that a row brings in `tools` and `chat_template_kwargs`, each of which
    may be JSON text.

    Raises:
        DataError: one of them is something else than descriptions of tools, and a mapping.
    """
    variables = _from_json(fields.get("chat_template_kwargs"), where)
    variables = {} if _is_nothing(variables) else without_null(variables)
    if not isinstance(variables, dict):
        raise DataError(
            f"{where}: chat_template_kwargs is {type(variables).__name__}, expected a mapping, or its JSON text"
        )
    given = [tools for tools in (fields.get("tools"), variables.pop("tools", None)) if not _is_nothing(tools)]
    if len(given) == 2:
        raise DataError(f"{where}: tools are there twice, also in chat_template_kwargs")
    tools = read_tools(given[0], where) if given else []
    return variables | {"tools": tools} if tools else variables


def is_conversation(value: Any) -> bool:
    """True if a prompt is a list of messages, and not text or something else."""
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], Mapping)


def conversation_in(text: str, where: str) -> Any:
    """Return the list of messages that a text is as JSON; None for any other text."""
    if not text.lstrip().startswith("["):
        return None
    messages = _from_json(text, where)
    talks = is_conversation(messages) and all(isinstance(item, dict) and "role" in item for item in messages)
    return messages if talks else None


def text_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation as text to read: the content of a single message, else each with its role and calls."""
    if len(messages) == 1:
        return messages[0]["content"]
    texts = []
    for message in messages:
        text = f"{message['role']}: {message['content']}"
        for call in message.get("tool_calls", ()):
            function = call["function"]
            text += f" {function['name']}({json.dumps(function['arguments'], ensure_ascii=False)})"
        texts.append(text)
    return "\n\n".join(texts)


def split_last_turn(
    messages: list[dict[str, Any]], meaning: str, where: str
) -> tuple[list[dict[str, Any]], str | None]:
    """Return a conversation without a turn of the assistant at its end, and this turn, if it is the expected answer.

    An empty turn, and one of calls, is no answer: the conversation stays as it is.

    Args:
        meaning: see config.task.RowsTask.last_turn.
        where: place of the conversation, for errors.

    Raises:
        DataError: there is such a turn, and its meaning is to be refused.
    """
    last = messages[-1]
    if last["role"] != "assistant" or not last["content"].strip() or last.get("tool_calls") or meaning == "continue":
        return messages, None
    if meaning == "answer" and len(messages) > 1:
        return messages[:-1], last["content"]
    raise DataError(
        f"{where}: the messages end with a turn of the assistant, {shortened(last['content'], 60)!r}, and the policy "
        "would continue it: set task.last_turn=answer if it is the expected answer, or task.last_turn=continue"
    )


def without_null(value: Any) -> Any:
    """Return plain data without the null fields of its mappings."""
    if isinstance(value, Mapping):
        return {str(key): without_null(field) for key, field in value.items() if field is not None}
    return [without_null(item) for item in value] if isinstance(value, list | tuple) else value


def check_text(value: Any, where: str) -> None:
    """Check that JSON data is text as UTF-8 has it: an escape such as \\ud83d alone is half of a character.

    Raises:
        DataError: it has half of a surrogate pair.
    """
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise DataError(f"{where}: {half} is half of a surrogate pair, which is no text") from None


def _text(content: Any, name: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        fault = f"{name} has no content" if content is None else f"the content of {name} is {type(content).__name__}"
        raise DataError(f"{where}: {fault}, expected text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"{where}: {name} has a part of type {kind!r}; a prompt is text, and nothing else, here")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    function = call.get("function") or call
    called = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(called, str):
        raise DataError(f"{where}: a call of {name} has no name of a function")
    given = function.get("arguments")
    arguments = _from_json(given, where) if isinstance(given, str) else without_null(given or {})
    if not isinstance(arguments, dict):
        raise DataError(f"{where}: the arguments of {called} in {name} are no object, nor JSON text of one")
    about = {key: call[key] for key in ("id", "type") if call.get(key) is not None}
    return {"type": "function"} | about | {"function": {"name": called, "arguments": arguments}}


def _is_nothing(value: Any) -> bool:
    """True for what tables and JSON have where nothing is: null, NaN and empty text."""
    return value is None or value != value or value == ""


def _from_json(value: Any, where: str) -> Any:
    """Return what a text has as JSON; anything else, also text that is no JSON, as it is.

    Raises:
        DataError: see check_text.
    """
    if not isinstance(value, str):
        return value
    try:
        data = json.loads(value)
    except (ValueError, RecursionError):
        return value
    check_text(data, where)
    return data
