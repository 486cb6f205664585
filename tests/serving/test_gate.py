"""What stands before Ray Serve's proxy, around a proxy of the test's own."""

import asyncio
import json

import httpx
import pytest

from qurl_ray.serving.gate import Gate, _refusal

BODY = {"model": "m", "prompt": "12+34="}


class Proxy:
    """Does what it is told to, one time after the other, and remembers the requests."""

    def __init__(self, *acts):
        self._acts, self.bodies, self.headers = list(acts), [], []

    async def __call__(self, scope, receive, send):
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        self.bodies.append(json.loads(body) if body else None)
        self.headers.append(dict(scope["headers"]))
        await self._acts.pop(0)(send)


async def dies(send):
    """As Ray Serve's proxy ends when the replica has died: without a message."""


def says(status: int, body: bytes, kind: bytes = b"application/json", *more, ends: bool = True):
    async def act(send):
        headers = [[b"content-type", kind], *more]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": not ends})

    return act


def asked(proxy: Proxy, path: str = "/v1/completions", **headers: bytes) -> httpx.Response:
    async def main():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(Gate(proxy)), base_url="http://app") as client:
            sent = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
            return await client.post(path, json=BODY, headers=sent)

    return asyncio.run(main())


def test_a_request_whose_replica_dies_is_asked_again_whole():
    proxy = Proxy(dies, says(200, b'{"a": 1}'))
    assert asked(proxy).json() == {"a": 1}
    assert proxy.bodies == [BODY, BODY]


def test_a_request_that_kills_two_replicas_is_not_sent_to_a_third(caplog):
    proxy = Proxy(dies, dies)
    found = asked(proxy)
    assert (found.status_code, found.headers["retry-after"]) == (503, "1")
    assert found.json()["error"]["type"] == "server_error"
    assert len(proxy.bodies) == 2
    assert caplog.messages == ["/v1/completions: a replica has ended before it answered"] * 2


def test_what_has_begun_is_not_asked_again_and_ends_with_an_error():
    proxy = Proxy(says(200, b'data: {"choices":[]}\n\n', b"text/event-stream; charset=utf-8", ends=False))
    events = asked(proxy).text.strip().split("\n\n")
    assert events[0] == 'data: {"choices":[]}'
    assert json.loads(events[1].removeprefix("data: "))["error"]["type"] == "server_error"
    assert len(events) == 2
    assert len(proxy.bodies) == 1


def test_a_client_that_has_left_is_not_asked_for():
    async def main():
        left = iter([{"type": "http.request", "body": b"", "more_body": True}, {"type": "http.disconnect"}])

        async def receive():
            return next(left)

        sent, scope = [], {"type": "http", "path": "/v1/completions", "headers": []}

        async def send(message):
            sent.append(message)

        await Gate(proxy)(scope, receive, send)
        return sent

    proxy = Proxy(dies)
    assert asyncio.run(main()) == []
    assert len(proxy.bodies) == 1


@pytest.mark.parametrize(
    ("status", "wait", "expected"),
    [(404, [], (503, "1")), (503, [], (503, "1")), (429, [[b"retry-after", b"7"]], (429, "7"))],
)
def test_errors_of_ray_serve_are_in_openais_shape(status, wait, expected):
    """Its 404 is for an app that is being removed."""
    found = asked(Proxy(says(status, b"Ping http://.../-/routes", b"text/plain; charset=utf-8", *wait)))
    assert (found.status_code, found.headers["retry-after"]) == expected
    assert set(found.json()["error"]) == {"message", "type", "param", "code"}


def test_errors_of_replicas_pass():
    found = asked(Proxy(says(404, b'{"error": {"message": "no such model"}}')))
    assert (found.status_code, found.json()["error"]["message"]) == (404, "no such model")


def test_paths_of_ray_serve_are_none_but_for_its_health():
    for path in ("/-/routes", "/-/", "/-/other", "/%2D/routes"):
        assert asked(Proxy(), path).status_code == 404
    assert _refusal({"path": "*", "headers": []}).status == 404
    assert asked(Proxy(says(200, b"success", b"text/plain")), "/-/healthz").text == "success"


def test_headers_that_are_no_text_are_refused_and_those_for_ray_serve_are_dropped():
    found = asked(Proxy(), x_request_id=b"\xff\xfe")
    assert (found.status_code, "x-request-id" in found.text) == (400, True)
    proxy = Proxy(says(200, b"{}"))
    asked(proxy, serve_multiplexed_model_id=b"x", x_request_timeout_seconds=b"0.001", x_other="ключ".encode())
    assert not {b"serve-multiplexed-model-id", b"x-request-timeout-seconds"} & set(proxy.headers[0])
    assert proxy.headers[0][b"x-other"] == "ключ".encode()
