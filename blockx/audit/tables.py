"""What an audited function may import, call, define and ask of an object: frozen data, each entry with its reason.

Read by the audit (``rules``) and by the restricted namespace of the executor, so that what the audit accepts is what
the namespace holds. Everything here exists on Python 3.11, 3.12 and 3.13. What is allowed is listed, since what is not
moves between Python versions; the few tables of refused names only give better messages or stop attributes that
ordinary objects have. Raise ``RULES_VERSION`` with every change of a table or a rule: cached verdicts go by it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

RULES_VERSION: Final = 2
"""Part of every verdict; a verdict of another version is no verdict."""

Reasons = Mapping[str, str]


def _frozen(entries: dict[str, str]) -> Reasons:
    return MappingProxyType(entries)


def _all(names: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


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
                "errors": "see blockx.errors",
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
"""Module -> name -> reason. A name that is a key itself with its module in front (``blockx.function``) is a module.

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

EXCEPTIONS: Final = frozenset(
    {name for name, reason in SAFE_BUILTINS.items() if reason == _EXCEPTION}
    | {
        f"{module}.{name}"
        for module, names in ALLOWED_IMPORTS.items()
        for name, reason in names.items()
        if reason == _EXCEPTION
    }
)
"""Exception classes by name or dotted path: the only foreign bases of a class, beside RECORD_BASES."""

RECORD_BASES: Final = _names("typing.NamedTuple typing.TypedDict")
"""Bases that turn annotations into a record class."""

CLASS_KEYWORDS: Final = _names("total")
"""Keywords of class statements: that of TypedDict, which any other class refuses."""

PRELUDE_PATHS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "json": "json",
        "math": "math",
        "Decimal": "decimal.Decimal",
        "date": "datetime.date",
        "datetime": "datetime.datetime",
        "timedelta": "datetime.timedelta",
        "timezone": "datetime.timezone",
        "function": "blockx.function",
        "Block": "blockdb.Block",
        "BlockTable": "blockdb.BlockTable",
        "Table": "blockdb.Table",
        "TimeTable": "blockdb.TimeTable",
        "ChainState": "leafage.ChainState",
    }
)
"""Names of ``functions.entry.PRELUDE`` as the dotted path under which a user would import them."""

SDK_CLASSES: Final = _names(
    "blockdb.Block blockdb.BlockTable blockdb.Table blockdb.TimeTable leafage.ChainState"
)
"""Classes that all tasks of a process share and that could be changed: to call and to name, never to pass around."""

DECORATORS: Final = _names(
    "dataclasses.dataclass functools.cache functools.lru_cache classmethod property staticmethod"
)
"""Foreign decorators, plain or with arguments; own functions are allowed too."""

CLASS_MAKER: Final = "dataclasses.dataclass"
"""Only a decorator, right above the class: given a class of the host it would change that for all tasks."""

MATCH_CLASSES: Final = _names("bool bytearray bytes dict float frozenset int list set str tuple")
"""Built-in value types: their class patterns look at the value itself and read no attribute."""

DEFINABLE_METHODS: Final = _names(
    "__init__ __post_init__ __repr__ __str__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __hash__ __bool__ __len__ "
    "__iter__ __next__ __contains__ __getitem__ __setitem__ __delitem__ __call__ __enter__ __exit__ "
    "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ "
    "__floordiv__ __rfloordiv__ __mod__ __rmod__ __divmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ "
    "__and__ __rand__ __or__ __ror__ __xor__ __rxor__ __lshift__ __rshift__ __int__ __float__ __round__"
)
"""Names with two underscores that a class may define with ``def``: what operators and statements need.

Not in it: what answers for any attribute, runs when a class is made or an object dies, or lies about a type.
"""

