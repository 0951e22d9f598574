TABLE = Table('t')


def _(p):
    TABLE.upsert_rows([p])
    return TABLE.get_rows([p])
