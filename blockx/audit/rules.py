"""The rules: one function a group, each from a tree and the meaning of its names to findings.

Pure. Every rule looks at all nodes by itself, so none relies on another one having looked. What they do not look at:
comments, texts and keys of data. The tables say what is allowed and why.
"""

import ast
import builtins
from collections.abc import Callable, Iterator
from typing import Final

from blockx.audit.names import Names
from blockx.audit.source import Tree, shown
from blockx.audit.tables import (
    ALLOWED_IMPORTS,
    CLASS_KEYWORDS,
    CLASS_MAKER,
    DECORATORS,
    DEFINABLE_METHODS,
    EXCEPTIONS,
    IMPORTS_INSTEAD,
    MATCH_CLASSES,
    NAMES_INSTEAD,
    RECORD_BASES,
    REFUSED_ATTRIBUTE_PREFIXES,
    REFUSED_ATTRIBUTES,
    SAFE_BUILTINS,
    SDK_CLASSES,
    SYNTAX,
    SYNTAX_INSTEAD,
)
from blockx.audit.verdict import Finding

Rule = Callable[[Tree, Names], Iterator[Finding]]

_NO_IDENTIFIERS: Final = frozenset(
    {
        ("Constant", "value"),
        ("Constant", "kind"),
        ("Attribute", "attr"),  # of the rule on private attributes, which is stricter
        ("ImportFrom", "module"),  # the rule on imports compares these two with its table
        ("alias", "name"),
    }
)
"""Fields of nodes whose texts are no identifiers that the source chooses."""
_UNSAFE_BUILTINS: Final = frozenset({*dir(builtins), *NAMES_INSTEAD} - SAFE_BUILTINS.keys())
_PROPERTY_PARTS: Final = frozenset({"setter", "deleter", "getter"})


def check_syntax(tree: Tree, _names: Names) -> Iterator[Finding]:
    """Types of nodes that the table lists; an unknown one is refused."""
    for node in tree.nodes:
        kind = type(node).__name__
        if kind not in SYNTAX:
            instead = SYNTAX_INSTEAD.get(kind, "write it with older syntax")
            yield tree.finding("syntax", node, f"{kind} is not allowed here; {instead}")
        elif isinstance(node, ast.comprehension) and node.is_async:
            instead = SYNTAX_INSTEAD["AsyncFor"]
            yield tree.finding(
                "syntax", node.target, f"an async comprehension is not allowed; {instead}"
            )


def check_imports(tree: Tree, names: Names) -> Iterator[Finding]:
    """Pairs of module and name that the table lists; a module itself is never a value."""
    for statement in tree.of(ast.Import, ast.ImportFrom):
        yield from _check_import(tree, statement)
        if names.scope_kind(statement) == "class":
            what = "an import in a class body makes a module an attribute; import above the class"
            yield tree.finding("import", statement, what)
    for node in tree.of(ast.Name, ast.Attribute):
        yield from _check_module_use(tree, names, node)


def _check_import(tree: Tree, statement: ast.Import | ast.ImportFrom) -> Iterator[Finding]:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            if alias.name not in ALLOWED_IMPORTS:
                yield tree.finding("import", alias, _no_module(alias.name))
        return
    module = "." * statement.level + (statement.module or "")
    if module not in ALLOWED_IMPORTS:
        yield tree.finding("import", statement, _no_module(module))
        return
    for alias in statement.names:
        if alias.name not in ALLOWED_IMPORTS[module]:
            yield tree.finding("import", alias, _no_name(module, alias.name))


def _check_module_use(
    tree: Tree, names: Names, node: ast.Name | ast.Attribute
) -> Iterator[Finding]:
    parent = tree.parents[node]
    # The target of `module += x` is read too, although the tree calls it a store.
    is_read = isinstance(node.ctx, ast.Load) or isinstance(parent, ast.AugAssign)
    for path in names.paths(node):
        module, _dot, name = path.rpartition(".")
        is_member = isinstance(node, ast.Attribute) and module in ALLOWED_IMPORTS
        if is_member and name not in ALLOWED_IMPORTS[module]:
            yield tree.finding("import", node, _no_name(module, name))
            return
        if path in ALLOWED_IMPORTS and is_read and not isinstance(parent, ast.Attribute):
            yield tree.finding(
                "import",
                node,
                f"the module {path} is used as a value; write `{path.rpartition('.')[2]}.NAME`, "
                "or choose another name for a variable of yours",
            )
            return


