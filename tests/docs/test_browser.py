"""The site in Chromium, opened from the disk: it fits desktops and phones, and its colors follow the system."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import Browser, chromium
from tests.conftest import ROOT

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine (apt-get install chromium)"),
]

# What a reader of the page sees. `hidden_code`: blocks of code of which the copy button covers a part, also when
# they are scrolled. `cut`: texts that are wider than a container that does not scroll. `squeezed`: names that a narrow
# column breaks into pieces of a few letters. `cut_commands`: commands and rows that a reader has to scroll to the side.
MEASURE = """(async () => {
  await new Promise(done => setTimeout(done, 100));
  const all = (selector) => [...document.querySelectorAll(selector)];
  const box = (element) => element.getBoundingClientRect();
  const meets = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  return {
    width: document.documentElement.scrollWidth,
    background: getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number),
    heading: document.querySelector("h1").textContent,
    hidden_code: all("pre:has(.md-code__button)").filter(
      (block) => meets(box(block.querySelector("code")), box(block.querySelector(".md-code__button")))).length,
    wide_tables: all(".md-typeset__scrollwrap").filter((wrap) => wrap.scrollWidth > wrap.clientWidth + 1)
      .map((wrap) => wrap.querySelector("table").dataset.layout),
    cut: all("td, th").filter((cell) => cell.scrollWidth > cell.clientWidth + 4)
      .map((cell) => cell.textContent.slice(0, 60)),
    squeezed: all(":is(td, th) code").filter((code) => code.getClientRects().length > 2
      && code.textContent.length / code.getClientRects().length < 5).map((code) => code.textContent),
    cut_commands: all(":is(.language-bash, .language-json) > pre > code").filter(
      (code) => code.scrollWidth > code.clientWidth + 1).map((code) => code.textContent.slice(0, 60)),
    tabs: all(".md-tabs__link").filter((link) => link.checkVisibility()).length,
    cut_tabs: all(".md-tabs__list").filter((list) => list.scrollWidth > list.clientWidth).length,
    links_in_sidebar: all(".md-sidebar--primary a.md-nav__link[href]").filter((link) => link.checkVisibility()).length,
    silent_images: all("article img").filter((image) => image.alt === "").length,
    formulas: all("math").length,
    flat_formulas: all("math").filter((formula) => formula.checkVisibility() && box(formula).height < 5).length,
  };
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}, timeout=240, check=True,
    )  # fmt: skip
    return folder


@pytest.fixture
def browser():
    with Browser() as browser:
        yield browser


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_pages_fit_and_follow_the_colors_of_the_system(site, browser, width, dark):
    pages = sorted(page for page in site.rglob("*.html") if page.name != "404.html")
    assert len(pages) > 30
    formulas = 0
    for page in pages:
        browser.open(page, width=width, dark=dark)
        seen = browser.evaluate(MEASURE)
        name = f"{page.relative_to(site)} at {width} pixels"
        assert seen["width"] <= width, f"{name} overflows"
        assert seen["hidden_code"] == 0, f"{name}: code under the button that copies it"
        assert seen["cut"] == [], f"{name}: texts are cut"
        assert seen["squeezed"] == [], f"{name}: names of code in columns that are too narrow"
        assert seen["cut_commands"] == [], f"{name}: commands are cut"
        assert set(seen["wide_tables"]) <= {"scroll"}, f"{name}: tables do not fit"
        assert (sum(seen["background"]) < 200) == dark, name
        assert seen["flat_formulas"] == 0, f"{name}: formulas without height"
        if width == 1440:
            assert seen["tabs"] > 5, f"{name}: no tabs"
            assert seen["cut_tabs"] == 0, f"{name}: tabs do not fit"
            assert seen["links_in_sidebar"] > 3 or page.name == "index.html", f"{name}: no sidebar"
        assert seen["silent_images"] == 0, f"{name}: images without a text"
        assert browser.complaints() == [], name
        assert [url for url in browser.requests() if not url.startswith(("file:", "data:", "blob:"))] == [], name
        formulas += seen["formulas"]
    assert formulas > 30


def test_images_are_shown_one_for_each_color_scheme(site, browser):
    for dark in (False, True):
        browser.open(site / "index.html", dark=dark)
        shown = browser.evaluate("""(async () => {
          const images = [...document.querySelectorAll("article img")].filter((image) => image.offsetWidth > 0);
          for (const image of images) { image.loading = "eager"; await image.decode(); }
          return images.map((image) => [image.getAttribute("src"), image.naturalWidth]);
        })()""")
        assert shown
        for source, width in shown:
            assert width > 300, source
            assert source.partition(".")[0].endswith("-dark") == dark, source


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("false_negative_margin", "reference/losses"),
        ("global batch size", "reference/training"),  # a part of a name
        ("train.global_batch_size", "reference/training"),
        ("resume", "checkpoints"),
        ("lora rank", "llm"),
        ("NCCL timeout", "several-hosts"),
        ("matryoshka", "reference/losses"),
    ],
)
def test_the_search_works_from_the_disk(site, browser, text, page, width):
    browser.open(site / "reference" / "recipe.html", width=width)
    results = browser.evaluate(
        """(async () => {
      const input = document.querySelector("input.md-search__input");
      document.querySelector("#__search").click();
      input.focus();
      input.value = TEXT;
      input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
      for (let waited = 0; waited < 400; waited++) {
        const links = [...document.querySelectorAll("a.md-search-result__link")].map((link) => link.href);
        if (links.length > 0) return links;
        await new Promise(done => setTimeout(done, 50));
      }
      return [];
    })()""".replace("TEXT", json.dumps(text))
    )
    files = [Path(link.removeprefix("file://").partition("?")[0].partition("#")[0]) for link in results]
    assert all(file.is_file() for file in files)
    assert (site / f"{page}.html").resolve() in [file.resolve() for file in files], [file.name for file in files]
    assert browser.complaints() == []


def test_links_of_the_sidebar_lead_to_files(site, browser):
    browser.open(site / "reference" / "losses.html")
    links = browser.evaluate("""[...document.querySelectorAll(".md-sidebar--primary a[href], .md-header a[href]")]
      .map((link) => link.href.split("#")[0])""")
    assert len(links) > 30
    for link in links:
        assert Path(link.removeprefix("file://")).is_file(), link
