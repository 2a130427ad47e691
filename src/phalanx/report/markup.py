"""HTML that cannot forget to escape: `tag` takes text and escapes it, and only `Html` passes
through."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any
from unicodedata import category

from phalanx.core.printable import TURNS_AROUND

VOID = frozenset({"meta", "link", "br"})


class Html(str):
    """Markup that was built here, not text from a run."""


Child = str | int | None | Iterable[Any]


def tag(name: str, *children: Child, **attributes: str | int | float | bool | None) -> Html:
    """`tag("td", "a<b", class_="num")` -> `<td class="num">a&lt;b</td>`.

    None is left out, True is a bare attribute.
    """
    head = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        head += f" {label}" if value is True else f' {label}="{escape(_clean(str(value)))}"'
    if name in VOID:
        return Html(f"<{head}>")
    return Html(f"<{head}>{join_html(children)}</{name}>")


def join_html(children: Iterable[Child]) -> Html:
    """The children one after another, text escaped, iterables opened."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, str | int | float):
            parts.append(escape(_clean(str(child))))
        else:
            parts.append(join_html(child))
    return Html("".join(parts))


def _clean(text: str) -> str:
    """Without control characters and lone surrogates, which HTML forbids, and marks that turn
    the line around."""
    if text.isprintable():
        return text
    return "".join(
        "�" if c not in "\n\t" and (category(c) in ("Cc", "Cs") or c in TURNS_AROUND) else c
        for c in text
    )


def json_island(value: Any, css_class: str) -> Html:
    """Data for the page's script; no `<` survives, so that no text inside can end the element."""
    text = (
        json.dumps(value, separators=(",", ":"), allow_nan=False)
        .replace("<", "\\u003c")
        .replace("&", "\\u0026")
    )
    return Html(f'<script type="application/json" class="{css_class}">{text}</script>')


def table(
    head: Iterable[Child],
    rows: Iterable[Iterable[Child]],
    *,
    css_class: str = "",
    caption: str = "",
) -> Html:
    """A table whose cells are right-aligned from the second column on by the style sheet's `num`
    class."""
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption) if caption else None,
            tag("thead", tag("tr", [tag("th", cell, scope="col") for cell in head])),
            tag("tbody", [tag("tr", [tag("td", cell) for cell in row]) for row in rows]),
            class_=css_class or None,
        ),
        class_="scroll",
        tabindex=0,
    )
