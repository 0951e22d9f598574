def _(v):
    match v:
        case None | True:
            return 0
        case int() | float():
            return 1
        case str(s) if s.startswith('0x'):
            return s
        case [x, y, *rest]:
            return x, y, rest
        case {'op': 'add', 'args': [*items], **more}:
            return items, more
        case (1 | 2) as n:
            return n
        case -1 | 'x' | b'y':
            return 2
        case _:
            return 3
