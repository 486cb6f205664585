"""The format of calls that a chat template writes."""

from typing import Any

from qurl_ray.tools.calls import FORMATS, ToolCall, ToolFormat, read_turn

_ASKED = {"role": "user", "content": "call"}
_CALL = ToolCall(name="qurl_probe", arguments={"number": 1})


def template_format(tokenizer: Any) -> ToolFormat | None:
    """Return the format in which the chat template writes a call; None if it knows no calls, or writes them in another
    form. A call is rendered and read."""
    if tokenizer.chat_template is None:
        return None
    function = {"name": _CALL.name, "arguments": _CALL.arguments}
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    try:
        before = tokenizer.apply_chat_template([_ASKED], tokenize=False, add_generation_prompt=True)
        text = tokenizer.apply_chat_template([_ASKED, called], tokenize=False)
    except Exception:  # a template is a program, which may raise anything: this one takes no calls
        return None
    turn = text.removeprefix(before)
    for special in tokenizer.all_special_tokens:  # its end
        turn = turn.partition(special)[0]
    return next((format for format in FORMATS if _CALL in read_turn(turn, format)), None)
