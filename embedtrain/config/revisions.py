"""A version of a Hub repository written behind its id, `owner/name@revision`, where an option is one text."""

import re
from pathlib import Path

_PINNED = re.compile(r"([\w-][\w.-]*(?:/[\w-][\w.-]*)?)@([\w][\w./-]*)")


def split_revision(path: str) -> tuple[str, str | None]:
    """Id and revision; what is a path here, or has no revision behind it, as it is with None."""
    found = _PINNED.fullmatch(path)
    if found is None or Path(path).expanduser().exists():
        return path, None
    return found[1], found[2]
