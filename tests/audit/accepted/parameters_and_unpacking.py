def _(p, /, a=1, *rest, k, **more):
    f = lambda x, *y, z=1, **w: (x, y, z, w)
    first, *others = p
    a = b = c = 1
    a, b = b, a
    return f(*rest, **more), others, a, b, c, k, first
