"""What an audited function may import, call, define and ask of an object: frozen data, each entry with its reason.

Read by the audit (``rules``) and by the restricted namespace of the executor, so that what the audit accepts is what
the namespace holds. Everything here exists on Python 3.11, 3.12 and 3.13. What is allowed is listed, since what is not
moves between Python versions; the few tables of refused names only give better messages or stop attributes that
ordinary objects have. Raise ``RULES_VERSION`` with every change of a table or a rule: cached verdicts go by it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

RULES_VERSION: Final = 1
"""Part of every verdict; a verdict of another version is no verdict."""

Reasons = Mapping[str, str]


def _frozen(entries: dict[str, str]) -> Reasons:
    return MappingProxyType(entries)


def _all(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


_VALUE: Final = "immutable values, computed from the arguments alone"
_CONSTANT: Final = "a constant"
_CONTAINER: Final = "makes a container that belongs to the caller"
_ITERATOR: Final = "makes an iterator over what it is given"
_ANNOTATION: Final = "for annotations; nothing evaluates them"
_EXCEPTION: Final = "an ordinary error, to raise, to catch and to subclass"

ALLOWED_IMPORTS: Final[Mapping[str, Reasons]] = MappingProxyType(
    {
        "__future__": _frozen({"annotations": "annotations stay text"}),
        "json": _frozen(
            {
                **_all("dumps loads", "text from values and back; hooks run inside of the call"),
                "JSONDecodeError": _EXCEPTION,
            }
        ),
        "math": _frozen(
            {
                **_all(
                    "acos acosh asin asinh atan atan2 atanh cbrt ceil comb copysign cos cosh degrees dist erf erfc "
                    "exp exp2 expm1 fabs factorial floor fmod frexp fsum gamma gcd hypot isclose isfinite isinf "
                    "isnan isqrt lcm ldexp lgamma log log10 log1p log2 modf nextafter perm pow prod radians "
                    "remainder sin sinh sqrt tan tanh trunc ulp",
                    _VALUE,
                ),
                **_all("e inf nan pi tau", _CONSTANT),
            }
        ),
        "decimal": _frozen(
            {
                "Decimal": _VALUE,
                "Context": "a context that belongs to the caller",
                **_all("getcontext localcontext", "the context of this call, fresh for each one"),
                **_all(
                    "ROUND_05UP ROUND_CEILING ROUND_DOWN ROUND_FLOOR ROUND_HALF_DOWN ROUND_HALF_EVEN "
                    "ROUND_HALF_UP ROUND_UP MAX_PREC MAX_EMAX MIN_EMIN MIN_ETINY",
                    _CONSTANT,
                ),
                **_all(
                    "Clamped DecimalException DivisionByZero FloatOperation Inexact InvalidOperation Overflow "
                    "Rounded Subnormal Underflow",
                    _EXCEPTION,
                ),
            }
        ),
        "datetime": _frozen(
            {
                **_all("date datetime time timedelta timezone", _VALUE),
                "tzinfo": _ANNOTATION,
                **_all("MAXYEAR MINYEAR UTC", _CONSTANT),
            }
        ),
        "collections": _frozen(
            {
                **_all("ChainMap Counter OrderedDict defaultdict deque", _CONTAINER),
                "namedtuple": "a class of its own with checked field names",
                "abc": "see collections.abc",
            }
        ),
        "collections.abc": _frozen(
            _all(
                "Callable Collection Container Generator Hashable ItemsView Iterable Iterator KeysView Mapping "
                "MutableMapping MutableSequence MutableSet Reversible Sequence Set Sized ValuesView",
                "for annotations and isinstance; `register` is refused",
            )
        ),
        "itertools": _frozen(
            _all(
                "accumulate chain combinations combinations_with_replacement compress count cycle dropwhile "
                "filterfalse groupby islice pairwise permutations product repeat starmap takewhile tee zip_longest",
                _ITERATOR,
            )
        ),
        "functools": _frozen(
            {
                "reduce": "a loop over what it is given",
                "cmp_to_key": "a sort key",
                "partial": "a call with some arguments given; `.func` is refused",
                **_all("cache lru_cache", "remembers results in the module of one task"),
            }
        ),
        "typing": _frozen(
            _all(
                "Annotated Any Callable ClassVar Counter DefaultDict Deque Dict Final FrozenSet Generator Hashable "
                "Iterable Iterator List Literal Mapping MutableMapping MutableSequence MutableSet NamedTuple NewType "
                "NoReturn Never Optional OrderedDict Self Sequence Set Sized TYPE_CHECKING Tuple Type TypeAlias "
                "TypedDict TypeVar Union cast",
                _ANNOTATION,
            )
        ),
        "dataclasses": _frozen(
            {
                **_all("dataclass field", "classes made from the source's own annotations"),
                **_all("asdict astuple replace", "copies of the caller's own values"),
                **_all("fields is_dataclass", "what the source declared itself"),
                "FrozenInstanceError": _EXCEPTION,
                **_all("InitVar KW_ONLY", _ANNOTATION),
            }
        ),
        "re": _frozen(
            {
                **_all(
                    "compile escape findall finditer fullmatch match search split sub subn",
                    "stopped by the call's limits like a loop",
                ),
                **_all("A ASCII DOTALL I IGNORECASE M MULTILINE S VERBOSE X", _CONSTANT),
                **_all("Match Pattern", _ANNOTATION),
                "error": _EXCEPTION,
            }
        ),
        "hashlib": _frozen(
            _all("blake2b blake2s sha1 sha256 sha384 sha3_256 sha3_512 sha512", "a hash of bytes")
        ),
        "base64": _frozen(
            _all(
                "b16decode b16encode b32decode b32encode b64decode b64encode urlsafe_b64decode urlsafe_b64encode",
                "bytes from bytes",
            )
        ),
        "bisect": _frozen(
            _all("bisect bisect_left bisect_right insort insort_left insort_right", "sorted lists")
        ),
        "heapq": _frozen(
            _all(
                "heapify heappop heappush heappushpop heapreplace merge nlargest nsmallest", "heaps"
            )
        ),
        "blockx": _frozen(
            {
                "function": "see blockx.function",
                "http": "see blockx.http",
                "capability": "a service that the operator configured",
            }
        ),
        "blockx.function": _frozen({"call": "a sub-call, limited by depth and budget"}),
        "blockx.http": _frozen(
            _all("get post", "requests of main, to hosts that the operator named")
        ),
        "blockx.errors": _frozen(
            _all(
                "ReadError RevertedError SubcallCycleDetectedError SubcallDepthExceededError SubcallFailedError",
                "what a read or a sub-call raises, to catch",
            )
        ),
        "blockdb": _frozen(
            _all("Block BlockTable Table TimeTable", "rows, read and written by main")
        ),
        "leafage": _frozen({"ChainState": "chain state, read by main"}),
        "blockx_sdk": _frozen(
            {
                "call_subfunc": "a sub-call, limited by depth and budget",
                "sleep": "suspends the call and counts against its budget",
                "db": "see blockx_sdk.db",
                "rpc": "see blockx_sdk.rpc",
            }
        ),
        "blockx_sdk.db": _frozen({"get": "a row, read by main"}),
        "blockx_sdk.rpc": _frozen({"call": "a request to a node, sent by main"}),
    }
)
"""Module -> name -> reason. A name that is a key itself with its module in front (``blockx.function``) is a module again.

