"""Strict YAML: a text becomes plain values, and every value knows where it stood.

Pure (no file, no environment), used while the configuration is read, by whichever thread does that.
YAML's guesses are off: only ``true``, ``false``, ``null``, decimal integers (exact, of any size)
and decimal floats are not text when written without quotes; ``on``, ``012``, ``0x1f``, ``1_000``,
``12:30`` and dates stay text. Refused, with line and column: a key given twice, a key that is no
text, tags, merge keys, a second document, more than ``NODES_MAX`` values after aliases are followed
(a small text of nested aliases could otherwise stand for billions), nesting past ``DEPTH_MAX``.

Invariant: positions are those of the text, counted from 1, as editors show them.
"""

import math
import re
from typing import Any

import yaml

from blockx.errors import UsageError

NODES_MAX = 2_000_000
"""Values of one document, those behind aliases counted each time. Full: the document is refused."""
DEPTH_MAX = 100
"""Nested lists and mappings. Deeper: the document is refused."""
DIGITS_MAX = 4_300
"""Digits of one integer, Python's own limit. Longer: the document is refused."""

KeyPath = tuple[str | int, ...]
"""Keys and list positions from the root to a value."""

_PLAIN_TAG = "plain"
_TEXT_TAG = "tag:yaml.org,2002:str"
_COLLECTION_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_CONSTANTS = {"": None, "null": None, "true": True, "false": False}
_INTEGER = re.compile(r"-?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


class Document:
    """One parsed text: ``value`` is its plain value, ``at`` says where a part of it stood."""

    def __init__(self, name: str, root: yaml.Node | None) -> None:
        self._name = name
        self._root = root
        self._visited = 0
        self.value: Any = None if root is None else self._plain(root, 0)

    def at(self, path: KeyPath, *, key: bool = False) -> str:
        """``name:line:column`` of the value at ``path``, or of its key; of the nearest parent if it
        is missing."""
        node = self._root
        mark = node.start_mark if node is not None else None
        for part in path:
            child = _child(node, part)
            if child is None:
                break
            key_node, node = child
            mark = (key_node if key and key_node is not None else node).start_mark
        return self._place(mark)

    def _place(self, mark: Any) -> str:
        return self._name if mark is None else f"{self._name}:{mark.line + 1}:{mark.column + 1}"

    def _refuse(self, node: yaml.Node, what: str) -> UsageError:
        return UsageError(f"{self._place(node.start_mark)}: {what}")

    def _plain(self, node: yaml.Node, depth: int) -> Any:
        self._visited += 1
        if self._visited > NODES_MAX:
            raise self._refuse(
                node, f"more than {NODES_MAX:,} values, those behind aliases counted each time"
            )
        if depth > DEPTH_MAX:
            raise self._refuse(node, f"lists and mappings nested deeper than {DEPTH_MAX} levels")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if node.tag not in _COLLECTION_TAGS:
            raise self._refuse(node, f"the tag {node.tag!r} is not allowed; write the plain value")
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, depth + 1) for item in node.value]
        assert isinstance(node, yaml.MappingNode), "YAML has three kinds of nodes"
        return self._mapping(node, depth)

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Any]:
        lines: dict[str, int] = {}
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._scalar(key_node) if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str):
                raise self._refuse(key_node, "a key must be text; put it in quotes")
            if key == "<<" and key_node.tag == _PLAIN_TAG:
                raise self._refuse(key_node, "merge keys are not supported; repeat the entries")
            if key in values:
                raise self._refuse(
                    key_node, f"the key {key!r} was given before, in line {lines[key]}"
                )
            lines[key] = key_node.start_mark.line + 1
            values[key] = self._plain(value_node, depth + 1)
        return values

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        text: str = node.value
        if node.tag == _TEXT_TAG and node.style:
            return text
        if node.tag != _PLAIN_TAG:
            raise self._refuse(node, f"the tag {node.tag!r} is not allowed; write the plain value")
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if _INTEGER.fullmatch(text):
            if len(text.lstrip("-")) > DIGITS_MAX:
                raise self._refuse(node, f"a number of more than {DIGITS_MAX:,} digits")
            return int(text)
        if _FLOAT.fullmatch(text):
            number = float(text)
            if math.isinf(number):
                raise self._refuse(node, f"the number {text[:40]} is out of range")
            return number
        return text


def parse(text: str, name: str) -> Document:
    """Parse one document; ``name`` stands before line and column in every message.

    An empty text has the value None.

    Raises:
        UsageError: the text is no YAML, or uses what this module refuses.
    """

    class Loader(yaml.CSafeLoader):
        """Resolves nothing: every scalar without quotes and tag gets the one tag ``plain``."""

        yaml_implicit_resolvers = {None: [(_PLAIN_TAG, re.compile(""))]}  # noqa: RUF012 - yaml's own name

    try:
        root = yaml.compose(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = name if mark is None else f"{name}:{mark.line + 1}:{mark.column + 1}"
        what = " ".join(part for part in (error.problem, error.context) if part)
        raise UsageError(f"{place}: not valid YAML: {what}") from None
    except yaml.YAMLError as error:  # a ReaderError has a position in the text, no line
        position = getattr(error, "position", 0)
        line = text.count("\n", 0, position) + 1
        raise UsageError(f"{name}:{line}: not valid YAML: {str(error).splitlines()[0]}") from None
    return Document(name, root)


def _child(node: yaml.Node | None, part: str | int) -> tuple[yaml.Node | None, yaml.Node] | None:
    """(node of the key, node of the value) of one part below a node; None if there is no such
    part."""
    if isinstance(node, yaml.SequenceNode):
        found = isinstance(part, int) and part < len(node.value)
        return (None, node.value[part]) if found else None
    if isinstance(node, yaml.MappingNode):
        return next((pair for pair in node.value if pair[0].value == part), None)
    return None