def _no_module(module: str) -> str:
    instead = IMPORTS_INSTEAD.get(module.partition(".")[0])
    listed = ", ".join(sorted(ALLOWED_IMPORTS.keys() - {"__future__"}))
    return f"import of {shown(module)}, which is not on the list; {instead or f'available are {listed}'}"


def _no_name(module: str, name: str) -> str:
    if name == "*":
        return f"import of every name of {module}; write the names that you use"
    near = ", ".join(ALLOWED_IMPORTS[module])
    return f"{module}.{shown(name)} is not on the list; {module} has {near}"


def check_private_attributes(tree: Tree, _names: Names) -> Iterator[Finding]:
    """No attribute begins with an underscore, whatever its name becomes inside of a class."""
    for node in tree.of(ast.Attribute):
        if node.attr.startswith("_"):
            public = node.attr.strip("_") or "name"
            yield tree.finding(
                "private-attribute",
                node,
                f"the attribute {shown(node.attr)} begins with an underscore; "
                f"name attributes of yours `{shown(public)}`, and leave those of others alone",
            )


def check_introspection(tree: Tree, _names: Names) -> Iterator[Finding]:
    """No attribute that leads from an ordinary object to frames, code, classes or host functions."""
    for node in tree.of(ast.Attribute):
        instead = REFUSED_ATTRIBUTES.get(node.attr)
        if node.attr.startswith(REFUSED_ATTRIBUTE_PREFIXES):
            instead = "it is of frames, generators or code: give an attribute of yours another name"
        if instead:
            yield tree.finding(
                "introspection", node, f"the attribute {shown(node.attr)}: {instead}"
            )


def check_identifiers(tree: Tree, _names: Names) -> Iterator[Finding]:
    """No identifier begins with two underscores, wherever the tree keeps it, but a class's own methods."""
    for node in tree.nodes:
        for name in _identifiers(node):
            if not name.startswith("__") or not name.strip("_"):
                continue
            if not _is_class_member(tree, node, name):
                yield tree.finding(
                    "identifier",
                    node,
                    f"the name {shown(name)} begins with two underscores; {_another_name(tree, node, name)}",
                )


def _identifiers(node: ast.AST) -> Iterator[str]:
    kind = type(node).__name__
    for field, value in ast.iter_fields(node):
        if (kind, field) in _NO_IDENTIFIERS:
            continue
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            yield from (item for item in value if isinstance(item, str))


def _is_class_member(tree: Tree, node: ast.AST, name: str) -> bool:
    """Whether it is a method that a class may define, a second name of one, or its ``__slots__``."""
    parent = tree.parents.get(node)
    if isinstance(node, ast.FunctionDef):
        return isinstance(parent, ast.ClassDef) and name in DEFINABLE_METHODS
    if not isinstance(node, ast.Name) or not isinstance(parent, ast.Assign):
        return False
    if not isinstance(tree.parents[parent], ast.ClassDef):
        return False
    if name == "__slots__":
        return isinstance(node.ctx, ast.Store)
    # `__rmul__ = __mul__`: such a name can only be bound by a `def` of the class, or by this again.
    both = [*parent.targets, parent.value]
    return all(isinstance(side, ast.Name) and side.id in DEFINABLE_METHODS for side in both)


def _another_name(tree: Tree, node: ast.AST, name: str) -> str:
    if isinstance(node, ast.FunctionDef) and isinstance(tree.parents.get(node), ast.ClassDef):
        return "classes may define operators, comparison, iteration, `with`, __init__, __repr__, __call__"
    if name.endswith("__"):
        return "such names are Python's own: leave it out"
    return f"write `{shown(name.strip('_'))}`"


