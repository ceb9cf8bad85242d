"""Which split of a set is measured, where there are several."""

from collections.abc import Sequence

from embedtrain.errors import DataError

SPLITS = ("test", "dev", "validation")


def choose_split(there: Sequence[str], asked: str | None, where: str) -> str:
    """Which split to take: the one asked for, else test, dev or validation, else the only one.

    Raises:
        DataError: it is not there, or none was asked for and it could be several.
    """
    if not there:
        raise DataError(f"{where} holds no split: expected one such as {SPLITS[0]}")
    found = next((s for s in SPLITS if s in there), None if len(there) > 1 else there[0]) if asked is None else asked
    if found is None:
        raise DataError(f"{where} holds the splits {', '.join(there)}: say which with split=")
    if found not in there:
        raise DataError(f"{where} holds no split {found!r}, only {', '.join(there)}")
    return found
