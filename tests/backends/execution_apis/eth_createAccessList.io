// eth_createAccessList/create-al-abi-revert.io
>> {"jsonrpc":"2.0","id":1,"method":"eth_createAccessList","params":[{"gas":"0x186a0","input":"0x01","to":"0x0ee3ab1371c93e7c0c281cc0c2107cdebc8b1930"},"latest"]}
<< {"jsonrpc":"2.0","id":1,"result":{"accessList":[{"address":"0x0ee3ab1371c93e7c0c281cc0c2107cdebc8b1930","storageKeys":["0x00000000000000000000000000000000000000000000000000000000000042ff"]}],"error":"execution reverted","gasUsed":"0x639d"}}
// eth_createAccessList/create-al-contract.io
>> {"jsonrpc":"2.0","id":1,"method":"eth_createAccessList","params":[{"from":"0x0c2c51a0990aee1d73c1228de158688341557508","gas":"0xea60","gasPrice":"0x1a21397","input":"0x010203040506","nonce":"0x0","to":"0x7dcd17433742f4c0ca53122ab541d0ba67fc27df"},"latest"]}
<< {"jsonrpc":"2.0","id":1,"result":{"accessList":[{"address":"0x7dcd17433742f4c0ca53122ab541d0ba67fc27df","storageKeys":["0x0000000000000000000000000000000000000000000000000000000000000000","0x13a08e3cd39a1bc7bf9103f63f83273cced2beada9f723945176d6b983c65bd2"]}],"gasUsed":"0xca3c"}}
