"""The report in a real Chromium: nothing is asked of a network, nothing overflows, dark is dark, and hovering works."""

import pytest

from embedtrain.tracking.report.page import write_report
from tests.browser import Browser, chromium
from tests.tracking.report.made import ANSWERS, QUERIES, made_sample, make_run
from tests.tracking.report.test_page import EVIL

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine (apt-get install chromium)"),
]
LONG = "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft" * 4


@pytest.fixture(scope="module")
def browser():
    with Browser() as one:
        yield one


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One run, and three with names and texts that are hard to lay out."""
    folder = tmp_path_factory.mktemp("pages")
    sample = made_sample([*QUERIES, LONG, EVIL], [*ANSWERS, LONG, EVIL])
    more = ("positive_similarity", "uniformity", "loss/en", "own")
    one = make_run(folder / "one", name="one", steps=300, sample=sample, more=more)
    two = make_run(folder / "two", name=LONG, steps=90, sets=(LONG, "dev-en"), sample=sample, optim={"lr": 1.0})
    three = make_run(folder / "three", name=EVIL, steps=1, sets=(EVIL,), metrics=(EVIL,), more=(EVIL, LONG))
    write_report([one], folder / "one.html")
    write_report([one, two, three], folder / "three.html")
    return {"one": folder / "one.html", "three": folder / "three.html"}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("name", ["one", "three"])
def test_it_opens_quietly_and_fits(browser, pages, name, width, dark):
    browser.open(pages[name], width=width, dark=dark)
    browser.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browser.requests() == [pages[name].resolve().as_uri()]
    assert browser.complaints() == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    red, green, blue = browser.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)"
    )
    assert (max(red, green, blue) < 40) if dark else (min(red, green, blue) > 240)
    smallest = browser.evaluate(
        "Math.min(...[...document.querySelectorAll('svg.plot text')].map((t) => t.getBoundingClientRect().height))"
    )
    assert smallest >= 9, "numbers at an axis can be read"


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out(browser, pages, dark):
    """Contrast as WCAG counts it: 4.5 for text, 3 for lines and marks."""
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
    found = browser.evaluate(contrast)
    assert {name: value for name, value in found.items() if value < (3 if name.startswith("--c") else 4.5)} == {}


def test_values_are_told_under_the_pointer_and_by_keys(browser, pages):
    browser.open(pages["one"])
    hover = """(() => {
      const svg = document.querySelector("#g1 svg.plot"), box = svg.getBoundingClientRect();
      const at = {clientX: box.right - 12, clientY: box.top + 40, bubbles: true};
      svg.dispatchEvent(new PointerEvent("pointermove", at));
      return [document.getElementById("tip").hidden, document.getElementById("tip").textContent];
    })()"""
    hidden, told = browser.evaluate(hover)
    assert not hidden
    assert told.startswith(("step 300", "step 299"))
    keys = """(() => {
      const svg = document.querySelector("#g1 svg.plot");
      svg.focus();
      for (const key of ["Home", "ArrowRight"]) svg.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      return document.getElementById("tip").textContent;
    })()"""
    assert browser.evaluate(keys).startswith("step 2")
    assert browser.complaints() == []


def test_the_recipe_is_searched(browser, pages):
    browser.open(pages["one"])
    search = """(() => {
      const find = document.getElementById("find");
      find.value = "OPTIM.LR";
      find.dispatchEvent(new Event("input"));
      const rows = [...document.querySelectorAll("#recipe tr")].filter((row) => row.checkVisibility());
      return rows.map((row) => row.textContent);
    })()"""
    assert browser.evaluate(search) == ["optim.lr2.0e-05"]


def test_a_text_of_the_map_is_found_in_both_maps(browser, pages):
    browser.open(pages["one"])
    point = """(() => {
      const text = document.querySelector('.map [data-text="0"]');
      text.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
      return [document.querySelectorAll(".map .on").length, document.querySelector(".pointed").textContent];
    })()"""
    count, told = browser.evaluate(point)
    assert count == 2
    assert told == "query, dev-en: how to edit photos"


def test_it_says_as_much_without_a_script(browser, pages):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(pages["one"])
        tree = browser.call("DOM.getDocument", depth=0)["root"]["nodeId"]
        lines = browser.call("DOM.querySelectorAll", nodeId=tree, selector="svg path.line")["nodeIds"]
        assert len(lines) > 10
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_paper_is_white_and_cuts_nothing_off(browser, pages):
    """Also for who reads in the dark."""
    browser.open(pages["one"], width=794, dark=True)
    dark = {"name": "prefers-color-scheme", "value": "dark"}
    browser.call("Emulation.setEmulatedMedia", media="print", features=[dark])
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    wider = "[...document.querySelectorAll('.wide')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    assert browser.evaluate(wider) == 0
    browser.call("Emulation.setEmulatedMedia", media="screen")
