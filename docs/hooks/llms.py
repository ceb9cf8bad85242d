"""mkdocs hook: `llms.txt`, an index of the pages for language models, and `llms-full.txt`, all of them as Markdown."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_SENTENCE = re.compile(r"(.+?[.:])(?:\s|$)", re.DOTALL)

_markdown: dict[str, str] = {}  # of each page, by its source
_navigation: list[Navigation] = []


def on_nav(nav: Navigation, **_: object) -> Navigation:
    """Remember the order of the pages."""
    _navigation[:] = [nav]
    return nav


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Remember the text of a page."""
    _markdown[page.file.src_uri] = markdown
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
        index.append(f"- [{page.title}]({config.site_url or ''}{page.url}): {first_sentence(text)}")
        whole.append(text.strip())
    site = Path(config.site_dir)
    (site / "llms.txt").write_text("\n".join(index) + "\n", encoding="utf-8")
    (site / "llms-full.txt").write_text("\n\n---\n\n".join(whole) + "\n", encoding="utf-8")


def first_sentence(markdown: str) -> str:
    """The first sentence of a page below its title, on one line."""
    for block in _FENCE.sub("", markdown).split("\n\n"):
        text = " ".join(block.split())
        if text and not text.startswith(("#", "|", "!", "<", "- ", "1. ")):
            found = _SENTENCE.match(text)
            return (found[1] if found else text).rstrip(":")
    return ""
