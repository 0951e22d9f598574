"""Only for wheels with a compiled core: ``BLOCKX_COMPILED=1`` at build time (``make compiled``).

Everything else about the package stands in ``pyproject.toml``. The source is the same for both; what the
compiled one gives is in ``perf/README.md``.
"""

import os
from pathlib import Path

from setuptools import setup

MODULES = (
    "blockx/dispatcher/*",
    "blockx/executor/attempt",
    "blockx/executor/bridge",
    "blockx/executor/context",
    "blockx/executor/queues",
    "blockx/executor/runtime",
    "blockx/executor/session",
    "blockx/ipc/frames",
    "blockx/ipc/heartbeat",
)
"""The path of a call through the core and through an executor."""
LEFT_OUT = {"__init__.py", "invariants.py"}  # nothing to gain: a docstring, and checks of the tests


def compiled() -> list:
    if os.environ.get("BLOCKX_COMPILED") != "1":
        return []
    from mypyc.build import mypycify

    found = [path for name in MODULES for path in sorted(Path().glob(f"{name}.py"))]
    return mypycify([str(path) for path in found if path.name not in LEFT_OUT], opt_level="3")


setup(ext_modules=compiled())
