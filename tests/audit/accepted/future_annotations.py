from __future__ import annotations


def _(p: Unknown = 1) -> int:
    return p


class Unknown:
    pass
