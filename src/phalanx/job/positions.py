"""Where each key and value of a TOML text stands, so that an error can name its line and column.

Values come from `tomllib`, which forgets positions; the syntax tree here remembers them. It is
built only when there is a problem to report.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Path = tuple[str | int, ...]  # ("model", "args", "widths", 2): table keys and array indices


class TextPosition(NamedTuple):
    """A place in a text, both counted from 1; columns count characters."""

    line: int
    column: int


class KeyPlace(NamedTuple):
    """The spots where a key and its value begin.

    An array element has no key, a table no value: both are the same spot then.
    """

    key: TextPosition
    value: TextPosition


def locate_toml_keys(text: str) -> dict[Path, KeyPlace]:
    """The place of every table, key, value and array element of valid TOML; of two mentions, the
    first."""
    # Only for an error's line and column: start-up does without.
    import tree_sitter
    import tree_sitter_toml

    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_toml.language()))
    # Not splitlines, which breaks at more characters than TOML and tree-sitter do.
    atlas = _PositionCollector(text.split("\n"))
    table: Path = ()
    for node in parser.parse(text.encode()).root_node.named_children:
        if node.type == "pair":
            atlas.add_key_value_pair(node, ())
        elif node.type in ("table", "table_array_element"):
            table = atlas.add_table_header(node)
            for child in node.named_children:
                if child.type == "pair":
                    atlas.add_key_value_pair(child, table)
    return atlas.places


@dataclass
class _PositionCollector:
    """Collects places while walking the syntax tree; `lengths` counts the `[[x]]` seen, which
    number themselves."""

    lines: list[str]
    places: dict[Path, KeyPlace] = field(default_factory=dict)
    lengths: dict[Path, int] = field(default_factory=dict)

    def get_text_position(self, node: Any) -> TextPosition:
        row, column_bytes = node.start_point
        # tree-sitter counts bytes, and editors count characters.
        before = self.lines[row].encode()[:column_bytes].decode(errors="ignore")
        return TextPosition(row + 1, len(before) + 1)

    def add_key_place(self, path: Path, key: Any, value: Any) -> None:
        self.places.setdefault(
            path, KeyPlace(self.get_text_position(key), self.get_text_position(value))
        )

    def add_table_header(self, node: Any) -> Path:
        """`[a.b]` or `[[a.b]]`; returns the path that the pairs below it extend."""
        path: Path = ()
        keys = _iterate_key_names(node.named_children[0])
        for number, (name, key) in enumerate(keys):
            path = (*path, name)
            self.add_key_place(path, key, key)
            if number == len(keys) - 1 and node.type == "table_array_element":
                self.lengths[path] = self.lengths.get(path, 0) + 1
            if path in self.lengths:
                # Inside of [[x]] keys belong to the element that began last.
                path = (*path, self.lengths[path] - 1)
                self.add_key_place(path, key, key)
        return path

    def add_key_value_pair(self, node: Any, inside: Path) -> None:
        key_node, value = node.named_children[:2]  # a comment may follow
        path = inside
        for name, key in _iterate_key_names(key_node):
            path = (*path, name)
            self.add_key_place(path, key, value)
        self.add_nested_value(value, path)

    def add_nested_value(self, node: Any, path: Path) -> None:
        if node.type == "inline_table":
            for child in node.named_children:
                if child.type == "pair":
                    self.add_key_value_pair(child, path)
        elif node.type == "array":
            elements = [child for child in node.named_children if child.type != "comment"]
            for index, element in enumerate(elements):
                self.add_key_place((*path, index), element, element)
                self.add_nested_value(element, (*path, index))


def _iterate_key_names(node: Any) -> list[tuple[str, Any]]:
    """The names in a key, each with its own node. Depth first: a dotted key nests to the left."""
    if node.type == "dotted_key":
        pairs = []
        for child in node.named_children:
            pairs += _iterate_key_names(child)
        return pairs
    name: str = node.text.decode()
    if node.type == "quoted_key":
        (name,) = tomllib.loads(f"{name} = 0")  # resolves the escapes
    return [(name, node)]
