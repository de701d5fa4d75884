"""Pages for browsers: one self-contained HTML file, made of escaped text and inline SVG.

Enters: titles, facts, tables, counts. Leaves: a page that needs no network, no script and no
font, follows the reader's light or dark setting, fits a phone, and can be printed. Costs: string work.

`Html` is text that is already markup; every other string is escaped when it is added, so that a
column called `<script>` is shown, never run. As a second protection, a content policy in the page
forbids scripts and requests. Curves over time are in `stoker.page.charts`.
"""

from __future__ import annotations

import html as _html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stoker.address import masked
from stoker.display import UNPRINTABLE
from stoker.ownership import SIGNATURE
from stoker.page._style import STYLE

MAX_TEXT = 160
# Control characters and lone surrogates are not allowed in HTML; lone surrogates cannot be encoded as UTF-8 either.
_UNPRINTABLE = re.compile(rf"(?![\t\n\r])[{UNPRINTABLE}\ufffe\uffff]")
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Html(str):
    """Markup that is already escaped."""

    __slots__ = ()


@dataclass(frozen=True)
class Section:
    """A part of a page. Its `key`, made of letters, digits and dashes, is its anchor."""

    key: str
    title: str
    body: Html


def escape(text: str) -> Html:
    """Return `text` as markup, with passwords in URLs masked; `Html` is returned unchanged."""
    if isinstance(text, Html):
        return text
    return Html(_html.escape(_UNPRINTABLE.sub("\ufffd", masked(text)), quote=True))


def shorten(text: str, limit: int = MAX_TEXT) -> str:
    """Return `text` with passwords in URLs masked; beyond `limit`, its beginning and how many characters follow."""
    if isinstance(text, Html):
        return text
    text = masked(text)  # before cutting: in half a URL the end of the password is unknown
    if len(text) <= limit:
        return text
    return f"{text[:limit]}… (+{len(text) - limit:,} characters)"


def join(parts: Iterable[str]) -> Html:
    """Return the concatenated parts, each escaped unless it is `Html`."""
    return Html("".join(escape(part) for part in parts))


def name(text: str) -> Html:
    """Return a name from the user's data: shortened, and isolated so that right-to-left text affects no other text."""
    return Html(f"<bdi>{escape(shorten(text))}</bdi>")


def code(text: str) -> Html:
    """Return code or a command as markup, shortened to 600 characters."""
    return Html(f"<code>{escape(shorten(text, 600))}</code>")


def instruction(text: str) -> Html:
    """Return prose, shortened to 600 characters, in which options with their values are set as code."""
    text = shorten(text, 600)
    parts = re.split(r"""(--[a-z-]+ (?:'[^']*'|"[^"]*"|[^\s'"])+(?<![.,;]))""", text)
    return join(code(part) if index % 2 else part for index, part in enumerate(parts))


def paragraph(text: str, *, quiet: bool = False) -> Html:
    """Return a paragraph; a `quiet` one is grey."""
    return Html(f"<p{' class=quiet' if quiet else ''}>{escape(text)}</p>")


def bullets(lines: Iterable[str], most: int = 400) -> Html:
    """Return lines as a list, each cut to `most` characters."""
    items = "".join(f"<li>{escape(shorten(line, most))}</li>" for line in lines)
    return Html(f"<ul>{items}</ul>")


def legend(colours: Iterable[tuple[str, str]]) -> Html:
    """Return a legend of (name, colour in CSS) pairs."""
    items = "".join(
        f'<span><i style="background:{colour}"></i>{escape(name)}</span>'
        for name, colour in colours
    )
    return Html(f'<p class="colours">{items}</p>')


def badge(text: str, kind: str = "plain") -> Html:
    """Return a small label; kinds are "refuse", "warn", "note", "good" and "plain"."""
    return Html(f'<span class="badge {escape(kind)}">{escape(text)}</span>')


def details(summary: str, body: Html) -> Html:
    """Return `body` folded away under `summary` until the reader opens it."""
    return Html(f"<details><summary>{escape(summary)}</summary>{body}</details>")


def facts(items: Mapping[str, str]) -> Html:
    """Return names and values as a list."""
    pairs = []
    for key, value in items.items():
        # A long value, such as a path, would break in a column of 150 px.
        style = "" if isinstance(value, Html) or len(value) <= 18 else " class=long"
        pairs.append(f"<div{style}><dt>{escape(key)}</dt><dd>{name(value)}</dd></div>")
    return Html(f"<dl>{''.join(pairs)}</dl>")


