"""Imported by the fork server, last of its preload: it adopts the orphans of its executors from now on.

The import is the effect, so nobody else may import it.
"""

from blockx.supervisor.guardian import adopt_orphans

adopt_orphans()
