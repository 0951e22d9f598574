"""What every executor has loaded before it starts; imported once, by the forkserver.

Importing it must have no effect but the imports: no thread, no descriptor, no environment. At the end
everything is frozen out of the garbage collector's sight, so that children share these pages.
"""

import gc

import google.protobuf.message
import greenlet
import msgspec
import orjson
import psutil
import setproctitle

import blockx.executor.main
import blockx.function

__all__ = ["blockx", "google", "greenlet", "msgspec", "orjson", "psutil", "setproctitle"]

gc.collect()
gc.freeze()