A facade of a module holds these names and nothing else.
"""

SAFE_BUILTINS: Final[Reasons] = _frozen(
    {
        **_all("bool bytes complex float int str tuple frozenset range slice", _VALUE),
        **_all("bytearray dict list set", _CONTAINER),
        **_all("enumerate filter iter map reversed zip", _ITERATOR),
        **_all(
            "abs all any ascii bin chr divmod format hash hex len max min next oct ord pow repr round sorted sum",
            "computes from its arguments alone",
        ),
        **_all("callable isinstance issubclass", "a question about a value"),
        **_all("classmethod property staticmethod", "part of a class statement"),
        "print": "the captured output of the call",
        **_all("Ellipsis NotImplemented False None True", _CONSTANT),
        **_all(
            "ArithmeticError AssertionError AttributeError BufferError EOFError Exception FloatingPointError "
            "ImportError IndexError KeyError LookupError MemoryError ModuleNotFoundError NameError "
            "NotImplementedError OSError OverflowError RecursionError ReferenceError RuntimeError StopIteration "
            "TimeoutError TypeError UnboundLocalError UnicodeDecodeError UnicodeEncodeError UnicodeError "
            "UnicodeTranslateError ValueError ZeroDivisionError ConnectionError PermissionError FileNotFoundError "
            "FileExistsError InterruptedError",
            _EXCEPTION,
        ),
        **_all("DeprecationWarning RuntimeWarning UserWarning Warning", _EXCEPTION),
    }
)
"""Built-ins that audited code may name. The namespace adds only what statements need (import, class)."""
