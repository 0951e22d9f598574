from functools import cache, cmp_to_key, lru_cache, partial, reduce


@lru_cache(maxsize=None)
def f(x):
    return x


@cache
def g(x):
    return x


def _(p):
    return reduce(lambda a, b: a + b, map(partial(f), p))
