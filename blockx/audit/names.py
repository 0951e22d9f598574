"""Which binding a name means: the scopes of a source, built from its tree as the compiler builds them.

Pure. Binding is by scope and not by order: a name that a scope binds anywhere is that scope's everywhere. Where that
matters (a module's or class's name that is read before it is bound means the built-in), the rules are stricter.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from blockx.audit.source import Tree
from blockx.audit.tables import PRELUDE_PATHS

BindingKind = Literal["import", "class", "function", "parameter", "value"]
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
_NAMED: Final[tuple[tuple[type[ast.AST], str, BindingKind], ...]] = (
    (ast.FunctionDef, "name", "function"),
    (ast.AsyncFunctionDef, "name", "function"),
    (ast.ClassDef, "name", "class"),
    (ast.arg, "arg", "parameter"),
    (ast.ExceptHandler, "name", "value"),
    (ast.MatchAs, "name", "value"),
    (ast.MatchStar, "name", "value"),
    (ast.MatchMapping, "rest", "value"),
)
"""Nodes that bind a name which they hold as a text (or None): type, field, what it makes of the name."""
_HOPS_MAX: Final = 1_000
"""Names followed from one expression; more only in a source made to be slow, and then it counts as the host's."""


@dataclass(slots=True, eq=False)
class Binding:
    """One place that gives a name its meaning."""

    kind: BindingKind
    path: str = ""
    """Of an import or a prelude name: the dotted path."""
    value: ast.expr | None = None
    """What a plain name was taken from: the assigned value, what is iterated, the context manager."""
    definition: ast.AST | None = None
    """Of a class, a function and other nodes that hold the name as a text: that node."""


@dataclass(slots=True, eq=False)
class Scope:
    """One namespace of the source."""

    kind: Literal["module", "class", "function", "comprehension"]
    parent: "Scope | None" = None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    elsewhere: dict[str, "Scope | None"] = field(default_factory=dict)
    """Names declared global or nonlocal -> the scope where the search goes on."""


class Names:
    """The meaning of every name of a tree."""

    def __init__(self, tree: Tree) -> None:
        self._scope_of: dict[ast.AST, Scope] = {}
        self._paths: dict[tuple[str, Scope], list[str]] = {}
        self._hosts: dict[tuple[str, Scope], bool] = {}
        """Answers given: a source may bind and read one name thousands of times."""
        self.module = Scope("module")
        for name, path in PRELUDE_PATHS.items():
            self.module.bindings[name] = [Binding("import", path)]
        self._place(tree)
        for node in tree.of(ast.Global, ast.Nonlocal):
            self._declare(node)
        self._bind_all(tree)

    def lookup(self, node: ast.Name) -> tuple[Scope | None, list[Binding]]:
        """The scope and its bindings that a name means; None: no scope of the source, a built-in if anything."""
        return self._search(node.id, self._scope_of[node])

    def scope_kind(self, node: ast.AST) -> str:
        """The kind of the scope in which a node is evaluated."""
        return self._scope_of[node].kind

    def paths(self, node: ast.expr) -> list[str]:
        """Dotted paths of host objects that a name or an attribute of one may mean; empty: it is the source's own."""
        attributes: list[str] = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return []
        key = node.id, self._scope_of[node]
        if key not in self._paths:
            _scope, bindings = self.lookup(node)
            self._paths[key] = list(dict.fromkeys(b.path for b in bindings if b.kind == "import"))
        tail = "".join(f".{name}" for name in reversed(attributes))
        return [path + tail for path in self._paths[key]]

    def may_be_host(self, name: ast.Name) -> bool:
        """Whether a name may mean a host object itself, passed on from name to name and not made by a call."""
        key = name.id, self._scope_of[name]
        if key not in self._hosts:
            self._hosts[key] = self._leads_to_host(name)
        return self._hosts[key]

    def _leads_to_host(self, name: ast.Name) -> bool:
        seen: set[int] = set()
        pending: list[ast.expr] = [name]
        while pending:
            node = pending.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if len(seen) > _HOPS_MAX or self.paths(node):
                return True
            if isinstance(node, ast.Name):
                _scope, bindings = self.lookup(node)
                pending += [b.value for b in bindings if b.value is not None]
            else:
                pending += _parts(node)
        return False

    def _place(self, tree: Tree) -> None:
        """The scope in which each node is evaluated."""
        pending: list[tuple[ast.AST, Scope]] = [(tree.module, self.module)]
        while pending:
            node, scope = pending.pop()
            self._scope_of[node] = scope
            pending += _children(tree, node, scope)

    def _declare(self, node: ast.Global | ast.Nonlocal) -> None:
        scope = self._scope_of[node]
        target = self.module if isinstance(node, ast.Global) else scope.parent
        for name in node.names:
            if target is not scope:
                scope.elsewhere[name] = target

    def _bind_all(self, tree: Tree) -> None:
        late: list[tuple[Scope, str, Binding]] = []
        for scope, name, binding in self._bindings(tree):
            if name in scope.elsewhere:
                late.append(
                    (scope, name, binding)
                )  # belongs to a scope that must know its own first
            else:
                scope.bindings.setdefault(name, []).append(binding)
        for scope, name, binding in late:
            owner, _bindings = self._search(name, scope)
            (owner or self.module).bindings.setdefault(name, []).append(binding)

    def _bindings(self, tree: Tree) -> Iterator[tuple[Scope, str, Binding]]:
        for node in tree.of(ast.Name):
            if not isinstance(node.ctx, ast.Load):
                value = _taken_from(tree, node)
                yield self._bound_in(tree, node), node.id, Binding("value", value=value)
        for node_type, field_name, kind in _NAMED:
            for node in tree.of(node_type):
                name = getattr(node, field_name)
                if name is not None:
                    yield self._scope_of[node], name, Binding(kind, definition=node)
        for node in tree.of(ast.Import, ast.ImportFrom):
            for name, path in imported(node):
                yield self._scope_of[node], name, Binding("import", path)

    def _bound_in(self, tree: Tree, node: ast.Name) -> Scope:
        scope = self._scope_of[node]
        if isinstance(tree.parents[node], ast.NamedExpr):  # binds outside of comprehensions
            while scope.kind == "comprehension" and scope.parent is not None:
                scope = scope.parent
        return scope

    def _search(self, name: str, start: Scope) -> tuple[Scope | None, list[Binding]]:
        scope: Scope | None = start
        while scope is not None:
            if name in scope.elsewhere:
                scope = scope.elsewhere[name]
                continue
            if name in scope.bindings and scope.kind != "class":
                return scope, scope.bindings[name]
            if name in scope.bindings and scope is start:
                # Until the class has bound it, the name means what it means around the class.
                _around, more = self._search(name, scope.parent or self.module)
                return scope, scope.bindings[name] + more
            scope = scope.parent
        return None, []


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """The names that a statement binds, each with the dotted path of what it stands for."""
    for alias in node.names:
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"{node.module or ''}.{alias.name}"
        elif alias.asname is not None:
            yield alias.asname, alias.name
        else:
            first = alias.name.partition(".")[0]
            yield first, first


