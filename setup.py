"""Only for wheels with a compiled core: ``BLOCKX_COMPILED=1`` at build time (``make compiled``).

Everything else about the package stands in ``pyproject.toml``. The source is the same for both; what the
compiled one gives is in ``perf/README.md``.
"""

import os
from pathlib import Path

from setuptools import setup

LEFT_OUT = {"__init__.py", "invariants.py"}  # nothing to gain: a docstring, and checks of the tests


def compiled() -> list:
    if os.environ.get("BLOCKX_COMPILED") != "1":
        return []
    from mypyc.build import mypycify

    core = sorted(Path("blockx/dispatcher").glob("*.py"))
    return mypycify([str(path) for path in core if path.name not in LEFT_OUT], opt_level="3")


setup(ext_modules=compiled())