def check_names(tree: Tree, names: Names) -> Iterator[Finding]:
    """Every name that is read is the source's own, in the prelude, or a safe built-in."""
    for node in tree.of(ast.Name):
        if not isinstance(node.ctx, ast.Load) and not isinstance(tree.parents[node], ast.AugAssign):
            continue
        scope, _bindings = names.lookup(node)
        if scope is None and node.id not in SAFE_BUILTINS:
            yield tree.finding("name", node, _unknown(node.id))
        elif (
            scope is not None and scope.kind in ("module", "class") and node.id in _UNSAFE_BUILTINS
        ):
            # Read before it is bound, it would be the built-in.
            yield tree.finding(
                "name",
                node,
                f"{shown(node.id)} of this {scope.kind} has the name of a refused built-in; rename it",
            )


def _unknown(name: str) -> str:
    instead = NAMES_INSTEAD.get(name)
    if instead:
        return f"the built-in {name} is refused; {instead}"
    if name in _UNSAFE_BUILTINS:
        return f"the built-in {shown(name)} is not on the list; leave it out"
    if name in ALLOWED_IMPORTS:
        return f"{name} is not defined; write `import {name}`"
    return f"{shown(name)} is not defined in this source; define or import it"


def check_stores(tree: Tree, names: Names) -> Iterator[Finding]:
    """Attributes and items are stored or deleted only in what the source made itself.

    A parameter may be anything, so the classes of the SDK are not handed to one either.
    """
    for node in tree.of(ast.Name, ast.Attribute):
        yield from _check_sdk_class(tree, names, node)
    for node in tree.of(ast.Attribute, ast.Subscript):
        if isinstance(node.ctx, ast.Load):
            continue
        root: ast.expr = node
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        if isinstance(root, ast.Call):
            continue  # what a call returns is made for this caller
        if not isinstance(root, ast.Name):
            what = "a store into something without a name; give it a name first"
            yield tree.finding("store", node, what)
        elif names.may_be_host(root):
            yield tree.finding(
                "store",
                node,
                f"a store into {shown(root.id)}, which all tasks share; keep it in a variable, "
                "a dict or an object of your own",
            )
        elif names.lookup(root)[0] is None:
            yield tree.finding(
                "store",
                node,
                f"a store into {shown(root.id)}, which is not of this source; store into an object of yours",
            )


def _check_sdk_class(tree: Tree, names: Names, node: ast.Name | ast.Attribute) -> Iterator[Finding]:
    paths = names.paths(node)
    is_sdk = isinstance(node.ctx, ast.Load) and not SDK_CLASSES.isdisjoint(paths)
    if is_sdk and not _is_plain_use(tree, names, node):
        yield tree.finding(
            "store",
            node,
            f"the class {shown(paths[0])} is passed around; call it where you need it, "
            "and pass the object or a function of yours",
        )


def _is_plain_use(tree: Tree, names: Names, node: ast.expr) -> bool:
    """Whether a class is called, asked for an attribute, named in an annotation, or compared with a value's."""
    child: ast.AST = node
    parent = tree.parents[child]
    if isinstance(parent, ast.Attribute):
        return True
    if isinstance(parent, ast.Call) and parent.func is node:
        return True
    while isinstance(parent, ast.Tuple | ast.Subscript | ast.BinOp):
        child, parent = parent, tree.parents[parent]
    if isinstance(parent, ast.Call):
        asked = parent.func
        if not isinstance(asked, ast.Name) or asked.id not in ("isinstance", "issubclass"):
            return False
        return names.lookup(asked)[0] is None  # the built-in
    if isinstance(parent, ast.AnnAssign):  # of a class it is kept, and dataclasses.fields gives it
        return parent.annotation is child and names.scope_kind(parent) != "class"
    if isinstance(parent, ast.arg):
        return True
    return isinstance(parent, ast.FunctionDef) and parent.returns is child


def check_classes(tree: Tree, names: Names) -> Iterator[Finding]:
    """Plain class statements: no metaclass, own or listed bases, own or listed decorators."""
    for statement in tree.of(ast.ClassDef):
        yield from _check_class(tree, names, statement)
    for node in tree.of(ast.Name, ast.Attribute):
        if CLASS_MAKER in names.paths(node) and not _is_decorator(tree, node):
            what = f"{CLASS_MAKER} used as a function, which changes the class that it is given"
            yield tree.finding("class", node, f"{what}; write `@dataclass` above a class of yours")
    for owner in tree.of(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef):
        for decorator in owner.decorator_list:
            if not _is_plain_decorator(names, decorator):
                yield tree.finding(
                    "class",
                    decorator,
                    f"a decorator of {shown(owner.name)} that is neither a function of this source nor one of "
                    f"{', '.join(sorted(DECORATORS))}; call it in the body instead",
                )


