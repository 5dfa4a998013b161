"""One request's spans, found by any of its names, and as a tree for people."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.trace_files import SpanRecord, Value, read

OWN = "phasegate."
ROOT = "request"


class TraceError(Exception):
    """There is no such trace. The message says what may be the reason."""


@dataclass(slots=True)
class Node:
    span: SpanRecord
    children: list["Node"] = field(default_factory=list)


def find(logs: Path, name: str) -> Node | None:
    """The latest request with this id, `x-request-id` or trace id, with everything below it; None if there
    is none in the files. What is still on its way to them is not in it."""
    if not name or not name.isprintable():
        return None
    named = [span for span in read(logs, name.encode()) if _is_called(span, name)]
    if not named:
        return None
    root = max(named, key=lambda span: span.start_ns)
    return tree(root, read(logs, root.trace_id.encode()))


def complete(root: Node | None) -> bool:
    """Whether every process that took part has written: each engine that was called ends a span."""
    if root is None:
        return False
    names = {node.span.name for _, node in walk(root)}
    return "decode" in names or "first_token" not in names


def _is_called(span: SpanRecord, name: str) -> bool:
    if span.name != ROOT:
        return False
    names = (span.attributes.get(f"{OWN}request_id"), span.attributes.get(f"{OWN}label"), span.trace_id)
    return name in names


def tree(root: SpanRecord, spans: Iterable[SpanRecord]) -> Node:
    """The root with its descendants among the spans, in the order of their starts."""
    below: dict[str, list[SpanRecord]] = {}
    for span in spans:
        below.setdefault(span.parent_id, []).append(span)
    return _node(root, below)


def _node(span: SpanRecord, below: dict[str, list[SpanRecord]]) -> Node:
    # Taken out as it is read: a span is in the tree once, whatever the files say.
    children = sorted(below.pop(span.span_id, ()), key=lambda child: child.start_ns)
    return Node(span, [_node(child, below) for child in children])


def walk(node: Node, depth: int = 0) -> Iterator[tuple[int, Node]]:
    yield depth, node
    for child in node.children:
        yield from walk(child, depth + 1)


def to_json(root: Node) -> dict[str, Any]:
    """The tree; times in milliseconds, offsets from the request's arrival."""
    return _json(root, root.span.start_ns)


def _json(node: Node, zero_ns: int) -> dict[str, Any]:
    span = node.span
    return {
        "name": span.name,
        "process": span.process,
        "replica": span.replica,
        "pid": span.pid,
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "parent_id": span.parent_id,
        "start_ms": _ms(span.start_ns - zero_ns),
        "duration_ms": _ms(span.end_ns - span.start_ns),
        "error": span.error or None,
        "attributes": _own(span.attributes),
        "events": [
            {"name": event.name, "at_ms": _ms(event.at_ns - zero_ns)}
            | ({"attributes": _own(event.attributes)} if event.attributes else {})
            for event in span.events
        ],
        "children": [_json(child, zero_ns) for child in node.children],
    }


def _own(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {name.removeprefix(OWN): value for name, value in attributes.items()}


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)


def text(root: Node) -> str:
    """The tree as lines: start and duration in milliseconds, span, process, what is known."""
    zero = root.span.start_ns
    attributes = root.span.attributes
    rows = [("START ms", "TAKES ms", "SPAN", "PROCESS", "")]
    for depth, node in walk(root):
        span = node.span
        rows.append(
            (
                f"{(span.start_ns - zero) / 1e6:.1f}",
                f"{(span.end_ns - span.start_ns) / 1e6:.1f}",
                f"{'  ' * depth}{span.name}",
                f"{span.process} {span.pid}",
                " ".join(_facts(span)),
            )
        )
        rows += [
            (
                f"{(event.at_ns - zero) / 1e6:.1f}",
                "",
                f"{'  ' * (depth + 1)}- {event.name}",
                "",
                " ".join(f"{name}={value}" for name, value in _own(event.attributes).items()),
            )
            for event in span.events
        ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    head = (
        f"request {attributes.get(f'{OWN}request_id', '')}  label {attributes.get(f'{OWN}label', '')}  "
        f"trace {root.span.trace_id}"
    )
    lines = [
        f"{at:>{widths[0]}}  {took:>{widths[1]}}  {name:<{widths[2]}}  {who:<{widths[3]}}  {facts}".rstrip()
        for at, took, name, who, facts in rows
    ]
    return "\n".join([head, "", *lines])


def _facts(span: SpanRecord) -> Iterator[str]:
    if span.error:
        yield f"ERROR={span.error}"
    for name, value in span.attributes.items():
        short = name.removeprefix(OWN)
        if short not in ("request_id", "label") and name.startswith(OWN):
            yield f"{short}={str(value).lower() if isinstance(value, bool) else value}"
