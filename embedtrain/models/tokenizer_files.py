"""Reads a tokenizer from a directory, after checks that its files are safe and its rules need a bounded time."""

import threading
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from embedtrain.errors import ModelError
from embedtrain.models.hub import one_line
from embedtrain.models.security import require_safe_files

# Files of a Hub repository to download for its tokenizer alone.
TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py"]
_PROBE_LENGTH = 64
# Texts for which regular expressions that backtrack need very long, and the seconds that a tokenizer may need for all.
_LONG_PROBES = tuple(part * 1000 + "!" for part in ("a", " ", "1", "\n", "a ", "A1b2 ", "-", "\u4e00"))
_PROBE_SECONDS = 60


def read_tokenizer(directory: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load a directory's tokenizer unchanged; a ModelError if there is none, or it fails the security checks."""
    require_safe_files(directory, trust_remote_code=trust_remote_code)
    try:
        loaded = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise ModelError(f"cannot read a tokenizer from {directory}: {one_line(error)}") from None
    if not isinstance(loaded, PreTrainedTokenizerBase):
        raise ModelError(f"cannot read a tokenizer from {directory}: its files define a {type(loaded).__name__}")
    require_bounded_time(loaded, str(directory))
    return loaded


def require_bounded_time(tokenizer: PreTrainedTokenizerBase, where: str) -> None:
    """Reject a tokenizer whose regular expressions fail, or need more than a minute, on texts of repeated characters.

    Others may need long for other texts: Oniguruma's limit is 10^7 steps for each character where a match may start.
    """
    errors: list[BaseException] = []

    def encode() -> None:
        try:
            for text in _LONG_PROBES:
                tokenizer([text], truncation=True, max_length=_PROBE_LENGTH)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=encode, daemon=True)
    thread.start()
    thread.join(_PROBE_SECONDS)
    if thread.is_alive():
        raise ModelError(
            f"the tokenizer of {where} needs more than {_PROBE_SECONDS} s for {len(_LONG_PROBES)} texts of repeated "
            "characters: a regular expression in its tokenizer.json backtracks without end"
        )
    for error in errors:
        raise ModelError(f"the tokenizer of {where} cannot encode texts: {one_line(error)}") from None
