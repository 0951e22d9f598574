"""Tables for user functions: the same import in an executor and in a notebook."""

from blockx.sdk.blockdb import Block, BlockTable, Table, TimeTable

__all__ = ["Block", "BlockTable", "Table", "TimeTable"]
