"""`mkdocs build --strict` builds the whole site, which loads nothing from a network."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

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
        built = f"{page.removesuffix('.md')}.html"
        assert (site / built).is_file(), page
        assert f'"{built}"' in index, page
    for message in ("Could not find the transformer layer class to wrap", "must be 2-D", "data pointer on an invalid"):
        assert message in index


def test_pages_have_titles_and_descriptions_of_their_own(site):
    """A search engine shows both, and cuts a description of more than 160 characters."""
    titles, descriptions = {}, {}
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":
            continue
        text = page.read_text(encoding="utf-8")
        name = str(page.relative_to(site))
        title = html.unescape(re.search("<title>(.*?)</title>", text)[1])
        description = html.unescape(re.search('<meta name="description" content="([^"]*)"', text)[1])
        assert 40 <= len(description) <= 160, f"{name}: {description!r}, the first sentence of the page"
        assert not re.search(r"[`$*<>]|\]\(", title + description), f"{name} {title} {description}"
        assert titles.setdefault(title, name) == name, f"{name} has the title of {titles[title]}"
        assert descriptions.setdefault(description, name) == name, f"{name} is described as {descriptions[description]}"
    assert len(titles) > 60


def test_descriptions_are_first_sentences():
    hook = load_hook("summaries")
    markdown = "# The `a`\n\n![A picture](b.svg)\n\nUse [`c`](c.md), e.g. **here**. It is\nshort. {}\n\n## Next\n"
    assert hook.title(markdown) == "The a"
    assert hook.description(markdown.format("More.")) == "Use c, e.g. here. It is short. More."
    assert hook.description(markdown.format("More " * 30)) == "Use c, e.g. here. It is short."
    assert hook.description(f"# A\n\n{'word ' * 40}") == "word " * 31 + "…"
    assert hook.description("# A\n\nIt runs:\n\n```bash\ncommand\n```\n") == "It runs"


def test_the_site_opens_without_a_network(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|link|img|iframe)\b[^>]*?(?:src|href)="(https?:[^"]+)"', text)
        assert [address for address in fetched if "canonical" not in address] == [], page
        assert "fonts.googleapis" not in text


def test_links_and_the_search_work_from_the_disk(site):
    """A browser shows no index of a folder, and reads no JSON, for a page that is a file."""
    for page in site.rglob("*.html"):
        links = re.findall(r'<a\b[^>]*? href="([^"#]+)', page.read_text(encoding="utf-8"))
        local = [link for link in links if not re.match(r"https?:|mailto:|/", link)]
        for link in local:
            assert (page.parent / unquote(link)).is_file(), f"{page.relative_to(site)} links to {link}"
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert "iframe-worker" in (site / "index.html").read_text(encoding="utf-8")
    assert index.startswith("var __index = {")


def test_no_page_shows_markdown(site):
    """A list directly below a paragraph is part of it for mkdocs, and a list for GitHub."""
    left = re.compile(r"\n\s*(?:[-*+]|\d+\.) |\*\*|\]\(|`|^\s*\||^\s*(?:```|!!! )", re.MULTILINE)
    texts = re.compile(r"<(p|li|td|th|h\d)\b[^>]*>(.*?)</\1>", re.DOTALL)
    code = re.compile(r"<(pre|code|math|script)\b.*?</\1>", re.DOTALL)
    for page in sorted(site.rglob("*.html")):
        article = page.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        for _, text in texts.findall(code.sub("", article)):
            assert left.search(re.sub(r"<[^>]+>", "", text)) is None, f"{page.relative_to(site)}: {text[:300]}"


def test_names_and_texts_of_tables_of_numbers_break_where_they_may():
    hook = load_hook("layout")
    head = "<thead><tr><th><code>include_prompt=false</code></th><th>ratio</th></tr></thead>"
    row = (
        f"<tr><td><code>model.path</code></td><td>2 (1.5 to 3)</td><td>{'ab ' * 12}<code>a_b</code></td><td>1</td></tr>"
    )
    table = hook.on_page_content(f"<table>{head}{row}</table>", SimpleNamespace(url="page.html"), None)
    assert "<th><code>include_<wbr>prompt=<wbr>false</code></th>" in table
    assert '<td class="breaks"><code>model.<wbr>path</code></td><td>2 (1.5&nbsp;to&nbsp;3)</td>' in table
    assert table.count('class="breaks"') == 2
    assert "<code>a_<wbr>b</code></td><td>1</td>" in table


def test_tables_and_images_are_prepared_for_narrow_pages_and_colors():
    hook = load_hook("layout")
    pictures = {"assets/run.png", "assets/run-dark.png", "assets/one.svg", "assets/run-phone.png"}
    files = SimpleNamespace(get_file_from_path=lambda path: path if path in pictures else None)

    def render(content: str) -> str:
        return hook.on_page_content(content, SimpleNamespace(url="reference/page.html"), files)

    head = "<thead><tr><th>option</th><th>default</th><th>meaning</th></tr></thead>"
    texts = render(f"<table>{head}<tr><td>lr</td><td>1e-5</td><td>{'the learning rate ' * 4}</td></tr></table>")
    assert "<table data-layout='stack'>" in texts
    assert '<td data-label="default">1e-5</td>' in texts
    numbers = render(f"<table>{head}<tr><td>1</td><td>2</td><td>3</td></tr></table>")
    assert numbers.startswith("<table data-layout='scroll'>")
    assert "data-label" not in numbers
    both = render('<p><img alt="A run" src="../assets/run.png" /></p>')
    assert both.count("<img") == 2
    assert re.search(
        r'only-light" href="../assets/run.png">.*?srcset="../assets/run-phone.png".*?src="../assets/run.png"', both
    )
    assert re.search(r'only-dark" href="../assets/run-dark.png"><img alt="A run" src="../assets/run-dark.png"', both)
    assert render('<img alt="One" src="../assets/one.svg" />').count("<img") == 1


def test_tabs_are_plain_text_elsewhere(site):
    hook = load_hook("layout")
    markdown = (
        "Before\n\n<!-- tabs -->\n\n**One**\n\n```bash\na\n```\n\n**Two**\n\nb\n\n<!-- end tabs -->\n\n**Not one**\n"
    )
    tabs = '=== "One"\n\n    ```bash\n    a\n    ```\n\n=== "Two"\n\n    b\n'
    assert hook.on_page_markdown(markdown, SimpleNamespace(is_homepage=False)) == f"Before\n\n{tabs}\n\n**Not one**\n"
    page = (site / "index.html").read_text(encoding="utf-8")
    labels = re.search(r'<div class="tabbed-labels">(.*?)</div>', page)[1]
    assert re.findall(r"<label[^>]*>([^<]*)", labels) == ["Command line", "Python", "YAML"]
    assert "=== " not in re.sub(r"<[^>]+>", "", (site / "llms-full.txt").read_text(encoding="utf-8"))


def test_formulas_are_mathml_and_the_reference_has_tables(site):
    text = (site / "exactness.html").read_text(encoding="utf-8")
    assert text.count("<math") > 20
    assert "arithmatex" not in text
    assert "$$" not in text
    recipe = (site / "reference" / "training.html").read_text(encoding="utf-8")
    assert 'id="option.train.global_batch_size"' in recipe
    assert "\\|" not in recipe


def test_the_notebook_is_a_page_with_code_and_outputs(site):
    notebook = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))
    page = (site / "notebook.html").read_text(encoding="utf-8")
    text = html.unescape(re.sub(r"<[^>]+>", "", page))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert "".join(cell["source"]) in text
            for output in cell["outputs"]:
                assert "".join(output["data"]["text/plain"]) in text
    assert 'href="python-api.html"' in page
    assert 'href="notebook.html"' in (site / "python-api.html").read_text(encoding="utf-8")
    assert 'href="notebook.ipynb"' in page, "the file itself"


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
    assert "[c](measurements.md#speed) [d](mine.md) `x|y`" in rendered
    assert "echo [e](../recipes/f.yaml)" in rendered, "code stays as it is"
    assert "a (`recipes/minilm.yaml`) b (`tests/losses`)" in render(markdown, "")


def test_pictures_of_terminals_show_what_is_left_on_the_screen():
    hook = load_hook("screenshots")
    bar = "\x1b[?25l\x1b[36m━━\x1b[0m \x1b[1m{}/20\x1b[0m"
    output = "start\r\n" + bar.format(1) + "\r\x1b[2K" + bar.format(9)
    output += "\r\x1b[2K\x1b[2mstep \x1b[0m10/20\r\n" + bar.format(9) + "\r\x1b[2K" + bar.format(10)
    rest = "\r\x1b[2K" + bar.format(20) + "\r\nencoding\r\x1b[2K\x1b[1A\x1b[2Ktrained\r\n"

    def plain(output: str) -> list[str]:
        return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in hook.screen(output)]

    assert plain(output) == ["start", "step 10/20", "━━ 10/20"]
    assert plain(hook.until(output + rest, "step 10/20")) == ["start", "step 10/20", "━━ 10/20"]
    assert plain(output + rest) == ["start", "step 10/20", "trained"]


def test_diagrams_are_those_that_their_script_draws():
    images = ROOT / "docs" / "assets" / "images"
    pictures = load_hook("diagrams").pictures()
    assert {path.name for path in images.glob("diagram-*.svg")} == pictures.keys()
    for name, content in pictures.items():
        assert (images / name).read_text(encoding="utf-8") == content, "run docs/hooks/diagrams.py"


def test_language_models_get_an_index_and_all_pages(site):
    index, whole = ((site / name).read_text(encoding="utf-8") for name in ("llms.txt", "llms-full.txt"))
    links = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S", index, re.MULTILINE)
    assert len(links) > 40
    assert all((site / link).is_file() for link in links)
    assert "## Start\n" in index
    assert "# Losses\n" in whole
    assert "embedtrain train --gpus 8 recipe=minilm" in whole
