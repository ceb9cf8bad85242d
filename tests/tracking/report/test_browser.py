"""The report in a real Chromium: no requests, no overflow, dark mode, and hovering."""

import pytest

from embedtrain.report.page import write_report
from tests.browser import Browser, chromium
from tests.tracking.report.runs import ANSWERS, QUERIES, make_run, make_sample
from tests.tracking.report.test_page import EVIL

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine (apt-get install chromium)"),
]
LONG = "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 4


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of one run, and one of three runs with names and texts that are hard to lay out."""
    folder = tmp_path_factory.mktemp("pages")
    sample = make_sample([*QUERIES, LONG, EVIL], [*ANSWERS, LONG, EVIL])
    more = ("positive_similarity", "uniformity", "loss/en", "own")
    one = make_run(folder / "one", name="one", steps=300, sample=sample, extra_metrics=more)
    two = make_run(folder / "two", name=LONG, steps=90, sets=(LONG, "dev-en"), sample=sample, optim={"lr": 1.0})
    three = make_run(folder / "three", name=EVIL, steps=1, sets=(EVIL,), metrics=(EVIL,), extra_metrics=(EVIL, LONG))
    write_report([one], folder / "one.html")
    write_report([one, two, three], folder / "three.html")
    return {"one": folder / "one.html", "three": folder / "three.html"}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("name", ["one", "three"])
def test_it_opens_without_errors_and_fits(browser, pages, name, width, dark):
    browser.open(pages[name], width=width, dark=dark)
    browser.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    assert browser.requests() == [pages[name].resolve().as_uri()]
    assert browser.complaints() == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    if name == "three" and width == 390:
        runs = "document.querySelector('.runs').parentElement"
        assert browser.evaluate(f"{runs}.scrollWidth - {runs}.clientWidth") == 0, "a block for each run"
    red, green, blue = browser.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
    )
    assert (max(red, green, blue) < 40) if dark else (min(red, green, blue) > 240)
    smallest = browser.evaluate(
        "Math.min(...[...document.querySelectorAll('svg.plot text')].map((t) => t.getBoundingClientRect().height))"
    )
    assert smallest >= 9, "axis labels are readable"


@pytest.mark.parametrize("dark", [False, True])
def test_contrast(browser, pages, dark):
    """Contrast after WCAG: 4.5 for text, 3 for lines and marks."""
    browser.open(pages["one"], dark=dark)
    contrast = """(() => {
      const style = getComputedStyle(document.documentElement);
      const light = (name) => {
        const hex = style.getPropertyValue(name).trim();
        const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
          .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
      };
      const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const names = ["--text", "--soft", "--accent", "--good", "--bad", ..."01234567".split("").map((n) => "--c" + n)];
      const least = (name) => Math.min(...["--card", "--page"].map((under) => ratio(light(name), light(under))));
      return Object.fromEntries(names.map((name) => [name, least(name)]));
    })()"""
    ratios = browser.evaluate(contrast)
    assert {name: value for name, value in ratios.items() if value < (3 if name.startswith("--c") else 4.5)} == {}


def test_values_are_shown_on_hover_and_by_keys(browser, pages):
    browser.open(pages["one"])
    hover = """(() => {
      const svg = document.querySelector("#g1 svg.plot"), box = svg.getBoundingClientRect();
      const at = {clientX: box.right - 12, clientY: box.top + 40, bubbles: true};
      svg.dispatchEvent(new PointerEvent("pointermove", at));
      return [document.getElementById("tip").hidden, document.getElementById("tip").textContent];
    })()"""
    hidden, text = browser.evaluate(hover)
    assert not hidden
    assert text.startswith(("step 300", "step 299"))
    keys = """(() => {
      const svg = document.querySelector("#g1 svg.plot");
      svg.focus();
      for (const key of ["Home", "ArrowRight"]) svg.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      return document.getElementById("tip").textContent;
    })()"""
    assert browser.evaluate(keys).startswith("step 2")
    assert browser.complaints() == []


def test_the_recipe_can_be_searched(browser, pages):
    browser.open(pages["one"])
    search = """(() => {
      const find = document.getElementById("find");
      find.value = "OPTIM.LR";
      find.dispatchEvent(new Event("input"));
      const rows = [...document.querySelectorAll("#recipe tr")].filter((row) => row.checkVisibility());
      return rows.map((row) => row.textContent);
    })()"""
    assert browser.evaluate(search) == ["optim.lr5.0e-05"]


def test_a_text_is_highlighted_in_both_maps(browser, pages):
    browser.open(pages["one"])
    point = """(() => {
      const text = document.querySelector('.map [data-text="0"]');
      text.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
      return [document.querySelectorAll(".map .on").length, document.querySelector(".pointed").textContent];
    })()"""
    count, caption = browser.evaluate(point)
    assert count == 2
    assert caption == "query, dev-en: how to edit photos"


def test_plots_need_no_script(browser, pages):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(pages["one"])
        tree = browser.call("DOM.getDocument", depth=0)["root"]["nodeId"]
        lines = browser.call("DOM.querySelectorAll", nodeId=tree, selector="svg path.line")["nodeIds"]
        assert len(lines) > 10
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_print_is_white_and_complete(browser, pages):
    """Also in dark mode."""
    browser.open(pages["one"], width=794, dark=True)
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    browser.call("Emulation.setEmulatedMedia", media="print", features=[dark])
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    is_wider = "(element) => element.scrollWidth > element.clientWidth + 1"
    wider = f"[...document.querySelectorAll('.wide')].filter({is_wider}).length"
    assert browser.evaluate(wider) == 0
    browser.call("Emulation.setEmulatedMedia", media="screen")
