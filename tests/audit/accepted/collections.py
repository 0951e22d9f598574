from collections import Counter, OrderedDict, abc, defaultdict, deque, namedtuple
P = namedtuple('P', 'x y')


def _(p):
    return P(1, 2).x, isinstance(p, abc.Sequence), defaultdict(list)
