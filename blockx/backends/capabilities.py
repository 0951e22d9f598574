"""Backends by configuration: ``grpc`` is ours, every other kind is an entry point of the group ``blockx.backends``.

Main thread, before the io thread starts. An entry point is a function ``make(name, options, loaded) -> Backend``
(see ``backends.scope``); it may raise UsageError for options that are wrong. Anything else it raises is told as
its failure, by name.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, Final

from blockx.backends.grpc_backend import make_grpc
from blockx.backends.replies import named
from blockx.backends.scope import Backend
from blockx.config import CapabilityConfig, LoadedConfig
from blockx.errors import UsageError

GROUP: Final = "blockx.backends"
OWN_NAMES: Final = ("blockdb", "rpc", "http")
"""Backends of other sections; a capability cannot take their names."""

Make = Callable[[str, Mapping[str, Any], LoadedConfig], Backend]
_BUILT_IN: Final[dict[str, Make]] = {"grpc": make_grpc}


def make_capability(name: str, config: CapabilityConfig, loaded: LoadedConfig) -> Backend:
    """The backend of one capability.

    Raises:
        UsageError: the name is taken, the kind is unknown, or its options are wrong.
    """
    place = f"backends.capabilities.{name}"
    if name in OWN_NAMES:
        raise UsageError(
            f"{place}: the name belongs to the section backends.{name}; choose another"
        )
    make = _BUILT_IN.get(config.kind) or _installed(place, config.kind)
    try:
        return make(name, config.options, loaded)
    except UsageError as error:
        raise UsageError(f"{place}: {error}") from None
    except Exception as error:
        raise UsageError(
            f"{place}: kind {config.kind} failed: {type(error).__name__}: {error}"
        ) from error


def _installed(place: str, kind: str) -> Make:
    for entry in entry_points(group=GROUP, name=kind):
        try:
            make: Make = entry.load()
        except Exception as error:
            text = f"{place}: kind {kind} cannot be imported: {type(error).__name__}: {error}"
            raise UsageError(text) from error
        return make
    installed = sorted({entry.name for entry in entry_points(group=GROUP)})
    there = named([*_BUILT_IN, *installed], "none")
    raise UsageError(
        f"{place}: there is no kind {kind!r} (there are: {there}); is its package installed?"
    )
