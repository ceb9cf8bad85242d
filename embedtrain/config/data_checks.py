"""Values of a training source that cannot work, found before any file is looked at: path and value are named."""

import math
from collections.abc import Callable, Sequence

from embedtrain.config.recipe import TrainSource
from embedtrain.errors import ConfigError

SourceRule = tuple[Callable[[TrainSource], bool], Callable[[TrainSource], str]]

FORMAT_SAYS = (
    "must say where {instruction} and {text} go, each once and in this order, such as "
    '"Instruct: {instruction}\\nQuery: {text}"'
)
_NO_ROOM = "leaves no room for text between special tokens: at least 3"

SOURCE_RULES: list[SourceRule] = [
    (
        lambda s: not _positive(s.weight),
        lambda s: f"weight={s.weight}: must be above 0, or the source is never drawn; leave it out instead",
    ),
    (
        lambda s: s.max_rows is not None and s.max_rows < 1,
        lambda s: f"max_rows={s.max_rows}: a number of rows from 1 on, or null for all",
    ),
    (
        lambda s: s.documents is None and s.documents_revision is not None,
        lambda s: f"documents_revision={s.documents_revision} has no use without documents: write documents: ID",
    ),
    (
        lambda s: s.negatives is not None and s.negatives < 0,
        lambda s: f"negatives={s.negatives}: a number from 0 on, or null for all of a row's",
    ),
    (
        lambda s: not _positive(s.score_scale),
        lambda s: f"score_scale={s.score_scale}: must be above 0, since scores are divided by it",
    ),
    (
        lambda s: s.query_max_length is not None and s.query_max_length < 3,
        lambda s: f"query_max_length={s.query_max_length} {_NO_ROOM}",
    ),
    (
        lambda s: s.document_max_length is not None and s.document_max_length < 3,
        lambda s: f"document_max_length={s.document_max_length} {_NO_ROOM}",
    ),
    (
        lambda s: s.instruction_format is not None and not is_instruction_format(s.instruction_format),
        lambda s: f"instruction_format={s.instruction_format!r} {FORMAT_SAYS}",
    ),
]


def check_train_sources(sources: Sequence[TrainSource]) -> None:
    """Refuse what cannot work.

    Args:
        sources: `data.train`.

    Raises:
        ConfigError: an option of a source, or a name that two are given.
    """
    for source in sources:
        for broken, sentence in SOURCE_RULES:
            if broken(source):
                raise ConfigError(f"data.train, {source.path}: {sentence(source)}")
    named: dict[str, str] = {}
    for source in sources:
        if source.name is None:
            continue
        if source.name in named:
            raise ConfigError(
                f"data.train, {source.path}: name={source.name} is the name of {named[source.name]} too: "
                "give each a name of its own"
            )
        named[source.name] = source.path


def is_instruction_format(text: str) -> bool:
    """Whether `{instruction}` and then `{text}` stand in it, each once."""
    before, found, after = text.partition("{instruction}")
    return bool(found) and "{text}" not in before and after.count("{text}") == 1 and "{instruction}" not in after


def _positive(value: float) -> bool:
    """Above 0, and neither infinite nor NaN."""
    return math.isfinite(value) and value > 0
