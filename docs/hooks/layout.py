"""mkdocs hook: tables that can be read on phones, pictures for light and dark pages, and tabs.

Tables of texts become one block per row on narrow screens, where each cell is preceded by the heading of its column.
Tables of numbers scroll, and their first column stays. Names in their headings and first columns break behind `_` and
`=`, not within a word. `docs/assets/site.css` does the rest.

An image `NAME.webp` with a `NAME-dark.webp` beside it is replaced by both, of which the page shows one, and by
`NAME-phone.webp` on narrow screens if there is one. An image leads to itself in full size.

Between `<!-- tabs -->` and `<!-- end tabs -->`, a line `**Title**` begins a tab. Elsewhere, as on GitHub, the same text
is read from top to bottom.
"""

import posixpath
import re
import textwrap

from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_TABLE = re.compile(r"<table>(?P<content>.*?)</table>", re.DOTALL)
_ROW = re.compile(r"<tr>(?P<content>.*?)</tr>", re.DOTALL)
_HEADING = re.compile(r"<th\b[^>]*>(?P<text>.*?)</th>", re.DOTALL)
_CELL = re.compile(r"<td(?P<attributes>[^>]*)>(?P<text>.*?)</td>", re.DOTALL)
_TAG = re.compile(r"<[^>]+>")
_IMAGE = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?P<source>[^":]+)"[^>]*/?>')
_TABS = re.compile(r"^<!-- tabs -->\n(?P<content>.*?)^<!-- end tabs -->$", re.MULTILINE | re.DOTALL)
_TAB = re.compile(r"^\*\*(?P<title>[^*\n]+)\*\*\n(?P<content>.*?)(?=^\*\*[^*\n]+\*\*$|\Z)", re.MULTILINE | re.DOTALL)

_CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
_JOINT = re.compile(r"(?<=[_=./,:])(?=[\w\[{])|(?<=\w)(?=[\[({])")  # where a name of code may break
_RANGE = re.compile(r"\((\S+) to (\S+)\)")

LONG_TEXT = 16  # characters: cells of numbers and short names have fewer on average
LONG_CELL = 24  # characters: such a cell of a table of numbers is a text, and breaks


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """The page with tabs in the syntax of pymdownx.tabbed; beside the first page there is no list of pages."""
    if page.is_homepage:
        page.meta.setdefault("hide", ["navigation"])
    return _TABS.sub(lambda tabs: _TAB.sub(_tab, tabs["content"].strip() + "\n"), markdown)


def _tab(match: re.Match[str]) -> str:
    return f'=== "{match["title"]}"\n{textwrap.indent(match["content"], "    ")}'


def on_page_content(content: str, page: Page, files: Files, **_: object) -> str:
    """The page with tables and images prepared for the style sheet."""

    def image(match: re.Match[str]) -> str:
        return _image(match["alt"], match["source"], page, files)

    return _IMAGE.sub(image, _TABLE.sub(lambda match: _table(match["content"]), content))


def _table(content: str) -> str:
    headings = [_TAG.sub("", text).strip() for text in _HEADING.findall(content)]
    if len(headings) == 2:
        headings = []  # a name and its explanation need no labels
    cells = [_TAG.sub("", match["text"]) for match in _CELL.finditer(content)]
    if not cells or sum(map(len, cells)) < LONG_TEXT * len(cells):
        rows = _ROW.sub(lambda row: f"<tr>{_breakable(row['content'])}</tr>", content)
        return f"<table data-layout='scroll'>{rows}</table>"
    rows = _ROW.sub(lambda row: f"<tr>{_labelled(row['content'], headings)}</tr>", content)
    return f"<table data-layout='stack'>{rows}</table>"


def _breakable(row: str) -> str:
    """The row of a table that scrolls, with names and texts that break at their joints, and intervals that do not."""

    def joints(cell: str) -> str:
        return _CODE.sub(lambda code: _JOINT.sub("<wbr>", code[0]), cell)

    cells = 0

    def cell(match: re.Match[str]) -> str:
        nonlocal cells
        cells += 1
        text = _RANGE.sub("(\\1&nbsp;to&nbsp;\\2)", match["text"])
        if cells > 1 and len(_TAG.sub("", text)) <= LONG_CELL:
            return f"<td{match['attributes']}>{text}</td>"
        return f'<td{match["attributes"]} class="breaks">{joints(text)}</td>'

    return _CELL.sub(cell, _HEADING.sub(lambda heading: joints(heading[0]), row))


def _labelled(row: str, headings: list[str]) -> str:
    labels = iter(headings)

    def cell(match: re.Match[str]) -> str:
        label = next(labels, "")
        attribute = f' data-label="{label.replace(chr(34), "&quot;")}"' if label else ""
        return f"<td{match['attributes']}{attribute}>{match['text']}</td>"

    return _CELL.sub(cell, row)


def _image(alt: str, source: str, page: Page, files: Files) -> str:
    """An image for each color scheme, with that for narrow screens, in a link to the file."""
    stem, extension = posixpath.splitext(source)
    kind = "terminal" if extension == ".svg" else "screen"

    def exists(path: str) -> bool:
        return (
            files.get_file_from_path(posixpath.normpath(posixpath.join(posixpath.dirname(page.url), path))) is not None
        )

    parts = []
    for scheme, suffix in ("only-light", ""), ("only-dark", "-dark"):
        path, narrow = f"{stem}{suffix}{extension}", f"{stem}-phone{suffix}{extension}"
        if not exists(path):
            continue
        image = f'<img alt="{alt}" src="{path}" loading="lazy">'
        if exists(narrow):
            image = f'<picture><source media="(max-width: 44.984375em)" srcset="{narrow}">{image}</picture>'
        parts.append(f'<a class="picture {kind} {scheme}" href="{path}">{image}</a>')
    if len(parts) == 1:
        return parts[0].replace(" only-light", "")
    return "".join(parts)
