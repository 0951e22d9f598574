def _(p):
    system, os_count, evaluate = p, 1, 2
    return {'__class__': system, 'eval': evaluate, 'os': os_count}
