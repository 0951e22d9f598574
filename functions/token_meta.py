"""What is known of a token: its symbol, name and decimals, from the table ``token_meta``."""

from blockx_sdk import db


def _(token):
    row = db.get("token_meta", {"address": token})
    if row is None:  # not every contract that emits a Transfer is a listed token
        return {"symbol": None, "name": None, "decimals": None}
    return {"symbol": row["symbol"], "name": row["name"], "decimals": row["decimals"]}
