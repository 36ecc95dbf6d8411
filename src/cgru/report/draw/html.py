"""Small pieces of HTML: every text is escaped here and nowhere else, so a prompt or a path can hold anything."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

VOID = ("img", "input", "meta", "br")


@dataclass(frozen=True)
class Html:
    """Text that is HTML already; anything else is escaped when it is put into an element."""

    text: str


Content = Html | str | int | None
NONE = Html("")
NOT_RUN = Html('<span class="none">not run</span>')
"""A table cell without a measurement; it is neither blank nor zero."""


def tag(name: str, /, *inside: Content, **attributes: object) -> Html:
    """One element. `class_` and `for_` lose their underscore, others' become a hyphen; None and False leave one out."""
    written = "".join(_attribute(key, value) for key, value in attributes.items() if _is_given(value))
    if name in VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{joined(inside).text}</{name}>")


def joined(parts: Iterable[Content], between: str = "") -> Html:
    """The parts one after the other; None is nothing."""
    return Html(between.join(_text(part) for part in parts if part is not None))


def hole(*words: Content) -> Html:
    """A marked box that says what is missing on the page and why."""
    return tag("p", tag("strong", "Missing. "), *words, class_="hole")


def note(*words: Content) -> Html:
    """A small line that explains."""
    return tag("p", *words, class_="note")


def section(title: str, lead: str, *parts: Content, anchor: str) -> Html:
    """A heading, one sentence in plain language, then the content."""
    heading = tag("h3", title, id=anchor)
    return tag("section", heading, tag("p", lead, class_="lead"), *parts, aria_labelledby=anchor)


def table(head: Sequence[Content], rows: Iterable[Sequence[Content]], caption: str, classes: str = "") -> Html:
    """A table that scrolls by itself on a narrow screen; the first cell of a row is its heading."""
    top = tag("tr", *(tag("th", cell, scope="col") for cell in head))
    body = joined(_row(row) for row in rows)
    inner = tag("table", tag("caption", caption), tag("thead", top), tag("tbody", body), class_=classes or None)
    return tag("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption)


def figure(svg: str, alt: str, caption: str = "") -> Html:
    """An SVG embedded as a separate picture, so that its styles and ids cannot affect the page."""
    source = "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()
    words = tag("figcaption", caption) if caption else None
    return tag("figure", tag("img", src=source, alt=alt), words)


def tabs(name: str, panels: Sequence[tuple[str, Html]]) -> Html:
    """Tabs of which one is visible; without JavaScript all of them are."""
    buttons = [
        tag(
            "button",
            label,
            type="button",
            role="tab",
            id=f"{name}-tab-{i}",
            aria_controls=f"{name}-panel-{i}",
            aria_selected="true" if i == 0 else "false",
            tabindex=None if i == 0 else "-1",
        )
        for i, (label, _) in enumerate(panels)
    ]
    bodies = [
        tag("div", content, role="tabpanel", id=f"{name}-panel-{i}", aria_labelledby=f"{name}-tab-{i}")
        for i, (_, content) in enumerate(panels)
    ]
    return tag("div", tag("div", *buttons, role="tablist"), *bodies, class_="tabs")


def said(words: str) -> Html:
    """A cell of words in a table of numbers: on the left, small."""
    return tag("span", words, class_="recipe")


def command(text: str) -> Html:
    """A line for a terminal, with a button that copies it."""
    button = tag("button", "Copy", type="button", class_="copy", aria_label=f"Copy: {text}")
    return tag("div", tag("code", text), button, class_="command")


def percent(value: float | None) -> str:
    """One decimal, as the terminal shows it."""
    return "—" if value is None else f"{100 * value:.1f} %"


def shown(found: Mapping[str, Any], key: str = "value") -> str:
    """A measurement's value or bound: percent for shares, else three digits."""
    value = found.get(key)
    if value is None:
        return "—"
    return percent(value) if found.get("unit") == "proportion" else f"{value:.3g}"


def interval(found: Mapping[str, Any]) -> str:
    """The 95 % interval; a dash where there is none."""
    if found.get("low") is None or found.get("high") is None:
        return "—"
    return f"{shown(found, 'low')} – {shown(found, 'high')}"


def _row(cells: Sequence[Content]) -> Html:
    first, *others = cells
    return tag("tr", tag("th", first, scope="row"), *(tag("td", cell) for cell in others))


def _is_given(value: object) -> bool:
    return value is not None and value is not False  # 0 is a value


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escape(str(value))}"'


def _text(part: Content) -> str:
    return part.text if isinstance(part, Html) else escape(str(part))
