def _(p):
    return [id for id in p], {dir: 1 for dir in p}, sum(hash for hash in p)
