"""What user code calls: thin objects over the current ``Provider``; no connection, cache or thread.

Runs wherever the user's function runs. Every method checks its arguments, makes one request in the
words of ``sdk.wire``, and decodes the answer. In an executor the request suspends the call; in a
script the same request goes to the backends directly. A wrong argument is a TypeError or ValueError
at once; a failed read or write is a ``ReadError`` (``.kind`` says how), a revert is a
``RevertedError``.

The whole surface (users import ``blockdb``, ``leafage``, ``blockx_sdk``, and ``function`` from
``blockx``):

===================================================== ======= ======================================
user code                                             backend operation and its parameters
===================================================== ======= ======================================
``blockdb``
``Table(name, key=None).get_row(key)``                blockdb get_row {table, key, declared_key?}
``Table.get_rows(keys)``                              blockdb get_rows {table, keys, declared_key?}
``Table.upsert_rows(rows)``                           blockdb upsert_rows {table, rows, key?}, write
``Table.delete_rows(keys)``                           blockdb delete_rows {table, keys}, write
``BlockTable(name).get_state(key, block)``            blockdb get_state {table, key, block}
``Table.scan(prefix=None, limit=None)``               blockdb scan {table, prefix, limit?}
``BlockTable.history(key, from_block, to_block)``     blockdb get_history {table, key, from?, to?, limit?}
``BlockTable.upsert_states([{key, block, state}])``   blockdb upsert_states {table, rows}, write
``TimeTable(name).get_row(key, at)``                  blockdb get_row_at {table, key, at}
``TimeTable.history(key, from_, to, limit)``          blockdb get_history_at {table, key, from?, to?, limit?}
``TimeTable.upsert_rows([{key, at, row}])``           blockdb upsert_rows_at {table, rows}, write
``Block(height, hash=None, timestamp=None)``          a value; goes wherever a block is asked for
``leafage.ChainState(chain, block)``
``.get_address_balance(address) -> int``              rpc     eth_getBalance, block
``.get_address_code(address) -> bytes``               rpc     eth_getCode, block
``.get_address_nonce(address) -> int``                rpc     eth_getTransactionCount, block
``.get_storage(address, slot) -> bytes`` (32)         rpc     eth_getStorageAt, block
``.call(to, data) -> bytes``                          rpc     eth_call, block
``.call(to, "f(uint256)(bool)", 1) -> bool``          rpc     eth_call, block
``.get_block(full=False) -> dict``                    rpc     eth_getBlockByNumber, block
``.get_transaction(hash) -> dict | None``             rpc     eth_getTransactionByHash
``.get_receipt(hash) -> dict | None``                 rpc     eth_getTransactionReceipt
``.get_logs(address, topics, from_block, to_block)``  rpc     eth_getLogs, block or a range
``leafage.web3(chain, block) -> web3.Web3``           rpc     whatever web3 asks for
``blockx_sdk``
``db.get(table, key)``                                blockdb get_row {table, key}
``rpc.call(method, params=None, chain=None)``         rpc     the method, params as given
``call_subfunc(function_id, *args)``                  -       sub-call
``sleep(seconds)``                                    -       timer in the executor
``get_provider()``                                    -       the seam itself
``blockx.function``
``call(function_id, *args)``                          -       sub-call
``blockx.http``
``get(url, ...)``, ``post(url, ...)``                 http    hosts of ``backends.http.hosts``
``blockx.capability(name)``
``.ask(operation, params, data)``                     NAME    of ``backends.capabilities``; gRPC or other
``.channel()``: ``BridgeChannel`` for a gRPC stub     NAME    the stub's methods, their bytes as sidecar
===================================================== ======= ======================================

Every ``rpc`` request has the parameters {params, chain?, block?}. ``chain``: a name of
``backends.rpc``; absent: the only one. A ``block`` makes it a *state read*: ``params`` lack the
block, and the backend pins it and puts it where the method wants it. Absent: ``params`` go to the
node as they are.
"""
