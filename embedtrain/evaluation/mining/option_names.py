"""Errors about models in the words of this door: a recipe's `model.max_length` is another option here."""

import contextlib
import re
from collections.abc import Iterator, Mapping

from embedtrain.errors import ConfigError, ModelError

OF_MODEL = {
    "path": "model",
    "lora.path": "adapter",
    **{name: name for name in ("pooling", "normalize", "max_length", "revision", "trust_remote_code")},
}
OF_TEACHER = {
    "path": "teacher",
    "max_length": "teacher_max_length",
    "revision": "teacher_revision",
    "trust_remote_code": "trust_remote_code",
}


@contextlib.contextmanager
def naming(options: Mapping[str, str]) -> Iterator[None]:
    """Call options of `model` in errors as they are called here.

    Args:
        options: by their names in a recipe, without `model.`.
    """

    def here(found: re.Match[str]) -> str:
        return options.get(found[1], found[0])

    try:
        yield
    except (ConfigError, ModelError) as error:
        raise type(error)(re.sub(r"\bmodel\.((?:lora\.)?\w+)", here, str(error))) from error.__cause__
