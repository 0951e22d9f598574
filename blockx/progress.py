"""Shows how a run goes: a bar on a terminal, else a plain line every few seconds.

Main thread only; ``update`` is called by the loop that waits for the run, a few times a second.
Reads the plain attributes of ``JobProgress`` and writes to one stream (stderr), nothing else.
Sentences for the user (``notices``) are shown even when numbers are not wanted. A stream that has
gone away (a closed pipe) silences the display; the run goes on.
"""

import time
from typing import TYPE_CHECKING, TextIO

from blockx.jobs.report import JobProgress

if TYPE_CHECKING:
    from rich.progress import TaskID

FIRST_LINE_AFTER_S = 2.0
"""A run shorter than this gets no plain line."""
LINE_INTERVAL_S = 5.0
"""Between two plain lines."""


class ProgressDisplay:
    """Created before the run, ``update``d during it, ``close``d after it."""

    def __init__(self, progress: JobProgress, stream: TextIO, *, quiet: bool) -> None:
        """``quiet``: sentences only, no numbers."""
        self._progress = progress
        self._stream = stream
        self._quiet = quiet
        self._bar = _Bar(stream) if stream.isatty() and not quiet else None
        self._next_line_ns = 0
        self._job_started_ns = 0

    def update(self) -> None:
        """Show what is new. Cheap; never fails."""
        self._progress.gather()
        try:
            self._show_notices()
            if self._bar is not None:
                self._bar.update(self._progress)
            elif not self._quiet:
                self._show_line(time.monotonic_ns())
        except (OSError, ValueError):  # the terminal or pipe is gone, or the stream was closed
            self._bar, self._quiet = None, True

    def close(self) -> None:
        """Show the last sentences and take the bar away. Idempotent."""
        self.update()
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._quiet = True

    def _show_notices(self) -> None:
        notices = self._progress.notices
        while notices:
            sentence = notices.popleft()
            if self._bar is not None:
                self._bar.print(sentence)
            else:
                self._stream.write(sentence + "\n")
                self._stream.flush()

    def _show_line(self, now_ns: int) -> None:
        progress = self._progress
        if not progress.started_ns:
            return
        if progress.started_ns != self._job_started_ns:
            self._job_started_ns = progress.started_ns
            self._next_line_ns = progress.started_ns + int(FIRST_LINE_AFTER_S * 1e9)
        if now_ns >= self._next_line_ns:
            self._next_line_ns = now_ns + int(LINE_INTERVAL_S * 1e9)
            self._stream.write(progress_line(progress, now_ns) + "\n")
            self._stream.flush()


def progress_line(progress: JobProgress, now_ns: int) -> str:
    """``job: 120 of 1,320 done, 8 running, 40 waiting, 0 failed, 60 calls/s, 20 s left``."""
    elapsed_s = max(now_ns - progress.started_ns, 1) / 1e9
    rate = progress.done / elapsed_s
    of_total = "" if progress.total is None else f" of {progress.total:,}"
    return (
        f"{progress.job_name}: {progress.done:,}{of_total} done, {under_way(progress)},"
        f" {progress.failed:,} failed, {rate:,.0f} calls/s{_time_left(progress, rate)}"
    )


def under_way(progress: JobProgress) -> str:
    """Calls read from the list and not done: running and waiting, if that is known."""
    open_count = max(progress.produced - progress.done, 0)
    if progress.running is None:
        return f"{open_count:,} under way"
    running = min(progress.running, open_count)
    return f"{running:,} running, {open_count - running:,} waiting"


def _time_left(progress: JobProgress, rate: float) -> str:
    if progress.total is None or not rate:
        return ""
    return f", {(progress.total - progress.done) / rate:,.0f} s left"


class _Bar:
    """rich's bar, drawn by ``update`` alone: no thread of its own."""

    def __init__(self, stream: TextIO) -> None:
        # Imported here: `blockx --help`, and a run into a file, do without it.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=Console(file=stream),
            auto_refresh=False,
            transient=True,
        )
        self._bar.start()
        self._task: TaskID = self._bar.add_task("", total=None, numbers="")

    def update(self, progress: JobProgress) -> None:
        elapsed_s = max(time.monotonic_ns() - progress.started_ns, 1) / 1e9
        self._bar.update(
            self._task,
            description=progress.job_name,
            completed=progress.done,
            total=progress.total,
            numbers=(
                f"{progress.done:,} done, {under_way(progress)}, {progress.failed:,} failed,"
                f" {progress.done / elapsed_s:,.0f}/s"
            ),
        )
        self._bar.refresh()

    def print(self, sentence: str) -> None:
        # Not through rich's markup: `[0]` in a sentence is no style.
        self._bar.console.print(sentence, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()
