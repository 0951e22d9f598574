"""The command line: verbs, user errors, exit codes.

Main thread. Nothing heavy is imported before the configuration has been read, so that help and
mistakes answer at once. A mistake of the user is its message and exit code 2; a traceback is only
ever shown for a bug of ours (exit code 3), with the request to report it.
"""

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from blockx import cli_cache, cli_call, cli_table
from blockx.audit import command as audit_command
from blockx.config import JobConfig, LoadedConfig, describe, load_config
from blockx.errors import UsageError
from blockx.jobs.choice import Choice, Where

if TYPE_CHECKING:
    from blockx.audit.client import Auditor
    from blockx.functions.view import FunctionView

EXIT_OK = 0
"""All calls are ok."""
EXIT_CALLS_FAILED = 1
"""Some calls, or a job as a whole, failed."""
EXIT_USAGE = 2
"""Configuration, command line or a file is wrong; nothing ran."""
EXIT_INTERNAL = 3
"""A bug of blockx."""
EXIT_SIGINT = 130
"""Stopped by SIGINT."""
EXIT_SIGTERM = 143
"""Stopped by SIGTERM."""

VERBS = ("run", "check", "call", "audit", "table", "cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the command line asks of a run."""

    jobs: tuple[str, ...] = ()
    """Names of the jobs to run, in the order of the configuration. Empty: all."""
    choice: Choice = field(default_factory=Choice)
    """Which calls run."""
    quiet: bool = False
    """No progress and no table; messages only."""
    messages: TextIO | None = None
    """Where sentences about the jobs go. None: stderr."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        return _command(sys.argv[1:] if argv is None else list(argv))
    except UsageError as error:
        return _fail(f"{error}", EXIT_USAGE)
    except KeyboardInterrupt:
        return _fail("stopped", EXIT_SIGINT)
    except BrokenPipeError:  # whoever read our output has gone; there is nobody left to tell
        abandon_stdout()
        return EXIT_OK
    except Exception as error:  # noqa: BLE001 - the outermost frame: whatever else comes here is our bug, and is shown
        if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
            abandon_stdout()
            return _fail("standard output cannot be written: no space left there", EXIT_USAGE)
        trace = traceback.format_exc()
        return _fail(
            f"{trace}internal error: a bug of blockx; please report the lines above", EXIT_INTERNAL
        )


def abandon_stdout() -> None:
    """What it still holds goes nowhere: Python would try once more at its end, and exit with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def select_jobs(loaded: LoadedConfig, names: Sequence[str]) -> list[JobConfig]:
    """The jobs named, in the order of the configuration; all for no name.

    Raises:
        UsageError: a name is unknown, or there is no job at all.
    """
    jobs = loaded.config.jobs
    known = [job.name for job in jobs]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            f"--job {unknown[0]}: no such job in {loaded.file}; its jobs: {', '.join(known) or 'none'}"
        )
    if not jobs:
        raise UsageError(
            f"{loaded.file}: no jobs; add one under the key jobs (name, function, calls)"
        )
    return [job for job in jobs if not names or job.name in names]


def _command(arguments: list[str]) -> int:
    options = _parser().parse_args(_with_verb(arguments))
    if options.verb == "audit":
        return audit_command.run(options)
    loaded = load_config(Path(options.config), os.environ)
    if options.verb == "call":
        return cli_call.run(options, loaded)
    if options.verb == "table":
        return cli_table.run(options, loaded)
    if options.verb == "cache":
        return cli_cache.run(options, loaded)
    if options.no_cache:
        loaded = cli_cache.without_cache(loaded)
    if options.verb == "check" or options.check:
        return _check(loaded, options.job)
    # Imported here: it brings in all of main.
    from blockx import app

    select_jobs(loaded, options.job)
    return app.run(
        loaded,
        RunOptions(jobs=tuple(options.job), choice=_choice(options), quiet=options.quiet),
    )


def _choice(options: argparse.Namespace) -> Choice:
    """Which calls run. Raises UsageError: flags that exclude each other."""
    if options.fresh and (options.resume_anyway or options.retry_failed or options.only_failed):
        raise UsageError(
            "--fresh begins anew: it goes with none of --resume-anyway, --retry-failed and --only-failed"
        )
    return Choice(
        fresh=options.fresh,
        resume_anyway=options.resume_anyway,
        retry_failed=options.retry_failed,
        only_failed=options.only_failed,
        where=None if options.where is None else Where(options.where),
        limit=options.limit,
        dry_run=options.dry_run,
    )


