"""A program of an agent that gives the model tools. Tests copy it to a module without a dot."""

import aiohttp
import verifiers.v1 as vf

__all__ = ["WithTools"]


class WithTools(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        tool = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {"type": "object"}}}
        asked = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}], "tools": [tool]}
        head = {"Authorization": f"Bearer {secret}"}
        async with (
            aiohttp.ClientSession(headers=head) as client,
            client.post(f"{endpoint}/chat/completions", json=asked) as reply,
        ):
            return vf.ProgramResult(exit_code=int(not reply.ok), stdout="", stderr=await reply.text())
