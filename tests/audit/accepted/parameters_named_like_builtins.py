def _(p, type=None, *, format='x', **vars):
    return type, format, vars