SYNTAX: Final = _names(
    "Module FunctionDef ClassDef Return Delete Assign AugAssign AnnAssign For While If With Match Raise Try Assert "
    "Import ImportFrom Global Nonlocal Expr Pass Break Continue "
    "BoolOp NamedExpr BinOp UnaryOp Lambda IfExp Dict Set ListComp SetComp DictComp GeneratorExp Yield YieldFrom "
    "Compare Call FormattedValue JoinedStr Constant Attribute Subscript Starred Name List Tuple Slice "
    "comprehension ExceptHandler arguments arg keyword alias withitem match_case "
    "MatchValue MatchSingleton MatchSequence MatchMapping MatchClass MatchStar MatchAs MatchOr "
    "Load Store Del And Or Add Sub Mult MatMult Div Mod Pow LShift RShift BitOr BitXor BitAnd FloorDiv "
    "Invert Not UAdd USub Eq NotEq Lt LtE Gt GtE Is IsNot In NotIn"
)
"""Types of syntax nodes. Anything else is refused, hence also what a future Python adds."""

SYNTAX_INSTEAD: Final[Reasons] = _frozen(
    {
        **_all(
            "AsyncFunctionDef AsyncFor AsyncWith Await",
            "calls are plain synchronous code: write `def`, `for` and `with`; reads suspend by themselves",
        ),
        "TryStar": "write `except`",
        "TypeAlias": "write a plain assignment, or leave the alias out",
        **_all("TypeVar ParamSpec TypeVarTuple", "leave the type parameters out"),
        **_all("TemplateStr Interpolation", "write an f-string"),
    }
)
"""What to write for refused syntax."""

REFUSED_ATTRIBUTES: Final[Reasons] = _frozen(
    {
        **_all("format format_map", "templates read attributes by text: write an f-string"),
        "with_traceback": "tracebacks lead to the host's frames: write `raise ... from error`",
        "mro": "it leads to every class of the process: leave it out",
        "obj": "an error's object may be the host's: keep your own reference",
        "func": "a partial's function may be the host's: call the partial",
        **_all("fget fset fdel", "a property's function may be the host's: use the property"),
        "register": "it changes a class that all tasks share: write a check of your own",
    }
)
"""Attributes without an underscore that lead out of the function, and what to write instead."""

REFUSED_ATTRIBUTE_PREFIXES: Final = ("gi_", "cr_", "ag_", "f_", "tb_", "co_")
"""Of generators, coroutines, frames, tracebacks and code objects."""

NAMES_INSTEAD: Final[Reasons] = _frozen(
    {
        **_all("eval exec compile __import__", "text is not code here: write the code itself"),
        **_all("open input", "a function reads rows and chain state, no files: use the SDK"),
        **_all(
            "getattr hasattr setattr delattr",
            "write the attribute itself, or keep the data in a dict",
        ),
        **_all("vars dir globals locals", "keep the data in a dict of your own"),
        "type": "write `isinstance(value, ...)`, or a class statement",
        "object": "write a class without a base, or None as a marker",
        "super": "write the code of the base class here, or hold an object instead of deriving",
        "memoryview": "use bytes",
        "id": "an address means nothing in another run: compare with `is`",
        **_all("exit quit SystemExit", "write `return`, or raise an ordinary error"),
        **_all(
            "BaseException KeyboardInterrupt GeneratorExit BaseExceptionGroup ExceptionGroup",
            "the host ends calls with these: write `Exception`, or the error that you expect",
        ),
        **_all("help breakpoint copyright credits license", "it is for a terminal: leave it out"),
    }
)
"""What to write for built-ins outside of SAFE_BUILTINS."""

IMPORTS_INSTEAD: Final[Reasons] = _frozen(
    {
        "time": "write `from blockx_sdk import sleep`, and use datetime for dates",
        **_all("requests urllib http httpx aiohttp socket", "write `from blockx import http`"),
        **_all("web3 eth_abi", "write `from leafage import ChainState`"),
        **_all(
            "random secrets uuid", "every run must give the same rows: derive it from the arguments"
        ),
        "operator": "write a lambda",
        "string": "write an f-string",
        **_all("enum abc types", "write a plain class"),
        **_all("asyncio threading concurrent multiprocessing", "use `function.call`"),
        **_all("fractions numbers numpy pandas statistics", "use int, Decimal and math"),
        **_all("sys os io pathlib", "a function sees its arguments and the SDK, not the machine"),
        **_all("pickle marshal copy", "use json, or build a new value"),
        "logging": "use `print`: the lines are kept with the call",
    }
)
"""What to write for modules that are often asked for."""
