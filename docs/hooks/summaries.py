"""mkdocs hook: the title and the description of each page, for search engines and language models.

The title is the heading of the page, and the description its first sentences. Both are in the head of the page. The
index of all pages, for language models, is `llms.txt`, and all pages as Markdown are `llms-full.txt`.
"""

import html
import re
import textwrap
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_SENTENCE = re.compile(r"(?<=[.:!?])\s+(?=[A-Z`\[*])")
_HEADING = re.compile(r"^# +(.+?)\s*$", re.MULTILINE)
_LINK = re.compile(r"!?\[(?P<text>[^\]]*)\]\([^)]*\)")
_MARKS = re.compile(r"<[^>]+>|[`*]")

MAX_DESCRIPTION = 160  # characters: search engines cut what is longer
# Factors in a search, by the beginning of a page's path: the reference has each option once, other pages mention it
# often; the changelog is behind the pages that explain what it mentions.
_BOOSTS = {"reference/": 3, "changelog": 0.1}

_markdown: dict[str, str] = {}  # of each page, by its source
_navigation: list[Navigation] = []


def on_nav(nav: Navigation, **_: object) -> Navigation:
    """Remember the order of the pages."""
    _navigation[:] = [nav]
    return nav


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Remember the text of a page, and set its title, its description and its place in the results of a search."""
    _markdown[page.file.src_uri] = markdown
    page.meta.setdefault("title", title(markdown))
    page.meta.setdefault("description", description(markdown))
    for start, boost in _BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta.setdefault("search", {"boost": boost})
    return markdown


def on_post_build(config: MkDocsConfig, **_: object) -> None:
    """Write both files into the site."""
    index, whole = [f"# {config.site_name}\n", f"> {config.site_description}\n"], list[str]()
    section = None
    for page in _navigation[0].pages:
        text = _markdown[page.file.src_uri]
        if page.parent is not section:
            section = page.parent
            index.append(f"\n## {section.title}\n" if section is not None else "")
        index.append(f"- [{page.title}]({config.site_url or ''}{page.url}): {description(text)}")
        whole.append(text.strip())
    site = Path(config.site_dir)
    (site / "llms.txt").write_text("\n".join(index) + "\n", encoding="utf-8")
    (site / "llms-full.txt").write_text("\n\n---\n\n".join(whole) + "\n", encoding="utf-8")


def title(markdown: str) -> str:
    """The heading of a page, without markup; empty if it has none."""
    found = _HEADING.search(_FENCE.sub("", markdown))
    return plain(found[1]) if found else ""


def description(markdown: str) -> str:
    """The first sentence below the title, and those that follow it in the paragraph while MAX_DESCRIPTION permits.

    A first sentence that is longer is cut.
    """
    for block in _FENCE.sub("", markdown).split("\n\n"):
        text = " ".join(block.split())
        if text and not text.startswith(("#", "|", "!", "<", "- ", "1. ")):
            first, *more = map(plain, _SENTENCE.split(text))
            for sentence in more:
                if len(first) + 1 + len(sentence) > MAX_DESCRIPTION or sentence.endswith(":"):
                    break
                first = f"{first} {sentence}"
            return textwrap.shorten(first.rstrip(":"), MAX_DESCRIPTION, placeholder=" …")
    return ""


def plain(markdown: str) -> str:
    """Markdown of a line as text: links as their texts, without marks of code and emphasis."""
    return html.unescape(_MARKS.sub("", _LINK.sub(r"\g<text>", markdown))).strip()
