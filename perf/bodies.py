"""The bodies of the work that all contestants do, and their arguments.

The processes of the peers import this module by name, so it imports the standard library alone; the text of
the same bodies, as blockx's users write them, is in ``functions()``. ``BENCH_LOOPS`` (loops that take 1 ms of
CPU) and ``BENCH_LOG`` (file to which a body appends a byte, so that executions are counted from outside)
reach the peers through their environment.
"""

import os
import time
from pathlib import Path

LOOPS = int(os.environ.get("BENCH_LOOPS", "15000"))
LOG = os.environ.get("BENCH_LOG", "")
DISTINCT = 200
"""Different arguments of the work ``shared``."""

Call = dict[str, int]


def calibrate() -> int:
    """Loops of :func:`spin` that take 1 ms of CPU here and now."""
    loops, best_ns = 200_000, 1 << 62
    for _ in range(5):
        start_ns = time.thread_time_ns()
        spin(loops)
        best_ns = min(best_ns, time.thread_time_ns() - start_ns)
    return max(1, loops * 1_000_000 // best_ns)


def spin(loops: int) -> int:
    x = 0
    for n in range(loops):
        x += n * n
    return x


def noop(p: Call) -> dict[str, object]:
    return {"block": p["block"], "ok": True}


def cpu(p: Call) -> int:
    spin(LOOPS)
    return p["block"]


def shared(p: Call) -> int:
    with Path(LOG).open("ab") as log:
        log.write(b".")
    spin(LOOPS)
    return p["block"]


def stamp(p: Call) -> int:
    return time.monotonic_ns()


def child(p: Call) -> int:
    return p["block"] + p["side"]


def combine(block: int, left: int, right: int) -> dict[str, int]:
    return {"block": block, "sum": left + right}


def sides(p: Call) -> tuple[Call, Call]:
    """The arguments of the two children of one parent."""
    return p | {"side": 1}, p | {"side": 2}


def calls(work: str, count: int) -> list[Call]:
    distinct = DISTINCT if work == "shared" else count
    return [{"block": n % distinct} for n in range(count)]


def functions(loops: int, log: str) -> dict[str, str]:
    """The bodies as source of blockx functions, by function id."""
    spin_source = "def spin(loops):\n    x = 0\n    for n in range(loops):\n        x += n * n\n    return x\n"
    return {
        "noop": 'def _(p):\n    return {"block": p["block"], "ok": True}\n',
        "cpu": f'{spin_source}\n\ndef _(p):\n    spin({loops})\n    return p["block"]\n',
        "shared": (
            f"{spin_source}\n\ndef _(p):\n    with open({log!r}, 'ab') as log:\n        log.write(b'.')\n"
            f'    spin({loops})\n    return p["block"]\n'
        ),
        "latency": "import time\n\n\ndef _(p):\n    return time.monotonic_ns()\n",
        "child": 'def _(p):\n    return p["block"] + p["side"]\n',
        "nested": (
            "from blockx import function\n\n\n"
            "def _(p):\n"
            '    left = function.call("child", {"block": p["block"], "side": 1})\n'
            '    right = function.call("child", {"block": p["block"], "side": 2})\n'
            '    return {"block": p["block"], "sum": left + right}\n'
        ),
    }
