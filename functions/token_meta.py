"""What is known of a token: its symbol, name and decimals.

What was looked up once is kept in the table ``token_meta`` of the embedded store; ``token_list`` is a
published list, held in memory.
"""

from blockdb import Table
from blockx_sdk import db


def _(token):
    kept = Table("token_meta", key=["address"])
    meta = kept.get_row({"address": token})
    if meta is None:
        # Not every contract that emits a Transfer is a listed token: then the fields are empty.
        listed = db.get("token_list", {"address": token}) or {}
        meta = {"address": token} | {k: listed.get(k) for k in ("symbol", "name", "decimals")}
        kept.upsert_rows([meta])
    return meta
