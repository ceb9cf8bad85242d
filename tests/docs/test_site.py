"""`mkdocs build --strict` builds the whole site, which loads nothing from a network."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
from tests.docs.pages import load_hook

pytest.importorskip("mkdocs")
pytest.importorskip("material")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_of_the_nav_is_built_and_in_the_search(site):
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r"^ +- [^:\n]+: (\S+\.md)$", text.partition("nav:")[2], re.MULTILINE)
    assert len(named) > 25
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    for page in named:
        built = site / ("index.html" if page == "index.md" else f"{page.removesuffix('.md')}/index.html")
        assert built.is_file(), page
        if page != "index.md":
            assert f'"{page.removesuffix(".md")}/"' in index, page
    for message in ("Could not find the transformer layer class to wrap", "must be 2-D", "data pointer on an invalid"):
        assert message in index


def test_the_site_opens_without_a_network(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="(https?:[^"]+)"', text)
        assert [address for address in fetched if "canonical" not in address] == [], page
        assert "fonts.googleapis" not in text


def test_formulas_are_mathml_and_the_reference_has_tables(site):
    text = (site / "exactness" / "index.html").read_text(encoding="utf-8")
    assert text.count("<math") > 20
    assert "arithmatex" not in text
    assert "$$" not in text
    recipe = (site / "reference" / "recipe" / "index.html").read_text(encoding="utf-8")
    assert 'id="option.train.global_batch_size"' in recipe
    assert "\\|" not in recipe


def test_links_to_files_lead_to_the_repository_if_its_address_is_set():
    hook, page = load_hook("repository"), SimpleNamespace(file=SimpleNamespace(src_uri="data.md", generated_by=None))

    def render(text: str, repo_url: str) -> str:
        return hook.on_page_markdown(text, page, SimpleNamespace(repo_url=repo_url), None)

    markdown = (
        "[a](../recipes/minilm.yaml) [b](../tests/losses/) [c](../benchmarks/README.md#speed) [d](mine.md) `x\\|y`\n"
        "```bash\necho [e](../recipes/f.yaml)\n```\n"
    )
    rendered = render(markdown, "https://host.example/me/it/")
    assert "[a](https://host.example/me/it/blob/main/recipes/minilm.yaml)" in rendered
    assert "[b](https://host.example/me/it/tree/main/tests/losses)" in rendered
    assert "[c](benchmarks.md#speed) [d](mine.md) `x|y`" in rendered
    assert "echo [e](../recipes/f.yaml)" in rendered, "code stays as it is"
    assert "a (`recipes/minilm.yaml`) b (`tests/losses`)" in render(markdown, "")
