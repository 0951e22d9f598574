"""Where the tables in PostgreSQL are. The url may hold a password: it is handed to asyncpg and shown nowhere.

Any thread. Does not import asyncpg, which is an extra.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec

from blockx.config import BlockdbConfig
from blockx.errors import UsageError
from blockx.redact import redact_database_url


@dataclass(frozen=True, slots=True)
class PostgresPlace:
    """One schema of one database."""

    url: str = field(repr=False)
    schema: str
    connections_max: int
    timeout_s: float
    """Of one statement."""

    @property
    def shown(self) -> str:
        """The database in messages: host, port and name."""
        return redact_database_url(self.url)


def place_of(config: BlockdbConfig) -> PostgresPlace:
    """The place that a configuration with an url names. Raises UsageError: asyncpg is not installed."""
    if find_spec("asyncpg") is None:
        raise UsageError(
            "backends.blockdb.url needs the package asyncpg: pip install 'blockx[postgres]'"
        )
    return PostgresPlace(
        config.url, config.schema, config.connections_max, config.timeout_ms / 1_000
    )
