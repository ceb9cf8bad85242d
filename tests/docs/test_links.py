"""Every link in the pages has a target: a file of the repository, and a heading in it."""

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
    """The slugs of the headings of a page."""
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    return {slugify(html.unescape(heading.replace("`", "")), "-") for heading in _HEADING.findall(text)}


CHANGELOGS = [ROOT / "CHANGELOG.md", ROOT / "CHANGELOG-0.1.md"]


@pytest.mark.parametrize("page", [*pages(), *CHANGELOGS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page):
    for target in _LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        target_page = (page.parent / path).resolve() if path else page
        assert target_page.exists(), f"{page.name} links to {target}, which does not exist"
        assert target_page.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(target_page), f"{page.name}: {target} has no such heading"


def test_images_exist_are_small_and_have_texts():
    """Markdown's images, and the <picture> of a page that GitHub shows; each dark image belongs to a light one."""
    used = set()
    for page in pages():
        text = without_code(page.read_text(encoding="utf-8"))
        sources = [target for alt, target in re.findall(r"!\[([^\]]*)\]\(([^()\s]+)\)", text) if len(alt) > 20]
        assert len(sources) == text.count("!["), f"{page.name}: an image without a text"
        for tag in re.findall(r"<img\b[^>]*>", text):
            assert len(re.search(r'alt="([^"]*)"', tag)[1]) > 20, tag
        sources += re.findall(r'<(?:img|source)\b[^>]*?src(?:set)?="([^"]+)"', text)
        used |= {(page.parent / source).resolve() for source in sources}
    images = set((ROOT / "docs" / "assets" / "images").iterdir())
    assert used <= images
    bases = {path.with_stem(path.stem.removesuffix("-dark").removesuffix("-phone")) for path in images}
    assert bases <= used, "no page shows an image"
    assert {path.with_stem(path.stem + "-dark") for path in images if not path.stem.endswith("-dark")} <= images
    sizes = {path.name: path.stat().st_size for path in images}
    assert {name for name, size in sizes.items() if size > 200_000} == set()
    assert sum(sizes.values()) < 1_750_000


def test_the_readme_links_every_page():
    linked = {
        (ROOT / target.partition("#")[0]).resolve()
        for target in _LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
        if "://" not in target
    }
    missing = [page.name for page in pages() if page.is_relative_to(ROOT / "docs") and page.resolve() not in linked]
    assert missing in ([], ["index.md"])


def test_files_that_contributing_names_exist():
    """Paths in the pages for contributors, relative to the package or to the repository."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:py|yaml))`", text))
    paths -= {"kinds/KIND/", "kinds/KIND/model.py", "recipes/NAME.yaml", "benchmarks/gpu/DEVICE.md", "site/index.html"}
    paths -= {"options.py", "source.py", "files.py", "data.py", "model.py", "score.py"}  # of a command, or of a kind
    assert len(paths) > 100
    missing = [path for path in paths if not any((root / path).exists() for root in (ROOT / "embedtrain", ROOT))]
    assert not missing, f"CONTRIBUTING.md names files that do not exist: {sorted(missing)}"
