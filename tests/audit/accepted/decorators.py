def once(f):
    def inner(*a, **k):
        return f(*a, **k)
    return inner


def times(n):
    return once


@once
@times(3)
def g(x):
    return x


def _(p):
    return g(p)