def _check_class(tree: Tree, names: Names, statement: ast.ClassDef) -> Iterator[Finding]:
    name = shown(statement.name)
    for keyword in statement.keywords:
        if keyword.arg in CLASS_KEYWORDS and isinstance(keyword.value, ast.Constant):
            continue
        what = f"class {name} has the keyword {shown(keyword.arg or '**')}"
        yield tree.finding("class", keyword.value, f"{what}; write a plain class without it")
    for base in statement.bases:
        if not _is_plain_base(names, base):
            yield tree.finding(
                "class",
                base,
                f"a base of class {name} that is neither an exception on the list nor a class of this source "
                "without decorators of its own; hold such an object in an attribute instead of deriving",
            )
    for decorator in statement.decorator_list[:-1]:
        if CLASS_MAKER in names.paths(_called(decorator)):
            what = (
                f"{CLASS_MAKER} above another decorator, which may have put another class in place"
            )
            yield tree.finding("class", decorator, f"{what}; write it right above the class")


def _is_plain_base(names: Names, base: ast.expr) -> bool:
    if paths := names.paths(base):
        return all(path in EXCEPTIONS or path in RECORD_BASES for path in paths)
    if not isinstance(base, ast.Name):
        return False
    scope, bindings = names.lookup(base)
    if scope is None:
        return base.id in EXCEPTIONS
    if scope.kind in ("module", "class") and base.id in SAFE_BUILTINS.keys() - EXCEPTIONS:
        return False  # before it is bound, or after a `del`, it is the built-in
    return all(
        isinstance(binding.definition, ast.ClassDef)
        and all(names.paths(_called(d)) == [CLASS_MAKER] for d in binding.definition.decorator_list)
        for binding in bindings
    )


def _called(decorator: ast.expr) -> ast.expr:
    """``dataclass`` of ``@dataclass(frozen=True)``."""
    return decorator.func if isinstance(decorator, ast.Call) else decorator


def _is_decorator(tree: Tree, node: ast.expr) -> bool:
    parent = tree.parents[node]
    if isinstance(parent, ast.Call) and parent.func is node:
        node, parent = parent, tree.parents[parent]
    return isinstance(parent, ast.ClassDef) and node in parent.decorator_list


def _is_plain_decorator(names: Names, decorator: ast.expr) -> bool:
    plain = _called(decorator)
    if paths := names.paths(plain):
        return all(path in DECORATORS for path in paths)
    if isinstance(plain, ast.Attribute) and plain.attr in _PROPERTY_PARTS:
        plain = plain.value
    if not isinstance(plain, ast.Name):
        return False
    scope, bindings = names.lookup(plain)
    if scope is None:
        return plain.id in DECORATORS
    return all(binding.kind == "function" for binding in bindings)


def check_match(tree: Tree, names: Names) -> Iterator[Finding]:
    """Class patterns only of built-in values, and without attributes."""
    for pattern in tree.of(ast.MatchClass):
        named = pattern.cls
        is_value = isinstance(named, ast.Name) and named.id in MATCH_CLASSES
        if not is_value or names.lookup(named)[0] is not None:
            yield tree.finding(
                "match",
                named,
                "a class pattern that is not of a built-in value type; write `case _ if isinstance(...)`",
            )
        if pattern.kwd_attrs:
            yield tree.finding(
                "match",
                pattern,
                f"a pattern reads the attribute {shown(pattern.kwd_attrs[0])}; read it in the body",
            )


RULES: Final[tuple[Rule, ...]] = (
    check_syntax,
    check_imports,
    check_private_attributes,
    check_introspection,
    check_identifiers,
    check_names,
    check_stores,
    check_classes,
    check_match,
)
"""All but the tenth, ``source``, which comes before there is a tree."""
