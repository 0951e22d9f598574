from typing import NamedTuple, TypedDict


class P(NamedTuple):
    x: int
    y: int = 0


class T(TypedDict):
    x: int


class Part(T, total=False):
    y: int


def _(p):
    return P(1).x
