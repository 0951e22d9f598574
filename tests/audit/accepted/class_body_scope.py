class A:
    xs = [1, 2]
    ys = [x for x in xs]
    n = len(ys)

    class B:
        pass


def _(p):
    return A.n