def table(
    header: Sequence[str],  # titles of the columns
    rows: Iterable[Sequence[str]],  # cells, escaped unless they are markup
    *,
    key: str,  # the table's id
    numeric: Iterable[int] = (),  # columns to align to the right
    labels: Iterable[int] = (),  # columns whose text is never broken
    # columns of prose; a table with such columns shows each row as a block on a phone, with the column titles beside
    # numbers
    wide: Iterable[int] = (),
    # save width on a phone, where the last columns matter as much as the first
    tight: bool = False,
) -> Html:
    """Return a table. A table that is too wide scrolls inside its own box."""
    classes = dict.fromkeys(numeric, "number") | dict.fromkeys(labels, "label")
    prose = dict.fromkeys(wide, "wide")
    classes |= prose
    sides = [f' class="{classes[i]}"' if i in classes else "" for i in range(len(header))]
    head = "".join(
        f'<th scope="col"{side}>{escape(text)}</th>'
        for side, text in zip(sides, header, strict=True)
    )
    heads = [
        f' data-head="{escape(text)}"' if prose and classes.get(i) == "number" else ""
        for i, text in enumerate(header)
    ]
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{side}{named}>{escape(cell)}</td>"
            for side, named, cell in zip(sides, heads, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    style = " class=stack" if prose else " class=tight" if tight else ""
    return Html(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(header[0])} table">'
        f'<table id="{escape(key)}"{style}><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def figures_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, key: str) -> Html:
    """Return a table of names, which are never broken, and numbers; it saves width on a phone."""
    shown = [header[0], *(shorten(text, 60) for text in header[1:])]
    numeric = range(1, len(header))
    return table(shown, rows, key=key, numeric=numeric, labels=(0,), tight=True)


def figure(title: Html, picture: Html, caption: Html) -> Html:
    """Return a picture with its title above and its caption below."""
    return Html(
        f'<figure><div class="name">{title}</div>{picture}<figcaption>{caption}</figcaption></figure>'
    )


def grid(figures: Iterable[Html]) -> Html:
    """Return figures side by side, as many as fit into the width."""
    return Html(f'<div class="grid">{"".join(figures)}</div>')


def svg_histogram(
    counts: Sequence[int],  # height of each bar
    edges: Sequence[float],  # one more than bars; used in the description for screen readers
    title: str,  # what is counted
    *,
    key: str,  # the picture's id, unique on the page
    marked: Iterable[int] = (),  # bars to draw in the warning colour
    height: int = 56,  # in pixels
) -> Html:
    """Return a histogram as inline SVG, scaled to the width of its box."""
    top = max(max(counts, default=0), 1)
    special = set(marked)
    plain = [0 if index in special else count for index, count in enumerate(counts)]
    warned = [count if index in special else 0 for index, count in enumerate(counts)]
    total = sum(counts)
    told = (
        f"{total:,} values from {format_number(edges[0])} to {format_number(edges[-1])} in "
        f"{len(counts)} bars; the highest has {top:,}."
        if total
        else "No values."
    )
    return Html(
        f'<svg id="{escape(key)}" role="img" aria-labelledby="{escape(key)}-t {escape(key)}-d" '
        f'viewBox="0 0 {max(len(counts), 1) * 4} {height}" preserveAspectRatio="none" '
        f'style="height:{height}px">'
        f'<title id="{escape(key)}-t">{escape(shorten(title))}</title>'
        f'<desc id="{escape(key)}-d">{escape(told)}</desc>'
        f"{_bars(plain, top, height, 'bar', 1.5)}{_bars(warned, top, height, 'bar marked', 8)}"
        f'<path class="base" d="M0 {height - 0.5}h{max(len(counts), 1) * 4}"/></svg>'
    )


def _bars(counts: Sequence[int], top: int, height: int, style: str, least: float) -> str:
    """Return all bars as one path: 32 rectangles would be seven times the bytes."""
    steps = []
    for index, count in enumerate(counts):
        if count:
            # A bar of one value must be visible beside one of a million; a marked bar must be noticed.
            tall = max(least, count / top * (height - 2))
            steps.append(f"M{index * 4} {height}v-{tall:.1f}h3.4v{tall:.1f}z")
    return f'<path class="{style}" d="{"".join(steps)}"/>' if steps else ""


def format_number(value: float | None) -> str:
    """Return a number as text: "1,234", "0.0312", "4.96×10⁸"; "n/a" if it is None or not finite."""
    if value is None or not math.isfinite(value):
        return "n/a"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPT)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def html(title: str, sections: Sequence[Section], *, subtitle: str = "") -> str:
    """Return the page as text, to be written as UTF-8."""
    links = "".join(
        f'<a href="#{escape(section.key)}">{escape(section.title)}</a>' for section in sections
    )
    body = "".join(
        f'<section id="{escape(section.key)}"><h2>{escape(section.title)}</h2>'
        f"{section.body}</section>"
        for section in sections
    )
    under = f'<p class="quiet">{escape(shorten(subtitle, 400))}</p>' if subtitle else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<meta name="generator" content="{SIGNATURE}">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">"
        f"<title>{escape(shorten(title))}</title><style>{STYLE}</style></head>"
        f"<body><header><h1>{name(title)}</h1>{under}<nav>{links}</nav></header>"
        f"<main>{body}</main></body></html>\n"
    )
