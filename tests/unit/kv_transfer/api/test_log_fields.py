import asyncio
import logging
import stat
import sys
from pathlib import Path
from typing import Any

from kv_transfer.api import FieldFormatter, PrivateLog, request_fields


def line(message: str, *args: object, **extra: object) -> str:
    record = logging.getLogger("kv_transfer.x").makeRecord(
        "kv_transfer.x", logging.WARNING, "f.py", 1, message, args, None, extra=extra or None
    )
    return FieldFormatter().format(record)


def test_extra_fields_follow_the_message() -> None:
    assert line("transfer failed", cause="deadline", pages=3).endswith(
        "transfer failed cause=deadline pages=3"
    )


def test_a_value_with_spaces_or_line_ends_stays_one_quoted_word() -> None:
    assert line("refused", detail='a "b"\nc').endswith('refused detail="a \\"b\\"\\nc"')
    assert line("refused", detail="").endswith('refused detail=""')


def test_lines_of_a_request_carry_its_ids() -> None:
    with request_fields("r1", "t1"):
        assert line("bus.gap").endswith("bus.gap request_id=r1 trace_id=t1")
    assert line("bus.gap").endswith("bus.gap")


def test_an_id_that_the_line_has_already_is_not_said_twice() -> None:
    with request_fields("r17", "t1"):
        assert line("fault request_id=%s", "r17").endswith("fault request_id=r17 trace_id=t1")
        assert line("fault", request_id="other").endswith("fault request_id=other trace_id=t1")


def crash_line() -> str:
    """What is logged of an error that was raised while another one, with a prompt in it, was handled."""
    try:
        try:
            raise ValueError("no template for: my secret prompt")
        except ValueError as first:
            raise RuntimeError("my secret prompt") from first
    except RuntimeError:
        record = logging.getLogger("gateway.x").makeRecord(
            "gateway.x", logging.ERROR, "f.py", 1, "request.crashed", (), sys.exc_info()
        )
        return FieldFormatter().format(record)


def test_a_requests_exception_is_logged_with_its_place_and_kind_and_without_its_text() -> None:
    with request_fields("r1"):
        told = crash_line()

    assert "my secret prompt" not in told.replace(
        'raise ValueError("no template for: my secret prompt")', ""
    ).replace('raise RuntimeError("my secret prompt")', "")
    assert told.index("ValueError") < told.rindex("RuntimeError")
    assert "in crash_line" in told


def test_what_no_request_is_to_blame_for_keeps_its_text() -> None:
    assert "RuntimeError: my secret prompt" in crash_line()


async def test_two_requests_at_once_keep_their_own_ids() -> None:
    said: dict[str, str] = {}

    async def work(name: str) -> None:
        with request_fields(name):
            await asyncio.sleep(0)
            said[name] = line("x")

    await asyncio.gather(work("one"), work("two"))

    assert {name: text.split()[-1] for name, text in said.items()} == {
        "one": "request_id=one",
        "two": "request_id=two",
    }


def test_marks_that_a_library_puts_on_every_record_are_not_fields() -> None:
    usual = logging.getLogRecordFactory()

    def marking(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = usual(*args, **kwargs)
        record.process_of_a_library = "main"
        return record

    logging.setLogRecordFactory(marking)
    try:
        assert line("x", pages=1).endswith(" x pages=1")
    finally:
        logging.setLogRecordFactory(usual)


def test_a_log_file_is_private_and_set_aside_when_it_is_full(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    handler = PrivateLog(path, max_bytes=2000)
    try:
        for number in range(60):
            record = logging.makeLogRecord({"msg": f"line {number}", "name": "kv_transfer", "pages": number})
            handler.handle(record)
    finally:
        handler.close()

    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["engine.log", "engine.log.1"]
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    assert all(file.stat().st_size <= 2000 for file in files)
    assert path.read_text().endswith("line 59 pages=59\n")
