"""What a run shows: sentences always, numbers now and then, and never a failure of its own."""

import io

import pytest

from blockx.jobs.report import JobProgress
from blockx.progress import ProgressDisplay, progress_line

SECOND_NS = 1_000_000_000


@pytest.fixture
def progress():
    progress = JobProgress()
    progress.start_job("j", SECOND_NS)
    progress.produced, progress.done, progress.failed = 1_320, 1_200, 3
    return progress


def test_a_plain_line_says_what_is_known(progress):
    assert progress_line(progress, 11 * SECOND_NS) == (
        "j: 1,200 done, 120 under way, 3 failed, 120 calls/s"
    )
    progress.total, progress.running = 2_400, 100
    assert progress_line(progress, 11 * SECOND_NS) == (
        "j: 1,200 of 2,400 done, 100 running, 20 waiting, 3 failed, 120 calls/s, 10 s left"
    )


def test_into_a_file_sentences_come_at_once_and_numbers_every_few_seconds(progress, monkeypatch):
    stream = io.StringIO()
    display = ProgressDisplay(progress, stream, quiet=False)
    progress.say("job j: new [0], a -> b")
    for second in (1, 2, 3, 4, 9):
        monkeypatch.setattr("time.monotonic_ns", lambda now=second: now * SECOND_NS)
        display.update()
    display.close()
    assert stream.getvalue() == (
        "job j: new [0], a -> b\n"
        "j: 1,200 done, 120 under way, 3 failed, 600 calls/s\n"
        "j: 1,200 done, 120 under way, 3 failed, 150 calls/s\n"
    )


def test_quiet_shows_sentences_only(progress, monkeypatch):
    stream = io.StringIO()
    display = ProgressDisplay(progress, stream, quiet=True)
    monkeypatch.setattr("time.monotonic_ns", lambda: 100 * SECOND_NS)
    progress.say("stopping")
    display.update()
    assert stream.getvalue() == "stopping\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_a_bar_shows_numbers_and_sentences_stand_above_it(progress, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    display = ProgressDisplay(progress, stream, quiet=False)
    progress.say("a [bold] sentence")
    display.update()
    display.close()
    display.close()
    shown = stream.getvalue()
    assert "a [bold] sentence" in shown
    assert "1,200 done, 120 under way, 3 failed" in shown


def test_a_stream_that_has_gone_does_not_end_the_run(progress):
    class Gone(io.StringIO):
        def write(self, _text):
            raise BrokenPipeError

    display = ProgressDisplay(progress, Gone(), quiet=False)
    progress.say("a")
    display.update()
    progress.say("b")
    display.update()
    display.close()
