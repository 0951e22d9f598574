MAX = 2 ** 256 - 1


def _(p):
    return int(p) & MAX, hex(MAX), int.from_bytes(b'x', 'big'), bytes.fromhex('00'), str.join(',', p)
