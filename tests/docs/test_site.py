"""`mkdocs build --strict` makes the whole site, which asks nothing of a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

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


def test_formulas_are_mathml_and_tables_stand_in_the_reference(site):
    text = (site / "exactness" / "index.html").read_text(encoding="utf-8")
    assert text.count("<math") > 20
    assert "arithmatex" not in text
    assert "$$" not in text
    recipe = (site / "reference" / "recipe" / "index.html").read_text(encoding="utf-8")
    assert "train.global_batch_size" in recipe
    assert "<!-- options" not in recipe


def test_links_to_the_repository_go_there_if_it_is_known(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1",
                       "DOCS_REPO_URL": "https://github.example/me/embedtrain"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "recipes" / "index.html").read_text(encoding="utf-8")
    assert 'href="https://github.example/me/embedtrain/blob/main/recipes/bce_xlmr.yaml"' in text
    claims = (tmp_path / "claims" / "index.html").read_text(encoding="utf-8")
    assert 'href="https://github.example/me/embedtrain/tree/main/tests/losses"' in claims
