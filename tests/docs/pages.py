"""The pages that a user reads, and the code blocks in them.

A block whose fence follows a comment `<!-- not run: why -->` or `<!-- theirs -->` is excluded from tests.
"""

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT

_BLOCK = re.compile(
    r"^(?P<indent> *)(?P<fence>```+|~~~+)(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
_MARK = re.compile(r"<!-- (?P<mark>not run|theirs)(?P<why>:[^\n]*)? -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """A fenced block: its place, language, file name and text, and whether a comment excludes it from tests."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    excused: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page of the site, and the README files of the repository."""
    others = [
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "benchmarks/README.md", "docker/README.md")
    ]
    return [*sorted((ROOT / "docs").rglob("*.md")), *(page for page in others if page.is_file())]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        before = text[: match.start()]
        yield Block(
            page,
            before.count("\n") + 1,
            match["info"].split()[0] if match["info"].strip() else "",
            title[1] if (title := re.search(r'title="([^"]+)"', match["info"])) else None,
            "".join(line.removeprefix(match["indent"]) for line in match["text"].splitlines(keepends=True)),
            _MARK.search(before) is not None,
        )


def inline_code(page: Path) -> list[str]:
    """The code in the sentences and tables of a page."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


def without_code(text: str) -> str:
    """A page without blocks and inline code, in which brackets are not links."""
    return re.sub(r"`[^`\n]+`", "``", _BLOCK.sub("", text))


def load_hook(name: str) -> Any:
    """A module of docs/hooks, loaded by its path as mkdocs does."""
    spec = importlib.util.spec_from_file_location(f"docs_hooks_{name}", ROOT / "docs" / "hooks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    return module
