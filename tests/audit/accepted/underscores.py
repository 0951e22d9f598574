def _(p):
    for __ in range(3):
        pass
    _x, _ = p
    return _x
