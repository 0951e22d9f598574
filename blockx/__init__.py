"""blockx runs plain synchronous Python functions over blockchain data, thousands of calls at once.

Layers; arrows go down only (enforced by ``tests/test_architecture.py``):

5   cli, app, local           the command line; assembly; the provider outside an executor
4   actor                     the one thread that owns the dispatcher core and the sockets
3   transport, jobs           main's end of the sockets; from a job file to rows
3   supervisor, backends      keeps executor processes alive; the reads behind a waiting call
3'  executor                  the child process; never imported by main's packages but through ``app``
2   dispatcher                Sans-IO: which call runs where, and what happens when it fails
2   ipc, sdk, functions       the contract between the processes; what user code calls; function source
2   audit                     which sources the restricted mode accepts; a hygiene rule, no boundary
1   config, errors, observability, redact

Start with ``README.md``: "The walk of one call".
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from blockx.sdk.capability import Capability

__version__ = "0.1.0"


def capability(name: str) -> "Capability":
    """A service of the configuration's ``backends.capabilities``, for user code."""
    from blockx.sdk.capability import Capability  # late: importing blockx must cost nothing

    return Capability(name)
