def _(p):
    while p:
        p -= 1
        if p == 3:
            continue
        elif p < 0 or not p:
            break
    else:
        pass
    assert p is not None, 'x'
    return ~p, -p, +p, p ** 2, p // 3, p @ p, p << 1, p in [1], p not in {2}
