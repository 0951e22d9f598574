class Order:
    def __init__(self, n):
        self.n = n
        self.lines = {}

    def add(self, k):
        self.lines[k] = 1
        self.n += 1
        del self.lines[k]

    @classmethod
    def reset(cls):
        cls.count = 0


def _(p):
    o = Order(1)
    o.n = 2
    o.lines['x'] = 3
    o.next = o
    o.next.n += 1
    p['k'] = o.n
    for row in p['rows']:
        row['seen'] = True
    del p['k']
    return o.n
