from blockx import capability, function, http
from blockx.errors import ReadError
from blockx_sdk import db, rpc, sleep
from blockdb import Table
from leafage import ChainState


def _(p):
    try:
        sleep(1)
        return function.call('f', 1), http.get('u'), db.get('t', {}), rpc.call('m', [], 'dev'), capability('x').ask('y')
    except ReadError as error:
        return str(error.kind)
