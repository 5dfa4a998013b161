"""What every HTTP surface of ours does, whichever program takes the connections: one list of checks.

Each check speaks over raw sockets or a plain client, and needs only a `Surface`: a whole running system, or a
gateway with scripted engines behind a real HAProxy. Checks leave nothing behind.
"""

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Final

from tests.support.stack import eventually
from tests.support.surface import (
    LIMITS,
    Surface,
    answers,
    exchange,
    first_answer,
    nothing_is_held,
)

# What a well-behaved client sees.


def every_answer_has_one_request_id(surface: Surface) -> None:
    tries = [
        ("POST", surface.run_path, {}, {"prompt": "Hello", "max_tokens": 2}),
        ("POST", surface.run_path, {}, {"promt": "x"}),
        ("POST", surface.run_path, {"authorization": "Bearer no"}, {}),
        ("GET", "/nowhere", {}, None),
        ("GET", "/-/routes", {}, None),
        ("GET", "/-/healthz", {}, None),
        ("GET", "/readyz", {}, None),
    ]
    with surface.client() as client:
        for method, path, headers, body in tries:
            for given, kept in (("mine-1", True), ("not a label", False), (None, False)):
                label = {} if given is None else {"x-request-id": given}
                answer = client.request(method, path, json=body, headers=headers | label)

                (name,) = answer.headers.get_list("x-request-id")
                assert answer.headers.get_list("cf-ai-req-id") == [name], (path, answer.headers)
                assert (name == given) is kept, (path, name)
                assert answer.headers["content-type"].startswith("application/json"), path
    two = exchange(surface, surface.head("x-request-id: a", "x-request-id: b", method="GET", path="/healthz"))
    assert [len(answer.all("x-request-id")) for answer in two] == [1, 1]
    assert two[0].all("x-request-id") == two[0].all("cf-ai-req-id") != ["a"]


