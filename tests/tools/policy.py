"""A policy that knows one conversation by heart: it asks a tool, and tells the result."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qurl_ray.policy.save import save_policy
from qurl_ray.tools.registry import Registry
from tests.tools.templates import HERMES, tokenizer_with

FUNCTION = "tests.tools.functions:multiply"
ASKED, ANSWER = "6 times 7?", "It is 42."
ARGUMENTS = {"a": 6, "b": 7}


def save_calling_policy(folder: Path) -> Path:
    """Train the policy in seconds, and save it."""
    tokenizer = tokenizer_with(HERMES)
    call = {"type": "function", "function": {"name": "multiply", "arguments": ARGUMENTS}}
    messages = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": ANSWER},
    ]
    text = tokenizer.apply_chat_template(messages, tools=Registry([FUNCTION]).schemas(), tokenize=False)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(400):
        loss = model(input_ids=ids, labels=ids).loss
        if loss < 0.005:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.02, "the conversation was not learned"
    save_policy(model, tokenizer, folder)
    return folder
