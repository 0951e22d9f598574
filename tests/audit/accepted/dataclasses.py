from dataclasses import dataclass, field, asdict
import dataclasses


@dataclass(frozen=True, order=True)
class A:
    id: int
    type: str = 'x'
    input: list = field(default_factory=list)
    date: 'date' = None


@dataclasses.dataclass
class B(A):
    n: int = 0

    def __post_init__(self):
        self.n = 1


def _(p):
    return asdict(A(1))
