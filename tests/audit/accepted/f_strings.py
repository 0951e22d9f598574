def _(p):
    return f'[{p:<{8}}|{p!r}|{p:>10,.2f}|{1 if p else 2}|{p=}]' + '%s %(x)d' % p + format(p, ',.2f')
