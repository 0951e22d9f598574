def _(p):
    input, type, id, open = p['input'], p['type'], p['id'], 1
    return [input, type, id, open]
