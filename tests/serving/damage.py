"""Requests that are damaged in every way: bytes, encodings, JSON, headers, sizes, messages that break a template."""

import asyncio
import json
import random
from collections import Counter

from tests.serving.apps import BREAKING, KEY, SUM

BODIES = {
    "chat/completions": {"model": "first", "messages": SUM, "max_tokens": 2, "seed": 1, "temperature": 0.5, "n": 1},
    "completions": {"model": "first", "prompt": "1+2=", "max_tokens": 2, "stop": ["#"], "top_p": 0.9, "logprobs": 1},
}
FIELDS = [
    "top_k",
    "stream",
    "stream_options",
    "logit_bias",
    "user",
    "tools",
    "response_format",
    "best_of",
    "x",
    "logprobs",
]
ODD = [
    b"\xed\xa0\x80",
    b"\xff",
    b"\x00",
    b"\xef\xbb\xbf",
    b"\xf4\x90\x80\x80",
    b"\\ud800",
    b"\\u0000",
    b"\\",
    b'"',
    b"}",
]


def damaged(seed: int) -> bytes:
    """The bytes of a request over HTTP/1.1."""
    draw = random.Random(seed)
    path = draw.choice(list(BODIES))
    lines = {"host": b"x", "authorization": b"Bearer " + KEY.encode(), "content-type": b"application/json"}
    line, body = f"POST /v1/{path} HTTP/1.1".encode(), written(BODIES[path])
    kind = draw.choice([_bytes, _encoding, _values, _structure, _messages, _content_type, _size, _line])
    if kind is _bytes:
        body = _bytes(draw, body)
    elif kind in (_encoding, _values, _structure, _messages):
        body = kind(draw, path)
    lines["content-length"] = str(len(body)).encode()
    if kind in (_content_type, _size):
        lines, body = kind(draw, lines, body)
    elif kind is _line:
        line = _line(draw, line)
    head = b"".join(b"%s: %s\r\n" % (name.encode(), value) for name, value in lines.items() if value is not None)
    return line + b"\r\nconnection: close\r\n" + head + b"\r\n" + body


def written(body: object) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode(errors="surrogatepass")


def _bytes(draw: random.Random, body: bytes) -> bytes:
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(body) + 1)
        body = draw.choice(
            [
                body[:at] + draw.choice(ODD) + body[at:],
                body[:at] + draw.randbytes(draw.randint(1, 8)) + body[at + 1 :],
                body[:at] + body[at + draw.randint(1, 9) :],
                body[:at],
            ]
        )
    return body


def _encoding(draw: random.Random, path: str) -> bytes:
    text = json.dumps(BODIES[path] | {"user": draw.choice(["", "ü", "中", "🙂"])}, ensure_ascii=False)
    name = draw.choice(["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be", "utf-7", "utf-8-sig", "gb18030"])
    return draw.choice([b"", b"\xef\xbb\xbf", b"\xff\xfe"]) + text.encode(name)


def _value(draw: random.Random) -> object:
    return draw.choice(
        [
            *(None, True, False, 0, -1, 2, 2**63, -(2**70), 0.0, -0.5, 1e308, float("nan"), float("inf")),
            *(
                "",
                "x",
                "\ud800",
                "\x00",
                "🙂" * 9,
                "9" * 5000,
                [],
                {},
                [[]],
                [None],
                ["a", 1],
                [1, "a"],
                {"": {}},
                [10**9],
            ),
            *([{}], [{"role": "user"}], [{"role": "user", "content": draw.choice([None, 5, [], {}, [{}], "\udfff"])}]),
            *({"include_usage": draw.choice([1, "x", None])}, {"type": "json_object"}, [draw.randrange(-3, 99)] * 3),
        ]
    )


def _values(draw: random.Random, path: str) -> bytes:
    body = dict(BODIES[path])
    for _ in range(draw.randint(1, 3)):
        body[draw.choice([*body, *FIELDS])] = _value(draw)
    if draw.random() < 0.2:
        body.pop(draw.choice([name for name in body if name != "max_tokens"]))
    return written(body)


