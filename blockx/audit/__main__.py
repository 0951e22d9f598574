"""``python -m blockx.audit FILE…``; with ``--daemon`` the process that ``client.Auditor`` asks."""

import argparse
import os
import sys

from blockx.errors import UsageError

_EXIT_USAGE = 2


def main() -> int:
    """Run the command; the exit code."""
    if sys.argv[1:] == ["--daemon"]:
        from blockx.audit.daemon import serve

        serve()
        return 0
    from blockx.audit import command

    parser = argparse.ArgumentParser("python -m blockx.audit", description=command.DESCRIPTION)
    command.add_arguments(parser)
    try:
        return command.run(parser.parse_args())
    except UsageError as error:
        sys.stderr.write(f"blockx audit: {error}\n")
        return _EXIT_USAGE
    except BrokenPipeError:  # whoever read our output has gone; there is nobody left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_USAGE


if __name__ == "__main__":
    raise SystemExit(main())
