"""What a package says about itself beside pyproject.toml: addresses, and a README that can be read on a package index.

`DOCS_REPO_URL` and `DOCS_SITE_URL` are the addresses of the repository and of the site, as for `make docs`. A package
that is built without the first one names no address, and in its README the links to files are plain text. A wheel
that is built from a source distribution has what that says.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PLACEHOLDER = "https://HOST/OWNER/embedtrain"  # of the repository, in README.md and docs/install.md
_LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\((?![a-z]+:|#)([^()\s]+)\)")
_SOURCE = re.compile(r'\b(src|srcset)="(?![a-z]+:)([^"]+)"')
_PICTURE = re.compile(r"<picture>.*?</picture>\n*", re.DOTALL)


class Metadata(MetadataHookInterface):
    """Sets the dynamic fields `urls` and `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the fields that a source distribution does not have yet."""
        repository, site = (os.environ.get(name, "").rstrip("/") for name in ("DOCS_REPO_URL", "DOCS_SITE_URL"))
        version = metadata["version"]
        metadata.setdefault("urls", urls(repository, site, version))
        if "readme" not in metadata:
            text = readme((Path(self.root) / "README.md").read_text(encoding="utf-8"), repository, version)
            metadata["readme"] = {"content-type": "text/markdown", "text": text}


def urls(repository: str, site: str, version: str) -> dict[str, str]:
    """The addresses of a version by their well-known labels; those that are not known are left out."""
    known = {"Documentation": site} if site else {}
    if repository:
        known |= {
            "Source": repository,
            "Issues": f"{repository}/issues",
            "Changelog": f"{repository}/blob/v{version}/CHANGELOG.md",
        }
    return known


def readme(text: str, repository: str, version: str) -> str:
    """The README with links and pictures of the version's tag; without a repository there are neither."""
    if not repository:
        return _LINK.sub(r"\1", _PICTURE.sub("", text))
    text = _LINK.sub(rf"[\1]({repository}/blob/v{version}/\2)", text)
    return _SOURCE.sub(rf'\1="{repository}/raw/v{version}/\2"', text).replace(PLACEHOLDER, repository)
