"""The site in Chromium: nothing overflows at desktop and phone width, and colors follow the system."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.browser
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Each page in a frame of that width: how wide it is, its background, and the formulas in it that take no room.
MEASURE = """<!doctype html><body><script>
const pages = %s, found = [];
async function measure(page, width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:900px;border:0`;
  frame.src = page;
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  await new Promise(done => setTimeout(done, 100));
  const inside = frame.contentDocument;
  found.push({page, width, wide: inside.documentElement.scrollWidth,
    background: getComputedStyle(inside.body).backgroundColor,
    heading: inside.querySelector("h1").textContent,
    formulas: inside.querySelectorAll("math").length,
    flat: [...inside.querySelectorAll("math")].filter(one => one.getBoundingClientRect().height < 8).length});
  frame.remove();
}
(async () => {
  for (const page of pages) for (const width of [390, 1440]) await measure(page, width);
  document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
})();
</script></body>"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format, *arguments):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[tuple[str, list[str]]]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}, timeout=240, check=True,
    )  # fmt: skip
    pages = sorted(f"/{page.parent.relative_to(folder)}/".replace("/./", "/") for page in folder.rglob("index.html"))
    (folder / "measure.html").write_text(MEASURE % json.dumps(pages), encoding="utf-8")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", pages
    server.shutdown()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_at_desk_and_phone_width(site, scheme, tmp_path):
    address, pages = site
    output = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
         "--window-size=1600,1000", "--virtual-time-budget=60000", "--dump-dom", f"{address}/measure.html"],
        capture_output=True, text=True, timeout=300, check=True,
    ).stdout  # fmt: skip
    (measured,) = re.findall("FOUND(.*)END", output, re.DOTALL)
    measurements = json.loads(measured.replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    assert len(measurements) == 2 * len(pages) > 50
    for page in measurements:
        assert page["wide"] <= page["width"], f"{page['page']} overflows {page['width']} pixels"
        red, green, blue = map(int, re.findall(r"\d+", page["background"])[:3])
        assert (red + green + blue > 600) == (scheme == "light"), page
        assert page["flat"] == 0, f"{page['page']} has formulas without height"
    assert sum(page["formulas"] for page in measurements) > 60