def _children(tree: Tree, node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
    """The children of a node, each with the scope in which it is evaluated.

    Defaults, annotations and what a comprehension goes over first belong to the scope around.
    """
    children = ast.iter_child_nodes(node)
    around = scope.parent or scope
    if isinstance(node, _Function | ast.ClassDef):
        inner = Scope("class" if isinstance(node, ast.ClassDef) else "function", scope)
        inside = {node.body} if isinstance(node, ast.Lambda) else set(node.body)
        for child in children:
            yield child, inner if child in inside or isinstance(child, ast.arguments) else scope
    elif isinstance(node, ast.arguments):
        for child in children:
            yield child, scope if isinstance(child, ast.arg) else around
    elif isinstance(node, ast.arg):
        yield from ((child, around) for child in children)
    elif isinstance(node, _Comprehension):
        inner = Scope("comprehension", scope)
        yield from ((child, inner) for child in children)
    elif isinstance(node, ast.comprehension):
        whole = tree.parents[node]
        assert isinstance(whole, _Comprehension)
        is_first = whole.generators[0] is node
        for child in children:
            yield child, around if is_first and child is node.iter else scope
    else:
        yield from ((child, scope) for child in children)


def _taken_from(tree: Tree, target: ast.Name) -> ast.expr | None:
    """The expression that a stored name takes its value from; of an unpacking, the whole."""
    node: ast.AST = target
    while isinstance(node, ast.Name | ast.Tuple | ast.List | ast.Starred):
        node = tree.parents[node]
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
        return node.value
    if isinstance(node, ast.For | ast.comprehension):
        return node.iter
    return node.context_expr if isinstance(node, ast.withitem) else None


def _parts(node: ast.expr) -> list[ast.expr]:
    """Expressions that may be the value of another one, or an item of it, without a call in between."""
    match node:
        case ast.Tuple() | ast.List() | ast.Set():
            return node.elts
        case ast.Dict():
            return node.values
        case ast.IfExp():
            return [node.body, node.orelse]
        case ast.BoolOp():
            return node.values
        case ast.NamedExpr() | ast.Starred() | ast.Subscript():
            return [node.value]
        case _:
            return []
