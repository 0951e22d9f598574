"""Backend and operation names of the requests that the SDK makes, written once.

The table in ``blockx.sdk`` says which method makes which request. JSON-RPC operations are the
method's own name. Nothing here runs.
"""

from typing import Final

BLOCKDB: Final = "blockdb"
RPC: Final = "rpc"

GET_ROW: Final = "get_row"
GET_ROWS: Final = "get_rows"
GET_ROW_AT: Final = "get_row_at"
GET_STATE: Final = "get_state"
GET_HISTORY: Final = "get_history"
GET_HISTORY_AT: Final = "get_history_at"
SCAN: Final = "scan"
UPSERT_ROWS: Final = "upsert_rows"
UPSERT_STATES: Final = "upsert_states"
UPSERT_ROWS_AT: Final = "upsert_rows_at"
DELETE_ROWS: Final = "delete_rows"
