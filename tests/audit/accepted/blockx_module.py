import blockx.function
import blockx


def _(p):
    return blockx.function.call('f'), blockx.capability('x')
