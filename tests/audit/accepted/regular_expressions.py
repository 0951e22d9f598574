import re


def _(p):
    return re.sub(r'(a+)', lambda m: m.group(1), p, flags=re.I)
