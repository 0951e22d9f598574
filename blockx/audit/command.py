"""The command: ``python -m blockx.audit FILE…`` and ``blockx audit FILE…``.

Main thread. Verdicts and reports go to stdout. The files are judged by a daemon, since they may be hostile.
"""

import argparse
import json
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from blockx.audit.client import Auditor
from blockx.audit.source import SOURCE_BYTES_MAX
from blockx.audit.verdict import Report, Verdict
from blockx.errors import UsageError
from blockx.functions.view import python_files

EXIT_ACCEPTED: Final = 0
EXIT_REFUSED: Final = 1
"""At least one file."""
DESCRIPTION: Final = (
    "Judge function sources by the rules of the restricted mode, without running them. "
    "Exit code 0: all accepted; 1: one is refused; 2: a file cannot be read."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="a .py file, or a folder of them")
    parser.add_argument(
        "--json", action="store_true", help="a list of {file, verdict, findings} instead of text"
    )


def run(options: argparse.Namespace) -> int:
    """Judge the files; the exit code. Raises UsageError: one cannot be read."""
    sources = [(path, _read(path)) for path in _paths(options.files)]
    with Auditor() as auditor:
        verdicts = [(_shown(path), auditor.audit(data)) for path, data in sources]
    if options.json:
        sys.stdout.write(json.dumps([_as_json(*judged) for judged in verdicts], indent=1) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for judged in verdicts for line in describe(*judged))
    sys.stdout.flush()
    return EXIT_ACCEPTED if all(v.accepted for _file, v in verdicts) else EXIT_REFUSED


def describe(file: str, verdict: Verdict) -> Iterator[str]:
    """The verdict as lines of text: findings with their places, then what the source reaches."""
    count = len(verdict.findings)
    yield f"{file}: " + (
        "accepted" if verdict.accepted else f"refused, {count} finding{'s'[: count != 1]}"
    )
    for finding in verdict.findings:
        place = f"{file}:{finding.line}:{finding.column}" if finding.line else file
        yield f"{place}: {finding.rule}: {finding.message}"
    yield from _report_lines(verdict.report)


def _report_lines(report: Report) -> Iterator[str]:
    for what in ("imports", "tables", "chains", "functions"):
        named = list(getattr(report, what))
        if what in report.computed:
            named.append("names that only a run knows")
        if named:
            yield f"  {what}: {', '.join(named)}"


def _as_json(file: str, verdict: Verdict) -> dict[str, Any]:
    findings = [
        {
            "rule": finding.rule,
            "line": finding.line,
            "column": finding.column,
            "message": finding.message,
        }
        for finding in verdict.findings
    ]
    return {
        "file": file,
        "verdict": "accepted" if verdict.accepted else "refused",
        "findings": findings,
    }


def _paths(names: Sequence[str]) -> Iterator[Path]:
    for name in names:
        path = Path(name)
        if not path.is_dir():
            yield path
            continue
        found = list(python_files(path))
        if not found:
            raise UsageError(f"{_shown(path)}: no .py file below this folder; name a file")
        yield from found


def _read(path: Path) -> bytes:
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            raise UsageError(f"{_shown(path)}: no regular file; name a .py file")
        with path.open("rb") as file:
            return file.read(SOURCE_BYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"{_shown(path)}: {error.strerror or error}; name a .py file") from None
    except ValueError:
        raise UsageError(f"{str(path)!r}: no file name; name a .py file") from None


def _shown(path: Path) -> str:
    """A file's name as text, whatever its bytes are."""
    return str(path).encode("utf-8", "replace").decode()
