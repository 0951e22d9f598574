from decimal import ROUND_HALF_UP, Decimal, getcontext, localcontext


def _(p):
    getcontext().prec = 50
    with localcontext() as ctx:
        ctx.prec = 10
        return str(Decimal(1) / 3)
