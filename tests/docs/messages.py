"""What the program can print, as the literals of its source, and how much of a quoted message they are."""

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.conftest import ROOT

_WORD = re.compile(r"[A-Za-z_][\w@'-]*")
# Pieces of literals: so many words, or a whole literal of two, are no coincidence.
_LONGEST, _SHORTEST, _WHOLE = 5, 3, 2
_OF_F_STRING = "\0"  # ends a literal between values, of which one word counts


@cache
def _phrases() -> tuple[frozenset[tuple[str, ...]], frozenset[tuple[str, ...]]]:
    """Runs of words in the literals of the package, its scripts and its templates; and the words of whole literals."""
    runs, whole = set(), set()
    for literal in _literals():
        words = tuple(_WORD.findall(literal))
        if len(words) >= _WHOLE or literal.endswith(_OF_F_STRING):
            whole.add(words)
        for size in range(_SHORTEST, _LONGEST + 1):
            runs |= {words[start : start + size] for start in range(len(words) - size + 1)}
    return frozenset(runs), frozenset(whole)


def _literals() -> Iterator[str]:
    for path in (ROOT / "embedtrain").rglob("*"):
        if path.suffix == ".py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                    yield node.value
                elif isinstance(node, ast.JoinedStr):  # a value between two literals is no word of either
                    parts = (value.value if isinstance(value, ast.Constant) else " 0 " for value in node.values)
                    yield from (f"{part}{_OF_F_STRING}" for part in "".join(map(str, parts)).split(" 0 "))
        elif path.suffix in (".html", ".jinja", ".sh", ".mjs"):
            yield path.read_text(encoding="utf-8")


def unknown_words(quoted: str) -> tuple[list[str], int]:
    """The words of a quoted message that no literal of the program has beside their neighbours, and how many it has.

    Values of options, names of files, hosts and the like are such words as well.
    """
    runs, whole = _phrases()
    words = _WORD.findall(quoted)
    known = [False] * len(words)
    for size in range(min(_LONGEST, len(words)), 0, -1):
        for start in range(len(words) - size + 1):
            phrase = tuple(words[start : start + size])
            if phrase in whole or (size >= _SHORTEST and phrase in runs):
                known[start : start + size] = [True] * size
    return [word for word, is_known in zip(words, known, strict=True) if not is_known], len(words)


def is_of_the_program(quoted: str) -> bool:
    """Whether at most a third of its words are values, and the rest are words of the program in its order."""
    unknown, total = unknown_words(quoted)
    return total > 0 and len(unknown) <= total / 3
