"""Plain entry points for user functions: the same import in an executor and in a notebook."""

from blockx.sdk import db, rpc
from blockx.sdk.core import call_subfunc, get_provider, sleep

__all__ = ["call_subfunc", "db", "get_provider", "rpc", "sleep"]
