def gen(xs):
    got = yield 1
    yield from xs
    return got


def _(p):
    return list(gen(p)), {k: v for k, v in p}, {x for x in p if x if not x}, (y for x in p for y in x)
