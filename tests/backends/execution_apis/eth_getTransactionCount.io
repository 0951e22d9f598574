// eth_getTransactionCount/get-nonce-default-block.io
>> {"jsonrpc":"2.0","id":1,"method":"eth_getTransactionCount","params":["0x0300100f529a704d19736a8714837adbc934db7f"]}
<< {"jsonrpc":"2.0","id":1,"result":"0x1"}
// eth_getTransactionCount/get-nonce-unknown-account.io
>> {"jsonrpc":"2.0","id":1,"method":"eth_getTransactionCount","params":["0xc1cadaffffffffffffffffffffffffffffffffff","latest"]}
<< {"jsonrpc":"2.0","id":1,"result":"0x0"}
