"""Every link of the pages leads somewhere: to a file of the repository, and to a heading there."""

import html
import re
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from tests.conftest import ROOT
from tests.docs.pages import pages, without_code

_LINK = re.compile(r"(?<!!)\[[^\[\]]*\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What a link may name in a page: slugs of its headings, and of the commands that the reference's marks become."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    names = {slugify(html.unescape(heading.replace("`", "")), "-") for heading in _HEADING.findall(text)}
    if "<!-- options: commands -->" in text:
        from tests.docs.test_reference import reference

        names |= set(reference.commands())
    return names


@pytest.mark.parametrize("page", [*pages(), ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in _LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}, which is not there"
        assert there.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(there), f"{page.name}: {target} has no such heading"


def test_every_page_is_reached_from_the_readme():
    linked = {
        (ROOT / target.partition("#")[0]).resolve()
        for target in _LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
        if "://" not in target
    }
    missing = [page.name for page in pages() if page.is_relative_to(ROOT / "docs") and page.resolve() not in linked]
    assert missing in ([], ["index.md"])
