"""mkdocs hook: adds pages from files outside docs/ and from the notebook, and rewrites links to such files.

Pages have relative links for GitHub, such as `../recipes/bce_xlmr.yaml`. In the site a link to a file outside docs/
leads to its page (PAGES) or to the repository at `repo_url`. A build without `repo_url` shows the path instead, and
commands with a placeholder of the address.
"""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "docker/README.md": "docker.md",
    "benchmarks/README.md": "measurements.md",
    "CHANGELOG.md": "changelog.md",
    "CHANGELOG-0.1.md": "changelog-0.1.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "docs/notebook.ipynb": "notebook.md",
}
PLACEHOLDER = "https://HOST/OWNER/embedtrain"  # of `repo_url`, in commands that install
# A Markdown link: its text and target. Images start with "!" and are in docs/.
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s]+)\)")
_CODE = re.compile(r"`[^`\n]+`")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from files outside docs/."""
    for path, page in PAGES.items():
        if files.get_file_from_path(page) is not None:
            continue
        content = (ROOT / path).read_text(encoding="utf-8")
        if path.endswith(".ipynb"):
            content = notebook_page(content, Path(path).name)
        files.append(File.generated(config, page, content=content))
    return files


def notebook_page(content: str, name: str) -> str:
    """The cells of a notebook as Markdown, each with its output, and a link to the file."""
    parts = []
    for cell in json.loads(content)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            text = "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))
            parts.append(f"```text\n{text.rstrip()}\n```")
    parts.insert(1, f'<a href="{name}" download>Download the notebook</a>')
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links to files of the repository."""
    source = next(
        (path for path, name in PAGES.items() if name == page.file.src_uri and page.file.generated_by),
        f"docs/{page.file.src_uri}",
    )
    if config.repo_url:
        markdown = markdown.replace(PLACEHOLDER, config.repo_url.rstrip("/"))
    start, parts = 0, []
    for fence in _FENCE.finditer(markdown):
        parts += [_linked(markdown[start : fence.start()], source, page, config), fence[0]]
        start = fence.end()
    return "".join([*parts, _linked(markdown[start:], source, page, config)])


def _linked(text: str, source: str, page: Page, config: MkDocsConfig) -> str:
    def link(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        if not target or ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        target_page = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if target_page is not None:
            relative = posixpath.relpath(target_page, posixpath.dirname(page.file.src_uri) or ".")
            return f"[{match['text']}]({relative}{'#' + anchor if anchor else ''})"
        if config.repo_url:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"[{match['text']}]({config.repo_url.rstrip('/')}/{kind}/main/{path})"
        named = path in match["text"] or Path(path).stem in match["text"]
        return match["text"] if named else f"{match['text']} (`{path}`)"

    # GitHub needs bars in code escaped in tables; Python-Markdown would show the backslash.
    return _CODE.sub(lambda code: code[0].replace("\\|", "|"), _LINK.sub(link, text))
