def _(p):
    if (n := len(p)) > 2 and any((last := x) for x in p):
        return n, last
    return p[1:-1:2], p[::-1], p[..., 0]
