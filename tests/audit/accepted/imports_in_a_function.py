def _(p):
    import math
    from itertools import groupby as g, chain
    return math.gcd(4, 6), g, chain.from_iterable(p)
