"""The files of recipes/ and configs/, and what Hydra's store has of them."""

from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from embedtrain.config.losses import LOSSES, LossConfig
from embedtrain.config.recipe import ModelConfig, Recipe
from embedtrain.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent
# The state of the file that Hydra's store holds of each recipe.
_stored_recipes: dict[str, tuple[Path, int, int, bool]] = {}


def folder(name: str) -> Path:
    """The folder `configs` or `recipes`: inside an installed package, beside the package in a checkout."""
    for path in (_PACKAGE / name, _PACKAGE.parent / name):
        if path.is_dir():
            return path
    raise ConfigError(f"the folder {name} is neither in {_PACKAGE} nor in {_PACKAGE.parent}: reinstall embedtrain")


def choices(group: str) -> list[str]:
    """The names that embedtrain offers for `group=NAME`."""
    if group == "loss":
        return sorted(LOSSES)
    directory = folder("recipes") if group == "recipe" else folder("configs") / group
    return sorted(path.stem for path in directory.glob("*.yaml"))


def register_recipes(without_loss: bool) -> None:
    """Store the schemas, and each file of recipes/ as an option of `recipe=`, without its `loss` if that is replaced.

    A search path cannot do the latter: the name of a group is that of its folder, and `recipes=` reads badly. Hydra
    keeps what is stored until the process ends, so only what has changed is stored again, which takes longer than the
    composition of a recipe.
    """
    store = ConfigStore.instance()
    if "recipe_schema.yaml" not in store.repo:  # a new process, or what a function of the Python API stored is removed
        _store_schemas(store)
        _stored_recipes.clear()
    for path in sorted(folder("recipes").glob("*.yaml")):
        status = path.stat()
        state = (path, status.st_mtime_ns, status.st_size, without_loss)
        if _stored_recipes.get(path.stem) == state:
            continue
        recipe = OmegaConf.load(path)
        assert isinstance(recipe, DictConfig)
        if without_loss:
            recipe.pop("loss", None)
        store.store(group="recipe", name=path.stem, node=recipe, package="_global_")
        _stored_recipes[path.stem] = state


def _store_schemas(store: ConfigStore) -> None:
    store.store(name="recipe_schema", node=recipe_schema())
    for name, kind in LOSSES.items():
        store.store(group="loss", name=name, node=kind)


def recipe_schema() -> DictConfig:
    """The dataclass of a recipe, into which any loss can be merged."""
    schema = OmegaConf.structured(Recipe)
    assert isinstance(schema, DictConfig)
    schema.loss = LossConfig()  # into the default, InfoNCE, only InfoNCE could be merged
    schema.model = ModelConfig()
    OmegaConf.set_struct(schema.model, False)  # the options of its kind, which is known after the composition
    return schema
