import json
import math as m
import collections.abc
import datetime as dt, decimal


def _(p):
    return json.dumps(m.floor(m.pi)), dt.datetime.now(dt.timezone.utc), decimal.Decimal(1), isinstance(p, collections.abc.Mapping), collections.Counter(p)
