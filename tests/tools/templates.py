"""Chat templates with tools, in the manner of Qwen's and Llama's, and a tokenizer for them: bytes as tokens."""

from tests.data.test_turns import tokenizer_with

__all__ = ["HERMES", "LLAMA", "tokenizer_with"]

HERMES = (
    "{% if tools %}<|im_start|>system\n# Tools\n{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role }}{% if m.content %}{{ '\n' + m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}"
    """{{ '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}"""
    "{{ c.function.arguments | tojson + '}\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{% if tools %}{{ '<|im_start|>system\n\n' + tools | tojson + '<|im_end|>' }}{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ '<|im_start|>ipython\n\n' + m.content | tojson + '<|im_end|>' }}"
    "{% elif m.tool_calls %}"
    """{{ '<|im_start|>assistant\n\n{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}"""
    "{{ m.tool_calls[0].function.arguments | tojson + '}<|im_end|>' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n\n' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
