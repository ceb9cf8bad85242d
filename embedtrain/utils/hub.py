"""The Hugging Face Hub: whether it can be reached, and which paths may be ids of its repositories."""

import os
import sys
from functools import cache
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, get_session

_PROBE_TIMEOUT = 5.0  # seconds


def is_local_path(path: str) -> bool:
    """Whether a path that does not exist is one of a local folder or file, not the id of a repository.

    Ids are `name` or `owner/name`. `runs/model` is a local path if there is a folder `runs`.
    """
    parent, _, _ = path.rstrip("/").rpartition("/")
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith("/") or Path(parent or "?").is_dir()


def hub_is_reachable() -> bool:
    """Whether the Hub answers; if not, this process uses only its cache from now on.

    huggingface_hub repeats every request five times: each repository would take 24 seconds where the name of the Hub
    is not resolved, and minutes behind a firewall that drops packets.
    """
    return not huggingface_hub.is_offline_mode() and _answers(constants.ENDPOINT)


@cache
def _answers(endpoint: str) -> bool:
    try:
        get_session().head(endpoint, timeout=_PROBE_TIMEOUT)
    except Exception:  # of the HTTP library, which differs by version
        os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that this one starts
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:
            _set_offline(sys.modules["datasets"])
        return False
    return True


def _set_offline(datasets: object) -> None:
    """`datasets` copies the setting when it is imported."""
    datasets.config.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
