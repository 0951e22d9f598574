"""What functions of several tests have in common, and the configuration for it."""

TALLY = """
import os
from blockdb import Table
def tally():
    Table("ran", key=["id"]).upsert_rows([{"id": os.urandom(8).hex()}])
"""
"""For functions: ``tally()`` tells ``Product.bodies`` that a body has started. By a table, since functions
in a sandbox write no file that others see."""
STORE = "backends: {blockdb: {path: store.sqlite}}"
