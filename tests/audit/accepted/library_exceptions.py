import decimal
import json


class A(decimal.DecimalException):
    pass


class B(json.JSONDecodeError):
    pass


def _(p):
    return 1
