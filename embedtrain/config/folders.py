"""Where the YAML that comes with embedtrain lies, and what can be chosen of it."""

from pathlib import Path

from embedtrain.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent


def folder(name: str) -> Path:
    """Where `configs` or `recipes` lie: inside an installed package, beside it in a checkout."""
    for place in (_PACKAGE / name, _PACKAGE.parent / name):
        if place.is_dir():
            return place
    raise ConfigError(f"the folder {name} is neither in {_PACKAGE} nor in {_PACKAGE.parent}: reinstall embedtrain")


def choices(group: str) -> list[str]:
    """What can be chosen with `group=NAME` of what comes with embedtrain."""
    place = folder("recipes") if group == "recipe" else folder("configs") / group
    return sorted(path.stem for path in place.glob("*.yaml"))