def _structure(draw: random.Random, path: str) -> bytes:
    deep, good = draw.choice([50, 500, 5000, 30_000]), written(BODIES[path])
    return draw.choice(
        [
            b"[" * deep,
            b'{"a":' * min(deep, 6000) + b"1" + b"}" * min(deep, 6000),
            good[:-1] + b', "user": ' + b"[" * deep + b"]" * deep + b"}",
            good[:-1] + b', "seed": ' + b"9" * deep + b"}",
            good[:-1] + b', "temperature": 1e' + b"9" * min(deep, 400) + b"}",
            good[:-1] + b', "model": "second", "model": 5}',
            written([BODIES[path]]),
            written(_value(draw)),
            good + good,
        ]
    )


def _messages(draw: random.Random, path: str) -> bytes:
    contents = [
        *BREAKING,
        "\x00",
        "é",
        "\u2028",
        "🙂",
        "<pad>",
        "</s>",
        "{{ 1 // 0 }}",
        "{% for %}",
        "1" * 3000,
        "\ud83d",
    ]
    messages = [
        {"role": draw.choice(["user", "system", "assistant", "developer"]), "content": draw.choice(contents)}
        for _ in range(draw.randint(1, 4))
    ]
    prompt = [message["content"] for message in messages]
    return written(BODIES[path] | ({"messages": messages} if "messages" in BODIES[path] else {"prompt": prompt}))


def _content_type(draw: random.Random, lines: dict, body: bytes) -> tuple[dict, bytes]:
    kinds = [
        None,
        b"",
        b"text/plain",
        b"multipart/form-data",
        b"application/json;charset=utf-16",
        b"\xff",
        b";",
        b"json",
    ]
    return lines | {"content-type": draw.choice(kinds)}, body


def _size(draw: random.Random, lines: dict, body: bytes) -> tuple[dict, bytes]:
    lengths = [
        b"0",
        b"1",
        b"-1",
        b"+5",
        b"5 5",
        b"0x10",
        b"9" * 30,
        b"99999999",
        b"\xb2",
        b"",
        str(len(body) + 3).encode(),
    ]
    chunks = [b"4\r\n1234\r\n0\r\n\r\n", b"zz\r\n", b"ffffffffffffffff\r\n", b"0\r\n\r\n", b"-1\r\n\r\n", b"5\r\n12"]
    if draw.random() < 0.5:
        return lines | {"content-length": draw.choice(lengths)}, body
    if draw.random() < 0.5:
        return lines | {"content-length": None, "transfer-encoding": b"chunked"}, draw.choice(chunks)
    return lines | {"content-length": str(70_000).encode()}, b" " * 70_000


def _line(draw: random.Random, line: bytes) -> bytes:
    method = draw.choice(
        [b"GET", b"PUT", b"DELETE", b"OPTIONS", b"HEAD", b"TRACE", b"CONNECT", b"POST", b"FOO", b"\xff"]
    )
    paths = [
        b"/%ff",
        b"/\xff",
        b"//",
        b"/v1/models/%00",
        b"/v1/models/%ed%a0%80",
        b"/-/routes",
        b"/-/x",
        b"*",
        b"x:1",
        b"",
    ]
    path = draw.choice(
        [*paths, b"/v1/chat/completions/", b"/v1/completions?a=%ff", b"/" + b"a" * 9000, b"/../etc", b"/v1"]
    )
    version = draw.choice([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/9.9", b"HTTP/2", b""])
    return b"%s %s %s" % (method, path, version)


async def statuses(port: int, seeds: range, *, at_once: int = 8) -> Counter:
    """How often each status came back; 0: none, as the connection was closed."""
    room, found = asyncio.Semaphore(at_once), Counter()
    worst: dict[int, bytes] = {}

    async def ask(seed: int) -> None:
        async with room:
            status, reply = await _answer(port, damaged(seed))
        found[status] += 1
        if status >= 500:
            worst[seed] = reply

    await asyncio.gather(*map(ask, seeds))
    assert not worst, {seed: (damaged(seed)[:300], reply[:300]) for seed, reply in list(worst.items())[:5]}
    return found


async def _answer(port: int, request: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        reply = await asyncio.wait_for(reader.read(), 60)
    except ConnectionResetError:
        return 0, b""
    finally:
        writer.close()
    return int(reply.split(b" ", 2)[1]) if reply.startswith(b"HTTP/") else 0, reply
