"""mkdocs hook: pages that are files of the repository, and links from pages to such files.

Pages are written with relative links, as GitHub follows them: `../recipes/bce_xlmr.yaml` from docs/. In the site a link
to a file outside docs/ leads to its page, if it has one (PAGES), else to the repository at `repo_url`. A local build
knows of no repository, and shows the path in the clone instead.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "docker/README.md": "docker.md",
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
}
# A link of Markdown outside code: its text and its target. Images begin with "!" and lie within docs/.
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s]+)\)")
_CODE = re.compile(r"`[^`\n]+`")
_FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie elsewhere in the repository."""
    for path, page in PAGES.items():
        if files.get_file_from_path(page) is not None:
            continue
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files of the repository become links to their pages, or to the repository."""
    source = next(
        (path for path, name in PAGES.items() if name == page.file.src_uri and page.file.generated_by),
        f"docs/{page.file.src_uri}",
    )
    at, parts = 0, []
    for fence in _FENCE.finditer(markdown):
        parts += [_linked(markdown[at : fence.start()], source, page, config), fence[0]]
        at = fence.end()
    return "".join([*parts, _linked(markdown[at:], source, page, config)])


def _linked(text: str, source: str, page: Page, config: MkDocsConfig) -> str:
    def link(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        if not target or ":" in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        found = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if found is not None:
            relative = posixpath.relpath(found, posixpath.dirname(page.file.src_uri) or ".")
            return f"[{match['text']}]({relative}{'#' + anchor if anchor else ''})"
        if config.repo_url:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"[{match['text']}]({config.repo_url.rstrip('/')}/{kind}/main/{path})"
        named = path in match["text"] or Path(path).stem in match["text"]
        return match["text"] if named else f"{match['text']} (`{path}`)"

    # In a table GitHub wants a bar in code escaped, and Python-Markdown shows the backslash.
    return _CODE.sub(lambda code: code[0].replace("\\|", "|"), _LINK.sub(link, text))
