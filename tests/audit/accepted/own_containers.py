def f():
    return {}


def _(p):
    f()['x'] = 1
    p.setdefault('k', []).append(1)
    matrix = [[0] * 3 for _i in range(3)]
    matrix[0][1] = 2
    return matrix
