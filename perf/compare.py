"""Two recorded runs of the aims, side by side.

    python perf/compare.py A B          commits, or beginnings of them; the last run of each in history.jsonl

A value of another machine is not comparable: both machines are printed first. Differences below a third are
noise unless they come again.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HISTORY = Path(__file__).parent / "history.jsonl"


def last_run(commit: str) -> dict[str, Any]:
    """The newest entry whose commit begins so. Raises SystemExit when there is none."""
    entries = [json.loads(line) for line in HISTORY.read_text().splitlines()]
    found = [entry for entry in entries if entry["commit"].startswith(commit)]
    if not found:
        known = ", ".join(dict.fromkeys(entry["commit"] for entry in entries)) or "none"
        sys.exit(f"history.jsonl has no run of {commit}; it has {known}")
    return dict(found[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    options = parser.parse_args()
    a, b = last_run(options.a), last_run(options.b)
    print(f"A {a['machine']}\nB {b['machine']}\n")
    print(f"{'':22}{'A':>12}{'B':>12}{'B / A':>9}")
    for key in dict.fromkeys([*a["values"], *b["values"]]):
        values = [run["values"].get(key) for run in (a, b)]
        shown = ["-" if value is None else f"{value:,.2f}" for value in values]
        both = None not in values and values[0]
        ratio = f"{values[1] / values[0]:.2f}" if both else "-"
        print(f"{key:22}{shown[0]:>12}{shown[1]:>12}{ratio:>9}")


if __name__ == "__main__":
    main()
