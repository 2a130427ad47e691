"""HTML that cannot forget to escape: `tag` takes text and escapes it, and only `Html` passes
through."""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any
from unicodedata import category

from phalanx.core.printable import BIDIRECTIONAL_CONTROL_CHARACTERS

VOID_ELEMENTS = frozenset({"meta", "link", "br", "input"})


class Html(str):
    """Markup that was built here, not text from a run."""


Child = str | int | None | Iterable[Any]


def build_tag(name: str, *children: Child, **attributes: str | int | float | bool | None) -> Html:
    """`tag("td", "a<b", class_="num")` -> `<td class="num">a&lt;b</td>`.

    None is left out, True is a bare attribute.
    """
    head = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        # class_ and aria_label stand for class and aria-label, which Python cannot name.
        label = key.rstrip("_").replace("_", "-")
        head += (
            f" {label}"
            if value is True
            else f' {label}="{escape(_remove_forbidden_characters(str(value)))}"'
        )
    if name in VOID_ELEMENTS:
        return Html(f"<{head}>")
    return Html(f"<{head}>{join_html(children)}</{name}>")


def build_note(text: str) -> Html | None:
    """A paragraph of small text; None without text."""
    if not text:
        return None
    return build_tag("p", text, class_="note")


def build_small_text(text: str) -> Html | None:
    """Small text beside a value; None without text."""
    if not text:
        return None
    return build_tag("small", text)


def join_html(children: Iterable[Child]) -> Html:
    """The children one after another, text escaped, iterables opened."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        # Before str, which it is, too: text is escaped, markup is not.
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, str | int | float):
            parts.append(escape(_remove_forbidden_characters(str(child))))
        else:
            parts.append(join_html(child))
    return Html("".join(parts))


def _remove_forbidden_characters(text: str) -> str:
    """Without control characters and lone surrogates, which HTML forbids, and marks that turn
    the line around."""
    # Most text is, and then no letter has to be looked at: none of what is taken out is printable.
    if text.isprintable():
        return text
    return "".join(map(_replace_forbidden_character, text))


def _replace_forbidden_character(letter: str) -> str:
    if letter in "\n\t":
        return letter
    if category(letter) in ("Cc", "Cs") or letter in BIDIRECTIONAL_CONTROL_CHARACTERS:
        return "�"
    return letter


def build_json_script(value: Any, css_class: str) -> Html:
    """Data for the page's script; no `<` survives, so that no text inside can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    text = text.replace("<", "\\u003c").replace("&", "\\u0026")
    return Html(f'<script type="application/json" class="{css_class}">{text}</script>')


def build_table(
    head: Iterable[Child],
    rows: Iterable[Iterable[Child]],
    *,
    css_class: str = "",
    caption: str = "",
    label: str = "",
) -> Html:
    """A table whose cells are right-aligned from the second column on by the style sheet's `num`
    class.

    `label`: its name for screen readers; without it the names of its columns, or the caption.
    """
    head = list(head)
    parts = []
    if caption:
        parts.append(build_tag("caption", caption))
    parts.append(
        build_tag("thead", build_tag("tr", [build_tag("th", cell, scope="col") for cell in head]))
    )
    parts.append(build_tag("tbody", [_build_table_row(row) for row in rows]))
    name = None
    if not caption:
        named = [cell for cell in head if isinstance(cell, str) and not isinstance(cell, Html)]
        name = label or f"By {', '.join(filter(None, named))}"
    table = build_tag("table", parts, class_=css_class or None, aria_label=name)
    # A wide table scrolls in its own box, and with a tab index the arrow keys can scroll it, too.
    return build_tag("div", table, class_="scroll", tabindex=0)


def _build_table_row(cells: Iterable[Child]) -> Html:
    return build_tag("tr", [build_tag("td", cell) for cell in cells])
