// eth_getBlockByHash/get-block-by-empty-hash.io
>> {"jsonrpc":"2.0","id":1,"method":"eth_getBlockByHash","params":["0x0000000000000000000000000000000000000000000000000000000000000000",true]}
<< {"jsonrpc":"2.0","id":1,"result":null}
// eth_getBlockByHash/get-block-by-notfound-hash.io
>> {"jsonrpc":"2.0","id":1,"method":"eth_getBlockByHash","params":["0x00000000000000000000000000000000000000000000000000000000deadbeef",true]}
<< {"jsonrpc":"2.0","id":1,"result":null}