def statuses_are_the_gateways_own(surface: Surface) -> None:
    chat = {"model": surface.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    with surface.client() as client:
        got = [
            client.post(surface.run_path, json={"prompt": "Hi", "max_tokens": 1}).status_code,
            client.post("/v1/chat/completions", json=chat).status_code,
            client.post("/v1/chat/completions", json=chat | {"model": "none"}).status_code,
            client.post(surface.run_path.replace(surface.model, "none"), json={"prompt": "a"}).status_code,
            client.post(surface.run_path, json={"prompt": "Hi"}, headers={"authorization": ""}).status_code,
            client.post(surface.run_path.replace(surface.account_id, "b" * 32), json={}).status_code,
            client.get("/v1/models").status_code,
            client.get("/nowhere").status_code,
            client.get("/v1/chat/completions").status_code,
            client.get("/-/routes").status_code,
        ]
    assert got == [200, 200, 404, 400, 401, 403, 200, 404, 405, 404]


def pieces_of_a_stream_arrive_as_they_are_made(surface: Surface) -> None:
    """Not in one piece at its end."""
    body = {"prompt": "Tell a story", "max_tokens": 40, "stream": True, "temperature": 0}
    arrivals = []
    with surface.client() as client, client.stream("POST", surface.run_path, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        for part in answer.iter_raw():
            arrivals.append((time.monotonic(), part))
    data = b"".join(part for _, part in arrivals)
    assert data.endswith(b"data: [DONE]\n\n")
    made_over = arrivals[-1][0] - arrivals[0][0]
    assert len(arrivals) > 5, arrivals
    assert max(b[0] - a[0] for a, b in pairwise(arrivals)) < made_over * 0.8


def a_client_that_leaves_frees_everything(surface: Surface) -> None:
    """Within two seconds, streamed or not, by closing or by half-closing: that is leaving, too."""
    for stream in (True, False):
        for leave in ("close", "half-close"):
            with surface.connect() as connection:
                connection.sendall(
                    surface.request(
                        prompt="Write a story.",
                        max_tokens=surface.long_answer,
                        stream=stream,
                        temperature=0.9,
                    )
                )
                eventually(surface.held, bool, what="request at work")
                if stream:
                    assert connection.recv(1)
                if leave == "half-close":
                    connection.shutdown(socket.SHUT_WR)
                    nothing_is_held(surface, 2)
            nothing_is_held(surface, 2)


def connections_are_kept_and_closed_as_asked(surface: Surface) -> None:
    health = surface.head(method="GET", path="/healthz")
    kept = exchange(surface, health + surface.request() + health)
    assert [answer.status for answer in kept] == [200, 200, 200, 200]
    assert kept[-1].all("connection") == ["close"]
    old = health.replace(b"HTTP/1.1", b"HTTP/1.0")
    assert [answer.status for answer in exchange(surface, old, close=False)] == [200]


def pipelined_requests_are_answered_in_order(surface: Surface) -> None:
    paths = ["/healthz", "/nowhere", "/v1/models", "/readyz"]
    raw = b"".join(surface.head(method="GET", path=path) for path in paths)
    assert [answer.status for answer in exchange(surface, raw)] == [200, 404, 200, 200, 200]


def head_and_options_are_answered(surface: Surface) -> None:
    with surface.client() as client:
        head = client.head("/healthz")
        options = client.options("/v1/chat/completions")
        wrong = client.request("HEAD", "/v1/chat/completions")
    assert (head.status_code, head.content) == (200, b"")
    assert (options.status_code, options.json()["error"]["code"]) == (405, "method_not_allowed")
    assert (wrong.status_code, wrong.content) == (405, b"")


def a_client_may_wait_for_100_continue(surface: Surface) -> None:
    body = b'{"prompt": "Hi", "max_tokens": 1}'
    with surface.connect() as connection:
        connection.sendall(
            surface.head(f"content-length: {len(body)}", "expect: 100-continue", "connection: close")
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        (answer,), whole = answers(connection)
    assert (answer.status, whole) == (200, True)


def chunked_and_large_bodies_are_read(surface: Surface) -> None:
    text = "x" * 150_000  # far over one buffer, under the limit; too long for the model, which is said
    body = json.dumps({"prompt": text, "max_tokens": 1}).encode()
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in _parts(body, 7_000)) + b"0\r\n\r\n"
    whole, _ = exchange(surface, surface.head(f"content-length: {len(body)}") + body)
    chunked, _ = exchange(surface, surface.head("transfer-encoding: chunked") + chunks)
    assert [(a.status, a.code) for a in (whole, chunked)] == [(400, "context_length_exceeded")] * 2


def _parts(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


# What a careless or hostile client sees.


def a_body_over_the_limit_is_refused_before_it_is_read(surface: Surface) -> None:
    limit = LIMITS["max_body_bytes"]
    for announce in ("content-length: 100000000", "transfer-encoding: chunked"):
        with surface.connect() as connection:
            connection.sendall(surface.head(announce))
            with suppress(BrokenPipeError, ConnectionResetError):
                for _ in range(limit // 10_000 + 2):
                    connection.sendall(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
            answer = first_answer(connection)
        assert (answer.status, answer.code) == (413, "request_too_large"), announce


def a_body_longer_than_announced_is_no_second_request(surface: Surface) -> None:
    """What follows the announced length is taken for the next request, and is none."""
    (first, *rest) = exchange(surface, surface.head("content-length: 2") + b"{}garbage\r\n\r\n", close=False)
    assert first.status == 400
    assert [answer.status for answer in rest] in ([], [400])


def headers_that_drip_are_ended(surface: Surface) -> None:
    with surface.connect() as connection:
        began = time.monotonic()
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
        with suppress(BrokenPipeError, ConnectionResetError):
            for number in range(100):
                connection.sendall(b"x-%d: y\r\n" % number)
                time.sleep(0.2)
                if time.monotonic() - began > 3 * LIMITS["header_timeout_s"]:
                    break
        found, _ = answers(connection)
    assert [answer.status for answer in found] in ([408], [])
    assert time.monotonic() - began < 3 * LIMITS["header_timeout_s"]


def a_connection_that_says_nothing_is_ended(surface: Surface) -> None:
    with surface.connect() as connection:
        began = time.monotonic()
        found, _ = answers(connection)
    assert [answer.status for answer in found] in ([408], [])
    assert time.monotonic() - began < 3 * LIMITS["header_timeout_s"]


def a_body_that_drips_is_ended(surface: Surface) -> None:
    with surface.connect() as connection:
        began = time.monotonic()
        connection.sendall(surface.head("content-length: 10000"))
        connection.settimeout(0.2)
        data = b""
        with suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() - began < 3 * LIMITS["body_timeout_s"] and not data:
                connection.sendall(b"x")
                with suppress(TimeoutError):
                    data = connection.recv(65536)
        connection.settimeout(20)
        answer = first_answer(connection, data)
    assert (answer.status, answer.code) == (408, "request_incomplete")
    nothing_is_held(surface)


def a_refused_body_that_drips_on_is_ended(surface: Surface) -> None:
    """The answer is given; a client that goes on sending must not hold its connection for ever."""
    for key in ("authorization: Bearer no", f"authorization: Bearer {surface.api_key}"):
        began = time.monotonic()
        with surface.connect() as connection:
            head = (f"POST {surface.run_path} HTTP/1.1", "host: a", key, "content-length: 1000000", "", "")
            connection.sendall("\r\n".join(head).encode())
            ended = False
            while not ended and time.monotonic() - began < 12 * LIMITS["header_timeout_s"]:
                time.sleep(0.3)
                try:
                    connection.sendall(b"x")
                except (BrokenPipeError, ConnectionResetError):
                    ended = True
        assert ended, key


def a_client_that_does_not_read_is_ended_alone(surface: Surface) -> None:
    """It is stalled, then aborted; who reads meanwhile gets all of an answer."""
    ask = {"model": surface.model, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    flood = json.dumps(ask | {"max_tokens": surface.flood, "temperature": 0.9}).encode()
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.settimeout(30)
        stalled.connect(surface.address)
        length = f"content-length: {len(flood)}"
        stalled.sendall(surface.head(length, path="/v1/chat/completions") + flood)
        eventually(surface.held, bool, what="request at work")
        with surface.client() as client:
            for _ in range(3):
                whole = client.post("/v1/chat/completions", json=ask | {"max_tokens": 20})
                assert whole.text.endswith("data: [DONE]\n\n")
        nothing_is_held(surface, 90)
        (cut,), whole_answer = answers(stalled)
    assert (cut.status, whole_answer) == (200, False)
    assert b"[DONE]" not in cut.body


def huge_headers_are_refused(surface: Surface) -> None:
    for size in (40_000, 1_000_000):
        with surface.connect() as connection:
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(surface.head(f"x-big: {'a' * size}", method="GET", path="/healthz"))
            found, _ = answers(connection)
        assert [answer.status for answer in found] in ([431], [400], []), size
    (fits, _) = exchange(surface, surface.head(f"x-big: {'a' * 8_000}", method="GET", path="/healthz"))
    assert fits.status == 200


def compressed_bodies_are_refused_by_name(surface: Surface) -> None:
    with surface.client() as client:
        for coding in ("gzip", "br", "identity, gzip", "zstd"):
            answer = client.post(surface.run_path, content=b"\x1f\x8b", headers={"content-encoding": coding})
            assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-encoding")
        plain = client.post(surface.run_path, json={"prompt": ""}, headers={"content-encoding": "identity"})
    assert plain.status_code == 400


def nonsense_bodies_are_refused(surface: Surface) -> None:
    bodies = [
        b"{",
        b"\xff\xfe{}",
        b"[1]",
        b'{"prompt": "a", "prompt": "b"}',
        b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"prompt": NaN}',
        b"",
    ]
    with surface.client() as client:
        got = [client.post(surface.run_path, content=body) for body in bodies]
    assert [answer.status_code for answer in got] == [400] * len(bodies)
    assert {answer.json()["error"]["code"] for answer in got} == {"invalid_request", "missing_body"}


def ambiguous_requests_are_never_two(surface: Surface) -> None:
    """Whoever stood in front may have read one request where we read two: refused, or read as one."""
    hidden = b"GET /v1/models HTTP/1.1\r\nhost: gateway\r\nx-request-id: hidden\r\n\r\n"
    tries = {
        "both lengths": surface.head("content-length: 4", "transfer-encoding: chunked")
        + b"0\r\n\r\n"
        + hidden,
        "two lengths": surface.head("content-length: 0", f"content-length: {len(hidden)}") + hidden,
        "signed length": surface.head("content-length: +0") + hidden,
        "space before the colon": surface.head("content-length : 0") + hidden,
        "unknown coding": surface.head("transfer-encoding: xchunked") + b"0\r\n\r\n" + hidden,
        "coding after chunked": surface.head("transfer-encoding: chunked, identity") + b"0\r\n\r\n" + hidden,
        "bad chunk size": surface.head("transfer-encoding: chunked") + b"-1\r\n\r\n" + hidden,
        "bytes after a chunk": surface.head("transfer-encoding: chunked") + b"1\r\nab\r\n0\r\n\r\n" + hidden,
        "nul": surface.head("x: a\0b") + hidden,
    }
    for name, raw in tries.items():
        with surface.connect() as connection:
            connection.sendall(raw)
            connection.shutdown(socket.SHUT_WR)
            found, _ = answers(connection)
        assert all("hidden" not in answer.all("x-request-id") for answer in found), name
        assert len(found) <= 1, (name, found)
        assert all(answer.status in (400, 401, 422, 501) for answer in found), (name, found)


def a_crossed_out_answer_is_not_followed_by_another(surface: Surface) -> None:
    """Nonsense behind a request that is being answered ends the connection; the answer is not spoilt."""
    raw = surface.request(max_tokens=40, stream=True) + b"\0\0nonsense\r\n\r\n"
    (first, *rest) = exchange(surface, raw, close=False)
    assert (first.status, first.body.endswith(b"data: [DONE]\n\n")) == (200, True)
    assert [answer.status for answer in rest] in ([], [400])


def encoded_model_paths_route_and_dot_segments_do_not(surface: Surface) -> None:
    """As the client wrote them: no library may tidy the path up."""
    body = b'{"prompt": "Hi", "max_tokens": 1}'
    model, length = surface.model, f"content-length: {len(body)}"
    good = [model, model.replace("/", "%2F"), model.replace("/", "%2f"), model.replace("@", "%40")]
    bad = [
        model.replace("/", "%252F"),
        model.replace("@", "%2540"),
        f"x/../{model}",
        f"x/%2e%2e/{model}",
        f"../run/{model}",
        f"/{model}",
        f"{model}/",
        f"{model}%00",
    ]

    def status(name: str, prefix: str = "") -> int:
        path = prefix + surface.run_path.replace(model, name)
        return exchange(surface, surface.head(length, path=path) + body)[0].status

    assert [status(name) for name in good] == [200] * len(good)
    assert status(model, "http://gateway") == 200
    for name in bad:
        assert status(name) in (400, 404), name


def a_client_cannot_turn_off_that_its_leaving_is_noticed(surface: Surface) -> None:
    """Serve has headers for that; they are not for clients."""
    body = json.dumps({"prompt": "Story", "max_tokens": surface.long_answer, "stream": True}).encode()
    switches = ("x-request-disconnect-disabled: ?1", "x-request-timeout-seconds: 0.01")
    with surface.connect() as connection:
        connection.sendall(surface.head(f"content-length: {len(body)}", *switches) + body)
        eventually(surface.held, bool, what="request at work")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    nothing_is_held(surface, 2)


CHECKS: Final[tuple[Callable[[Surface], None], ...]] = (
    every_answer_has_one_request_id,
    statuses_are_the_gateways_own,
    pieces_of_a_stream_arrive_as_they_are_made,
    a_client_that_leaves_frees_everything,
    connections_are_kept_and_closed_as_asked,
    pipelined_requests_are_answered_in_order,
    head_and_options_are_answered,
    a_client_may_wait_for_100_continue,
    chunked_and_large_bodies_are_read,
    a_body_over_the_limit_is_refused_before_it_is_read,
    a_body_longer_than_announced_is_no_second_request,
    headers_that_drip_are_ended,
    a_connection_that_says_nothing_is_ended,
    a_body_that_drips_is_ended,
    a_refused_body_that_drips_on_is_ended,
    a_client_that_does_not_read_is_ended_alone,
    huge_headers_are_refused,
    compressed_bodies_are_refused_by_name,
    nonsense_bodies_are_refused,
    ambiguous_requests_are_never_two,
    a_crossed_out_answer_is_not_followed_by_another,
    encoded_model_paths_route_and_dot_segments_do_not,
    a_client_cannot_turn_off_that_its_leaving_is_noticed,
)