def _add_choice(parser: argparse.ArgumentParser) -> None:
    """Flags of which calls run; all of them may be combined with --job."""
    for flag, text in (
        ("--fresh", "begin anew, whatever an earlier run left"),
        ("--resume-anyway", "resume although a function or the call list has changed"),
        ("--retry-failed", "run failed calls again, and merge them into the results"),
        ("--only-failed", "run failed calls again, and nothing else"),
        ("--dry-run", "run a few calls without writing anything, and tell what a run would do"),
    ):
        parser.add_argument(flag, action="store_true", help=text)
    parser.add_argument(
        "--where", metavar="EXPR", help='only such calls: index<100, status==failed, function=="f"'
    )
    parser.add_argument("--limit", type=_limit, default=0, metavar="N", help="run at most N calls")


def _limit(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def _with_verb(arguments: list[str]) -> list[str]:
    """``run`` is the verb if none is given: ``blockx --config c.yaml``."""
    if arguments and (
        arguments[0] in (*VERBS, "-h", "--help", "--version") or not arguments[0].startswith("-")
    ):
        return arguments
    return ["run", *arguments]


def _parser() -> argparse.ArgumentParser:
    from blockx import __version__

    parser = argparse.ArgumentParser(
        prog="blockx",
        description="Run plain Python functions over blockchain data, thousands of calls at once.",
        epilog="Without a verb: run. Exit codes: 0 all right, 1 some calls failed, 2 wrong configuration,"
        " 3 a bug of blockx, 130 / 143 stopped by SIGINT / SIGTERM.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"blockx {__version__}")
    verbs = parser.add_subparsers(
        dest="verb", metavar="{run,check,call,audit,table,cache}", required=True
    )
    helps = {
        "run": "run the jobs of a configuration and exit",
        "check": "check configuration, functions and files, and show the effective configuration",
    }
    for verb in helps:
        sub = verbs.add_parser(verb, help=helps[verb], description=helps[verb], allow_abbrev=False)
        sub.add_argument(
            "--config", default="config.yaml", metavar="FILE", help="default: %(default)s"
        )
        sub.add_argument(
            "--job",
            action="append",
            default=[],
            metavar="NAME",
            help="only this job; may be repeated",
        )
        sub.add_argument("--check", action="store_true", help="the same as the verb check")
        _add_choice(sub)
        sub.add_argument("--quiet", action="store_true", help="no progress and no table")
        cli_cache.add_option(sub)
    audit = verbs.add_parser(
        "audit",
        help="judge function sources by the rules of the restricted mode",
        description=audit_command.DESCRIPTION,
        allow_abbrev=False,
    )
    audit_command.add_arguments(audit)
    cli_call.add_parser(verbs)
    cli_table.add_parser(verbs)
    cli_cache.add_parser(verbs)
    return parser


def _check(loaded: LoadedConfig, names: Sequence[str]) -> int:
    """Everything that can be known without running anything."""
    from blockx.audit.client import auditor_of
    from blockx.functions.view import FunctionView
    from blockx.jobs.run import check_jobs

    with auditor_of(loaded.config.functions.mode) as auditor:
        view = FunctionView(loaded.resolve(loaded.config.functions.path), auditor)
        verdicts = [] if auditor is None else _verdict_lines(auditor, view)
    mistakes = [f"{function_id}: {error}" for function_id, error in view.check_all()]
    if loaded.config.jobs or names:
        try:
            check_jobs(loaded, select_jobs(loaded, names), view)
        except UsageError as error:
            mistakes.append(str(error))
    if mistakes:
        raise UsageError("\n".join(mistakes))
    sys.stdout.write(describe(loaded, os.environ))
    sys.stdout.writelines(f"# {line}\n" for line in verdicts)
    sys.stdout.write(f"# all right: {len(loaded.config.jobs)} jobs, {len(view.ids())} functions\n")
    sys.stdout.flush()
    return EXIT_OK


def _verdict_lines(auditor: "Auditor", view: "FunctionView") -> list[str]:
    """What the audit says of each function that it accepts; the others are mistakes."""
    pins = [pin for pin in map(view.get, view.ids()) if pin is not None and pin.error is None]
    return [
        line
        for pin in pins
        for line in audit_command.describe(pin.function_id, auditor.audit(pin.source.encode()))
    ]


def _fail(message: str, code: int) -> int:
    # A message may quote a file name that is no text.
    data = f"blockx: {message}\n".encode("utf-8", "replace").decode()
    sys.stderr.write(data)
    return code
