"""Log lines: sentence, fields, and no harm from braces, line breaks or long values in data."""

import io
import sys
from collections.abc import Iterator

import pytest

from blockx.observability import logger, set_up_logging


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    yield
    set_up_logging("warning", sys.__stderr__)


def logged(level: str = "debug") -> io.StringIO:
    stream = io.StringIO()
    set_up_logging(level, stream)
    return stream


def without_time(stream: io.StringIO) -> list[str]:
    return [line.partition(" ")[2] for line in stream.getvalue().splitlines()]


def test_a_line_is_level_sentence_and_fields():
    stream = logged()
    logger.bind(executor_id="exec-3").warning("executor wedged, killing it", stalled_ms=10_250)
    assert without_time(stream) == [
        "WARNING executor wedged, killing it executor_id=exec-3 stalled_ms=10250"
    ]


def test_braces_and_markup_in_fields_are_shown_as_they_are():
    stream = logged()
    logger.info("call failed", message="{x} <red>{0}</red>", kind="{kind}")
    assert without_time(stream) == ["INFO    call failed message='{x} <red>{0}</red>' kind={kind}"]


def test_a_field_stays_on_one_line_and_is_cut_when_it_is_long():
    stream = logged()
    logger.info("call failed", text="a\nb", empty="", long="x" * 503)
    assert without_time(stream) == [
        "INFO    call failed text='a\\nb' empty='' long='" + "x" * 500 + "... (3 more characters)'"
    ]


def test_lines_below_the_level_are_dropped_and_a_second_set_up_replaces_the_first():
    first, second = logged("debug"), logged("warning")
    logger.info("not shown")
    logger.error("shown")
    assert (without_time(first), without_time(second)) == ([], ["ERROR   shown"])


def test_an_exception_is_shown_without_the_values_of_its_variables():
    stream = logged()
    url = "http://user:secret@node"
    try:
        [][len(url)]
    except IndexError:
        logger.exception("read failed")
    lines = without_time(stream)
    assert (lines[0], lines[-1]) == ("ERROR   read failed", "list index out of range")
    assert "secret" not in stream.getvalue().replace('"http://user:secret@node"', "")
