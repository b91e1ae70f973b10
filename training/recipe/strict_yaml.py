"""YAML read strictly into plain nodes that remember their lines.

Owns syntax: duplicate keys (refused at every depth, with both lines), merge keys, aliases, tags (refused). It decides
no type: a scalar stays text until a schema says what it is (`training.recipe.reading`), so `no`, `010` and `12:30`
survive. Built on PyYAML's composer with no implicit resolver and no constructor. Source: YAML 1.1 and its merge-key
type.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import yaml

from training.core.errors import TrainyardError, UserError

_STRING_TAG = "tag:yaml.org,2002:str"
_MAX_NODES = 20_000


@dataclass(frozen=True)
class Scalar:
    """A scalar as written; `plain` is False where it was quoted or a block."""

    text: str
    plain: bool
    line: int


@dataclass(frozen=True)
class Items:
    """A sequence."""

    items: tuple[Node, ...]
    line: int


@dataclass(frozen=True)
class Mapping:
    """A mapping; `lines` holds the line of each key."""

    entries: dict[str, Node]
    lines: dict[str, int]
    line: int


Node = Scalar | Items | Mapping


class _Loader(
    yaml.reader.Reader, yaml.scanner.Scanner, yaml.parser.Parser, yaml.composer.Composer, yaml.resolver.BaseResolver
):
    """PyYAML up to its node tree, and no further."""

    def __init__(self, stream: str | bytes):
        yaml.reader.Reader.__init__(self, stream)
        yaml.scanner.Scanner.__init__(self)
        yaml.parser.Parser.__init__(self)
        yaml.composer.Composer.__init__(self)
        yaml.resolver.BaseResolver.__init__(self)


def parse(data: str | bytes, source: str) -> tuple[Node | None, list[TrainyardError]]:
    """Parse one YAML document into nodes, with every structural problem found.

    `source` is the file's name in messages. The node is None where the document is empty or not YAML at all.
    """
    try:
        root = _Loader(data).get_single_node()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        return None, [UserError("not YAML", where=f"{source}:{line}", found=error.problem)]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return None, [UserError("not YAML", where=source, found=str(error).splitlines()[0], expected="UTF-8 text")]
    except RecursionError:
        return None, [UserError("nested too deeply", where=source)]
    if root is None:
        return None, []
    walk = _Walk(source)
    return walk.node(root), walk.problems


@dataclass
class _Walk:
    """One pass over PyYAML's nodes; `open` holds the ids of the containers being read, to see a cycle."""

    source: str
    problems: list[TrainyardError] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    seen: int = 0

    def node(self, node: yaml.Node) -> Node:
        line = node.start_mark.line + 1
        self.seen += 1
        if id(node) in self.open or self.seen > _MAX_NODES:
            raise UserError("an alias that contains itself or grows without end", where=f"{self.source}:{line}")
        if isinstance(node, yaml.ScalarNode):
            if node.tag != _STRING_TAG:
                self._problem("tags are not used in recipes", line, node.tag, "the plain value")
            return Scalar(node.value, node.style is None, line)
        self.open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return Items(tuple(self.node(item) for item in node.value), line)
            return self._mapping(node, line)
        finally:
            self.open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, line: int) -> Mapping:
        own, lines, merged = {}, {}, []
        for key, value in node.value:
            key_line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self._problem("a key that is no plain word", key_line)
            elif key.value == "<<" and key.style is None:
                merged += self._merged(value)
            elif key.value in own:
                found = f"first on line {lines[key.value]}, again on line {key_line}"
                self._problem(f"duplicate key {key.value!r}", key_line, found, "each key once")
            else:
                own[key.value], lines[key.value] = self.node(value), key_line
        for mapping in merged:
            for key in mapping.entries.keys() - own.keys():
                own[key], lines[key] = mapping.entries[key], mapping.lines[key]
        return Mapping(own, lines, line)

    def _merged(self, value: yaml.Node) -> list[Mapping]:
        read = self.node(value)
        mappings = list(read.items) if isinstance(read, Items) else [read]
        if not all(isinstance(mapping, Mapping) for mapping in mappings):
            self._problem("'<<' merges mappings only", read.line, expected="an alias of a mapping, or a list of them")
        return [mapping for mapping in mappings if isinstance(mapping, Mapping)]

    def _problem(self, what: str, line: int, found: object = None, expected: object = None) -> None:
        self.problems.append(UserError(what, where=f"{self.source}:{line}", found=found, expected=expected))
