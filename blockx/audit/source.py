"""From text to tree: what is refused before the parser sees it, and what the parser refuses.

Pure. One text for digest, audit and execution: what this accepts, ``functions.entry.compile_source`` compiles.
The tree is walked with a list and never by recursion, so that its depth is a finding and not a crash.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Final

from blockx.audit.verdict import Finding
from blockx.functions.entry import CODING, COMPILE_ERRORS, UTF8_NAMES, quiet_compiler, source_lines

SOURCE_BYTES_MAX: Final = 256 * 1024
"""Of an audited source; the parser takes some hundred times as much memory. More: refused."""
TOO_LARGE: Final = f"more than {SOURCE_BYTES_MAX:,} bytes; move data into a table"
NODES_MAX: Final = 100_000
"""Syntax nodes of one source. More: refused."""
DEPTH_MAX: Final = 120
"""Nested syntax nodes. Honest sources stay below 40; the compiler itself fails at some hundreds."""

_LINE_END = re.compile(r"\r\n|\r|\n")
_UNWANTED = re.compile(
    "[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\u2028\u2029]"  # controls, line ends that only some readers see
    "|\r(?!\n)"
    "|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # bidirectional controls
    "|[\u115f\u1160\u3164\uffa0\U000e0000-\U000e007f]"  # letters and tags that have no shape
    "|[\ud800-\udfff]"
)
_SHOWN_CHARS: Final = 60


class SourceError(Exception):
    """The text is refused as a whole."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


class Tree:
    """A parsed source: its nodes by type, in the order of the text, and the parent of each."""

    def __init__(self, module: ast.Module, lines: Sequence[str]) -> None:
        self.module = module
        self._lines = lines
        self.nodes: list[ast.AST] = []
        self.parents: dict[ast.AST, ast.AST] = {}
        self._by_type: dict[type[ast.AST], list[Any]] = defaultdict(list)
        self._walk()

    def of(self, *types: type[ast.AST]) -> Iterator[Any]:
        """All nodes of exactly these types; ``Any``, since a type checker would make AST of two of them."""
        for kind in types:
            yield from self._by_type.get(kind, ())

    def finding(self, rule: str, node: ast.AST, message: str) -> Finding:
        """A finding at the place of a node; a node without a place (``arguments``) is line 0."""
        line = getattr(node, "lineno", 0)
        column = 0
        if 0 < line <= len(self._lines):  # the tree counts bytes, people count characters
            before = self._lines[line - 1].encode()[: getattr(node, "col_offset", 0)]
            column = len(before.decode("utf-8", "replace")) + 1
        return Finding(rule=rule, line=line, column=column, message=message)

    def _walk(self) -> None:
        pending: list[tuple[ast.AST, int]] = [(self.module, 0)]
        while pending:
            node, depth = pending.pop()
            self.nodes.append(node)
            self._by_type[type(node)].append(node)
            if depth > DEPTH_MAX:
                raise SourceError(
                    self.finding(
                        "source",
                        node,
                        f"more than {DEPTH_MAX} nested expressions or blocks; name intermediate results, "
                        "or build long sums and texts in a loop",
                    )
                )
            if len(self.nodes) > NODES_MAX:
                raise SourceError(
                    self.finding(
                        "source",
                        node,
                        f"more than {NODES_MAX:,} syntax nodes; move data into a table",
                    )
                )
            children = list(ast.iter_child_nodes(node))
            for child in reversed(children):
                self.parents[child] = node
                pending.append((child, depth + 1))


def shown(name: str) -> str:
    """A name of the user's for a message: printable ASCII, and short."""
    text = ascii(name)[1:-1]
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def parse(source: str) -> Tree:
    """The tree of a source.

    Raises:
        SourceError: the text, the parser or the depth refuses it.
    """
    _check_text(source)
    text = source.removeprefix("\ufeff")
    with quiet_compiler():
        try:
            module = ast.parse(text)
        except COMPILE_ERRORS as error:
            raise SourceError(_compile_finding(error)) from None
    return Tree(module, source_lines(text))


def check_compiles(source: str) -> None:
    """Compile and forget: a ``return`` outside of a function shows only then. Raises SourceError."""
    with quiet_compiler():
        try:
            compile(source.removeprefix("\ufeff"), "<audit>", "exec", dont_inherit=True)
        except COMPILE_ERRORS as error:
            raise SourceError(_compile_finding(error)) from None


def _check_text(source: str) -> None:
    unwanted = _UNWANTED.search(source)
    if unwanted:
        line, column = _position(source, unwanted.start())
        raise _refused(
            f"the character U+{ord(unwanted[0]):04X}, which hides or reorders text, or is no text at all; "
            "remove it, or write it as an escape",
            line,
            column,
        )
    if len(source.encode()) > SOURCE_BYTES_MAX:
        raise _refused(TOO_LARGE, 0, 0)
    for number, line_text in enumerate(_LINE_END.split(source, 2)[:2], 1):
        declared = CODING.match(line_text.removeprefix("\ufeff"))
        if declared and declared[1].lower() not in UTF8_NAMES:
            raise _refused(
                f"the encoding {shown(declared[1])} is declared; save the file as UTF-8 and remove the line",
                number,
                1,
            )


def _compile_finding(error: BaseException) -> Finding:
    if isinstance(error, SyntaxError):
        text = shown(error.msg.split(" (<", 1)[0])
        return Finding(
            rule="source",
            line=error.lineno or 0,
            column=max(error.offset or 0, 0),
            message=f"{type(error).__name__}: {text}; mend it so that Python accepts the file",
        )
    if isinstance(error, MemoryError | RecursionError):
        what = "nested too deep to parse; name intermediate results, or split the function"
    else:
        what = f"Python cannot read it: {shown(str(error))}; write it in a simpler way"
    return Finding(rule="source", line=0, column=0, message=what)


def _refused(message: str, line: int, column: int) -> SourceError:
    return SourceError(Finding(rule="source", line=line, column=column, message=message))


def _position(source: str, index: int) -> tuple[int, int]:
    before = source[:index]
    last_end = max(before.rfind("\n"), before.rfind("\r"))
    return len(_LINE_END.findall(before)) + 1, index - last_end
