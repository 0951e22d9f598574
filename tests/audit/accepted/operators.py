class V:
    __slots__ = ('x', 'y')
    ZERO = 0

    def __init__(self, x):
        self.x = x

    def __add__(self, o):
        return V(self.x + o.x)

    def __eq__(self, o):
        return self.x == o.x

    def __lt__(self, o):
        return self.x < o.x

    def __hash__(self):
        return hash(self.x)

    def __len__(self):
        return 1

    def __getitem__(self, i):
        return self.x

    def __iter__(self):
        yield self.x

    def __bool__(self):
        return True

    def __repr__(self):
        return f'V({self.x!r})'

    def __call__(self):
        return 1

    def __enter__(self):
        return self

    def __exit__(self, *a):
        return False

    def __mul__(self, k):
        return V(self.x * k)

    __rmul__ = __imul__ = __mul__

    @property
    def norm(self):
        return abs(self.x)

    @norm.setter
    def norm(self, v):
        self.x = v

    @staticmethod
    def zero():
        return V(V.ZERO)

    @classmethod
    def one(cls):
        return cls(1)


def _(p):
    with V(1) as v:
        return v.norm
