"""``audit_source``: text in, verdict out. Pure and total, as far as Python's parser is.

The parser may still crash or hang on a source made for it: whoever audits sources of strangers asks the daemon
(``client.Auditor``) and not this function.
"""

import ast
from collections.abc import Iterator

from blockx.audit.names import Names, imported
from blockx.audit.rules import RULES
from blockx.audit.source import (
    SOURCE_BYTES_MAX,
    TOO_LARGE,
    SourceError,
    Tree,
    check_compiles,
    parse,
    shown,
)
from blockx.audit.verdict import FINDINGS_MAX, Report, Verdict, refused

_REPORTED_MAX = 200
"""Names of one kind in a report."""
_ARGUMENTS = {
    "blockdb.Table": ("tables", 0, "name"),
    "blockdb.BlockTable": ("tables", 0, "name"),
    "blockdb.TimeTable": ("tables", 0, "name"),
    "blockx_sdk.db.get": ("tables", 0, "table"),
    "leafage.ChainState": ("chains", 0, "chain"),
    "blockx_sdk.rpc.call": ("chains", 2, "chain"),
    "blockx.function.call": ("functions", 0, "function_id"),
    "blockx_sdk.call_subfunc": ("functions", 0, "function_id"),
}
"""What a call names: which list of the report, the position of the argument, its keyword."""


def audit_bytes(data: bytes) -> Verdict:
    """Judge a file as it is on disk: what is no UTF-8, or too large, is refused unparsed."""
    if len(data) > SOURCE_BYTES_MAX:
        return refused("source", TOO_LARGE)
    try:
        source = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return refused("source", f"no UTF-8 ({error.reason}); save the file as UTF-8", line)
    return audit_source(source)


def audit_source(source: str) -> Verdict:
    """Judge one source by all rules. Any thread."""
    try:
        tree = parse(source)
    except SourceError as error:
        return Verdict(findings=(error.finding,))
    names = Names(tree)
    findings = sorted(
        {found for rule in RULES for found in rule(tree, names)},
        key=lambda found: (found.line, found.column, found.rule, found.message),
    )
    if not findings:
        try:
            check_compiles(source)
        except SourceError as error:
            findings = [error.finding]
    return Verdict(findings=tuple(findings[:FINDINGS_MAX]), report=_report(tree, names))


def _report(tree: Tree, names: Names) -> Report:
    found: dict[str, set[str]] = {"tables": set(), "chains": set(), "functions": set()}
    computed: set[str] = set()
    for call in tree.of(ast.Call):
        for path in names.paths(call.func):
            if path not in _ARGUMENTS:
                continue
            kind, position, keyword = _ARGUMENTS[path]
            argument = _argument(call, position, keyword)
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                found[kind].add(shown(argument.value))
            elif argument is not None:
                computed.add(kind)
    return Report(
        imports=_listed(_imports(tree)),
        tables=_listed(found["tables"]),
        chains=_listed(found["chains"]),
        functions=_listed(found["functions"]),
        computed=tuple(sorted(computed)),
    )


def _imports(tree: Tree) -> Iterator[str]:
    for statement in tree.of(ast.Import):
        yield from (shown(alias.name) for alias in statement.names)
    for source in tree.of(ast.ImportFrom):
        yield from (shown(path) for _name, path in imported(source))


def _argument(call: ast.Call, position: int, keyword: str) -> ast.expr | None:
    for given in call.keywords:
        if given.arg == keyword:
            return given.value
    return call.args[position] if position < len(call.args) else None


def _listed(names: Iterator[str] | set[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names))[:_REPORTED_MAX])
