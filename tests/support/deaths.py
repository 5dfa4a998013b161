"""What clients see when a process of the system is killed: asked, classified, and put into a table."""

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.support.stack import Stack

CLIENT_DEADLINE_S = 90.0
"""A request that has not ended after so long hangs."""
PROBE_DEADLINE_S = 30.0
"""Decode may be busy with eight prompts that prefill did not finish."""
IN_A_ROW = 3
"""Right answers after which the system counts as recovered, from the first of them on."""


@dataclass
class Seen:
    """One request as its client saw it."""

    expected: str
    text: str = ""
    error: str | None = None
    """The code of an explicit error, as an event of the stream or as the answer."""
    whole: bool = False
    """The answer was complete by its own account."""
    began: float = 0.0
    first_at: float | None = None
    ended: float | None = None
    failure: str | None = None
    """How the connection ended, if not in good order."""

    @property
    def outcome(self) -> str:
        """`right`, `error`, `cut`, `wrong` or `hung`.

        A stream that was cut or ended in an error is wrong all the same if what came is not how the right
        answer begins.
        """
        if not self.expected.startswith(self.text):
            return "wrong"
        if self.ended is None:
            return "hung"
        if self.error is not None:
            return "error"
        if not self.whole:
            return "cut"
        return "right" if self.text == self.expected else "wrong"


def ask(stack: Stack, seen: Seen, body: Mapping[str, Any]) -> None:
    """Sends the request and notes what comes back, until it ends."""
    seen.began = time.monotonic()
    timeout = httpx.Timeout(CLIENT_DEADLINE_S, connect=5)
    try:
        with (
            httpx.Client(headers=stack.headers, timeout=timeout) as client,
            client.stream("POST", stack.run_url, json=body) as answer,
        ):
            if answer.status_code != 200:
                answer.read()
                seen.error = _code(answer)
            elif body.get("stream"):
                _read_stream(answer, seen)
            else:
                answer.read()
                seen.text, seen.whole = answer.json()["result"]["response"], True
    except httpx.TimeoutException:
        return  # it hangs
    except httpx.HTTPError as bad:
        seen.failure = type(bad).__name__
    seen.ended = time.monotonic()


def _read_stream(answer: httpx.Response, seen: Seen) -> None:
    for line in answer.iter_lines():
        if not line:
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            seen.whole = True
            continue
        event = json.loads(data)
        if "error" in event:
            seen.error = str(event["error"]["code"])
        elif event.get("response"):
            seen.first_at = seen.first_at or time.monotonic()
            seen.text += event["response"]


def _code(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


@dataclass
class Crowd:
    """Requests that run at the same time, each in a thread of its own."""

    stack: Stack
    bodies: Sequence[tuple[Mapping[str, Any], str]]
    """Body and right answer of each."""
    seen: list[Seen] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        for body, expected in self.bodies:
            one = Seen(expected)
            self.seen.append(one)
            self._threads.append(threading.Thread(target=ask, args=(self.stack, one, body), daemon=True))
            self._threads[-1].start()

    def join(self) -> None:
        end = time.monotonic() + CLIENT_DEADLINE_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def row(self, killed_at: float) -> dict[str, Any]:
        """What they saw, counted; seconds from the kill to the last end that was no right answer."""
        outcomes = Counter(one.outcome for one in self.seen)
        failed = [one.ended - killed_at for one in self.seen if one.ended and one.outcome != "right"]
        return {
            **{name: outcomes[name] for name in ("right", "error", "cut", "wrong", "hung")},
            "codes": sorted({one.error for one in self.seen if one.error}),
            "last_failure_s": round(max(failed), 1) if failed else None,
        }


@dataclass
class Probes:
    """Short requests, one after the other, from the moment of the kill until answers are right again."""

    stack: Stack
    body: Mapping[str, Any]
    expected: str
    killed_at: float
    codes: list[str] = field(default_factory=list)
    """Of answers that were not right, in order."""
    slowest_s: float = 0.0
    """Until the slowest of them."""
    without_retry_after: int = 0
    """Refusals with 429 or 503 that do not say when to come again."""
    recovered_s: float | None = None

    def run(self, *, within_s: float) -> None:
        right = 0
        first_right = 0.0
        while right < IN_A_ROW and time.monotonic() - self.killed_at < within_s:
            began = time.monotonic()
            if self._right():
                first_right = first_right if right else time.monotonic() - self.killed_at
                right += 1
            else:
                right = 0
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                time.sleep(0.2)
        if right == IN_A_ROW:
            self.recovered_s = round(first_right, 1)

    def _right(self) -> bool:
        try:
            answer = httpx.post(
                self.stack.run_url, json=self.body, headers=self.stack.headers, timeout=PROBE_DEADLINE_S
            )
        except httpx.HTTPError as bad:
            self.codes.append(type(bad).__name__)
            return False
        if answer.status_code in (429, 503) and not answer.headers.get("retry-after", "").isdigit():
            self.without_retry_after += 1
        if answer.status_code != 200:
            self.codes.append(_code(answer))
            return False
        assert answer.json()["result"]["response"] == self.expected, answer.text
        return True

    def row(self) -> dict[str, Any]:
        return {
            "next": sorted(set(self.codes)),
            "next_slowest_s": round(self.slowest_s, 1) if self.codes else None,
            "without_retry_after": self.without_retry_after,
            "recovered_s": self.recovered_s,
        }


def table(result: Mapping[str, Any]) -> str:
    """The table of the document, from the result."""
    lines = [
        "| killed | eight clients in flight got | the next requests got | answers right again after |",
        "|---|---|---|---|",
    ]
    for row in result["rows"]:
        lines.append(f"| {row['killed']} | {_clients(row)} | {_next(row)} | {_recovered(row)} |")
    return "\n".join(lines)


def _clients(row: Mapping[str, Any]) -> str:
    words = {
        "right": "right",
        "error": f"explicit error ({', '.join(f'`{code}`' for code in row['codes'])})",
        "cut": "ended without `[DONE]`",
        "wrong": "wrong",
        "hung": "no end",
    }
    told = [f"{row[name]} {text}" for name, text in words.items() if row[name]]
    late = "" if row["last_failure_s"] is None else f", the last after {row['last_failure_s']} s"
    return ", ".join(told) + late


def _next(row: Mapping[str, Any]) -> str:
    if not row["next"]:
        return "right answers"
    if "all_ended_s" in row:
        return f"{', '.join(row['next'])}; every process had ended after {row['all_ended_s']} s"
    return ", ".join(f"`{code}`" for code in row["next"]) + f", each within {row['next_slowest_s']} s"


def _recovered(row: Mapping[str, Any]) -> str:
    by = "" if row["by"] == "itself" else f", by `{row['by']}`"
    return f"{row['recovered_s']} s{by}"
