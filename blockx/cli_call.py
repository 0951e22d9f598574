"""The verb ``call``: one call of one function, now, under the same rules as the calls of a job.

Main thread; thin over ``app``: a run of one job of one call, whose only file is in a folder of its own. The
result goes to stdout as exact JSON; what it cost, or why it failed, to stderr.
"""

import argparse
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from blockx.config import JobConfig, LoadedConfig
from blockx.errors import UsageError
from blockx.ipc import exact_json

Verbs = Any
"""What ``add_subparsers`` returns; argparse has no public name for it."""
WHAT = "call one function once, under the limits of a job, and print its result"


def add_parser(verbs: Verbs) -> None:
    """Declare ``call FUNCTION [ARGUMENT …]``."""
    parser = verbs.add_parser("call", help=WHAT, description=WHAT, allow_abbrev=False)
    parser.add_argument("function", metavar="FUNCTION", help="its path in the folder, without .py")
    parser.add_argument(
        "arguments",
        metavar="ARGUMENT",
        nargs="*",
        help="positional arguments, each as JSON: 5 '\"a text\"'",
    )
    parser.add_argument(
        "--config", default="config.yaml", metavar="FILE", help="default: %(default)s"
    )


def run(options: argparse.Namespace, loaded: LoadedConfig) -> int:
    """Make the call; 0, or 1 if it failed. Raises UsageError for what never became a call."""
    # Imported here: it brings in all of main, which knows the command line.
    from blockx import app, cli

    call = {"function": options.function, "args": [_value(text) for text in options.arguments]}
    with tempfile.TemporaryDirectory(prefix="blockx-call-") as folder:
        results = Path(folder) / "results.jsonl"
        job = JobConfig(name="call", function=options.function, calls=[call], results=str(results))
        config = msgspec.structs.replace(
            loaded.config,
            jobs=[job],
            report="",
            run=msgspec.structs.replace(loaded.config.run, journal=False),
        )
        one = msgspec.structs.replace(loaded, config=config)
        messages = io.StringIO()
        code = app.run(one, cli.RunOptions(quiet=True, messages=messages))
        if results.exists():
            _show(exact_json.raw_members(results.read_bytes()))
        else:  # stopped, or the disk is full
            sys.stderr.write(messages.getvalue())
        return code


def _value(text: str) -> object:
    try:
        return exact_json.decode(text)
    except exact_json.InvalidJsonError as error:
        raise UsageError(
            f"call: {text!r} is no JSON ({error}); a text needs quotes of its own: '\"{text}\"'"
        ) from None


def _show(record: dict[str, bytes]) -> None:
    if "output" in record:
        sys.stdout.buffer.write(record["output"] + b"\n")
        sys.stdout.buffer.flush()
        times = [
            f"{name} {int(record[f'{name}_us']) / 1_000:,.1f} ms"
            for name in ("cpu", "io", "subcall", "sleep")
        ]
        sys.stderr.write(f"{', '.join(times)}; attempts {int(record['attempts'])}\n")
        return
    error = {
        name: exact_json.decode(raw)
        for name, raw in exact_json.raw_members(record["error"]).items()
    }
    sys.stderr.write(f"{error['kind']}: {error['message']}\n")
    for name in ("stack", "output_tail"):
        if error.get(name):
            sys.stderr.write(f"\n{str(error[name]).rstrip()}\n")
    local_values = error.get("locals")
    if isinstance(local_values, dict) and local_values:
        sys.stderr.write(
            "\n" + "".join(f"{name} = {text}\n" for name, text in local_values.items())
        )
