"""A server with OpenEnv's protocol over a WebSocket, as its own `HTTPEnvServer` in openenv 0.10: a session for each
connection, observations as {"observation", "reward", "done"}, errors as {"message", "code"}.

Its environment counts turns from the seed on, and does what the action says.
"""

import asyncio
import json
import socket
import threading
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect


class Session:
    """Environment of one connection. An action has a `message`, text, and perhaps a `number`."""

    def reset(self, data: dict) -> dict:
        self.count, self.data = data.get("seed", 0), data
        shown = {"prompt": f"Count from {self.count}.", "messages": [{"content": f"hello {data.get('name')}"}]}
        return {"observation": shown | {"metadata": {"secret": 1}}, "reward": None, "done": data.get("over", False)}

    def step(self, action: dict) -> dict:
        self.count += action.get("number", 1)
        done = action["message"] == "end"
        shown = {"prompt": f"{self.count}: {action['message']}", "messages": [], "metadata": {}}
        return {"observation": shown, "reward": 0.5 if action["message"] != "free" else None, "done": done}


def faults(action: dict) -> list[dict]:
    """What pydantic finds wrong with an action."""
    unknown = [{"loc": [name], "msg": "Extra inputs are not permitted"} for name in set(action) - {"message", "number"}]
    if not isinstance(action.get("message"), str):
        return [*unknown, {"loc": ["message"], "msg": "Input should be a valid string"}]
    return unknown


class Server:
    """What the tests see of the server."""

    def __init__(self, sessions: int) -> None:
        self.most, self.open, self.closed = sessions, 0, []
        self.app = Starlette(routes=[WebSocketRoute("/base/ws", self.serve)])

    async def serve(self, connection: WebSocket) -> None:
        await connection.accept()
        if self.open >= self.most:
            full = {"message": "no capacity", "code": "CAPACITY_REACHED", "active_sessions": self.open}
            await connection.send_text(json.dumps({"type": "error", "data": full}))
            await connection.close()
            return
        self.open += 1
        end = "lost"
        try:
            end = await self.talk(connection, Session())
        except WebSocketDisconnect:
            pass
        finally:
            self.open -= 1
            self.closed.append(end)

    async def talk(self, connection: WebSocket, session: Session) -> str:
        while True:
            said = json.loads(await connection.receive_text())
            match said:
                case {"type": "close"}:
                    await connection.close()
                    return "closed"
                case {"type": "reset", "data": data}:
                    reply = {"type": "observation", "data": session.reset(data)}
                case {"type": "step", "data": {"message": "hang"}}:
                    await asyncio.sleep(600)
                case {"type": "step", "data": {"message": "leave"}}:
                    await connection.close(1011)
                    return "left"
                case {"type": "step", "data": {"message": "odd"}}:
                    reply = {"type": "pong", "data": {}}
                case {"type": "step", "data": {"message": "raise"}}:
                    reply = {"type": "error", "data": {"message": "no such move", "code": "EXECUTION_ERROR"}}
                case {"type": "step", "data": action}:
                    wrong = faults(action) if isinstance(action, dict) else [{"loc": [], "msg": "no mapping"}]
                    data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": wrong}
                    reply = {"type": "error", "data": data}
                    if not wrong:
                        reply = {"type": "observation", "data": session.step(action)}
                case _:
                    reply = {"type": "error", "data": {"message": "Unknown message type", "code": "UNKNOWN_TYPE"}}
            await connection.send_text(json.dumps(reply))
            if said.get("data", {}) == {"message": "idle"}:
                last = {"message": "idle for too long", "code": "SESSION_ERROR"}
                await connection.send_text(json.dumps({"type": "error", "data": last}))
                await connection.close()
                return "idle"


@contextmanager
def openenv_server(sessions: int = 100, ping_s: float = 20.0):
    """Yield (address, Server), in a thread.

    Args:
        sessions: most at a time.
        ping_s: seconds between two pings, and until a session without an answer to one ends.
    """
    server = Server(sessions)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(server.app, log_level="warning", ws_ping_interval=ping_s, ws_ping_timeout=ping_s, ws="auto")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/base", server
    finally:
        running.should_exit = running.force_exit = True
        thread.join()
        listening.close()
