"""What Hydra reads and expands: recipes/, configs/ and files of users, with limits.

A YAML file of one kilobyte can name other files and make billions of values, and OmegaConf and Hydra have no limits.
Their private names are used here only, checked with omegaconf 2.3, hydra 1.3.
"""

import functools
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import omegaconf._utils
import yaml
from hydra import initialize_config_dir, version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.override_parser.types import Override, RangeSweep
from hydra.initialize import get_gh_backup
from omegaconf import DictConfig, OmegaConf
from omegaconf.base import Container
from omegaconf.basecontainer import BaseContainer
from omegaconf.resolvers import oc

from embedtrain.config.losses import LOSSES, LossConfig
from embedtrain.config.recipe import ModelConfig, Recipe
from embedtrain.errors import ConfigError

# Held while something is composed. Hydra has one configuration, one store and one set of resolvers per process: of two
# threads that compose at once, one would get the recipes or the replaced functions of the other.
HYDRA = threading.RLock()
# Far more than recipes have: ten thousand sources with a path and a weight each are 30,000 values.
MAX_FILE_CHARACTERS = 1 << 22
MAX_VALUES = 100_000
MAX_ALIASED_VALUES = 10_000
MAX_NUMBER_CHARACTERS = 1_000
MAX_INTERPOLATED_CHARACTERS = 300_000  # in texts with `${`, whose grammar OmegaConf parses at 20 KB per second
MAX_INSERTED_VALUES = 30_000
MAX_JOBS = 1_000
# What `${oc.env:NAME}` may read: recipes are written to recipe.yaml, the model card and wandb. The prefix is for
# variables that users set for their own recipes.
READABLE_VARIABLES = (
    *("HOME", "USER", "LOGNAME", "HOSTNAME", "TMPDIR", "SCRATCH", "WORK", "XDG_CACHE_HOME", "HF_HOME"),
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_TMPDIR"),
    *("WANDB_RUN_ID", "WANDB_SWEEP_ID"),
)
VARIABLE_PREFIX = "EMBEDTRAIN_"
_VALUE_CHARACTERS = 1_000  # of a text that count as one value


def limited_loader(base: Any) -> Any:
    """A PyYAML loader class that raises a YAMLError, with file and line, where a file passes a limit."""

    class LimitedLoader(base):  # type: ignore[misc]
        def __init__(self, stream: Any) -> None:
            name = getattr(stream, "name", "<text>")
            text = stream if isinstance(stream, str | bytes) else stream.read(MAX_FILE_CHARACTERS + 1)
            if len(text) > MAX_FILE_CHARACTERS:
                raise yaml.YAMLError(f"{name}: is larger than {MAX_FILE_CHARACTERS >> 20} MiB, which no recipe is")
            super().__init__(text)
            self.name = str(name)
            self._sizes: dict[int, int] = {}  # values of a node with its aliases expanded, by its id
            self._num_values = self._num_aliased = self._num_interpolated = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            is_alias, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark
            node = super().compose_node(parent, index)
            if is_alias:
                size = self._sizes.get(id(node))
                if size is None:
                    raise _passed(mark, "a value contains an alias of itself")
                self._num_aliased += size
                if self._num_aliased > MAX_ALIASED_VALUES:
                    raise _passed(mark, f"aliases expand to more than {MAX_ALIASED_VALUES:,} values: write them out")
                return node
            if isinstance(node, yaml.ScalarNode):
                self._check_scalar(node, mark)
                children = []
            elif isinstance(node, yaml.MappingNode):
                children = [value for _, value in node.value]
            else:
                children = node.value
            self._sizes[id(node)] = 1 + sum(self._sizes.get(id(child), 1) for child in children)
            self._num_values += 1
            if self._num_values > MAX_VALUES:
                raise _passed(mark, f"more than {MAX_VALUES:,} keys and values")
            return node

        def _check_scalar(self, node: yaml.ScalarNode, mark: yaml.Mark) -> None:
            if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_NUMBER_CHARACTERS:
                raise _passed(mark, f"a number of {len(node.value):,} characters")
            if "${" in node.value:
                self._num_interpolated += len(node.value)
                if self._num_interpolated > MAX_INTERPOLATED_CHARACTERS:
                    raise _passed(
                        mark, f"texts with ${{...}} have more than {MAX_INTERPOLATED_CHARACTERS:,} characters"
                    )

    return LimitedLoader


def _passed(mark: Any, problem: str) -> yaml.YAMLError:
    return yaml.YAMLError(f"{mark.name}:{mark.line + 1}: {problem}")


def load_yaml(path: Path, base: Any = None) -> Any:
    """The content of a YAML file, by a loader of PyYAML; the default is that of OmegaConf.

    Raises:
        OSError, ValueError, YAMLError, RecursionError: it cannot be read, or passes a limit.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening a pipe waits for its writer, and a device never ends
        raise OSError("it is not a regular file")
    with path.open(encoding="utf-8") as file:
        return yaml.load(file, Loader=limited_loader(base or omegaconf._utils.get_yaml_loader()))  # noqa: S506  (the caller's loader, with limits)


@contextmanager
def limited_files(configs: Path, directory: Path | None, *, without: str | None = None) -> Iterator[None]:
    """Within the block, Hydra reads only files of `configs` and of the user's `directory`, with `limited_loader`.

    The key `without` of the user's files is left out.
    """
    get_loader = omegaconf._utils.get_yaml_loader
    roots = [Path(hydra.__file__).parent, configs, *([] if directory is None else [directory.resolve()])]
    files = [file.resolve() for file in configs.rglob("*.yaml")]  # which an installer may have linked

    def loader() -> Any:
        class ComposedLoader(limited_loader(get_loader())):  # type: ignore[misc]
            def __init__(self, stream: Any) -> None:
                path = Path(getattr(stream, "name", configs))  # Hydra has followed links; a text has no name
                if path not in files and not any(path.is_relative_to(root) for root in roots):
                    raise yaml.YAMLError(
                        f"{path} is outside of --config-dir, and recipes read only the files within it"
                    )
                super().__init__(stream)
                self._is_of_user = directory is not None and path.is_relative_to(directory.resolve())

            def get_single_data(self) -> Any:
                data = super().get_single_data()
                if self._is_of_user and isinstance(data, dict):
                    data.pop(without, None)
                return data

        return ComposedLoader

    with _replaced(omegaconf._utils, "get_yaml_loader", loader):
        yield


@contextmanager
def limited_interpolations() -> Iterator[None]:
    """Within the block, OmegaConf raises an error once interpolations have inserted too many values."""
    num_values = 0

    def counted(resolve: Callable[..., Any]) -> Callable[..., Any]:
        def resolve_and_count(*args: Any, **named: Any) -> Any:
            nonlocal num_values
            value = resolve(*args, **named)
            num_values += _num_values(value)
            if num_values > MAX_INSERTED_VALUES:
                raise ValueError(f"interpolations ${{...}} insert more than {MAX_INSERTED_VALUES:,} values")
            return value

        return resolve_and_count

    with (
        _replaced(Container, "_resolve_node_interpolation", counted(Container._resolve_node_interpolation)),
        _replaced(Container, "_evaluate_custom_resolver", counted(Container._evaluate_custom_resolver)),
    ):
        yield


@contextmanager
def own_hydra_state() -> Iterator[None]:
    """Restore Hydra's stored schemas and OmegaConf's resolvers after the block: a program may use both itself."""
    with HYDRA:
        stored, resolvers = _copied(ConfigStore.instance().repo), dict(BaseContainer._resolvers)
    try:
        yield
    finally:
        with HYDRA:
            # Hydra's own part, which its plugins fill when they are first used, stays.
            hydra_part = {
                name: node for name, node in ConfigStore.instance().repo.items() if name[0] == "_" or name == "hydra"
            }
            ConfigStore.instance().repo = stored | hydra_part
            BaseContainer._resolvers = resolvers


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of a group of Hydra's store with the same schemas, which nobody changes: Hydra copies what it loads."""
    return {name: _copied(item) if isinstance(item, dict) else item for name, item in group.items()}


class initialize_without_files(initialize_config_dir):  # noqa: N801  (as Hydra names these)
    """As `hydra.initialize(None)`, which reads the source of all callers to find their folder, and then uses none."""

    def __init__(self) -> None:
        self._gh_backup = get_gh_backup()
        version.setbase("1.3")
        Hydra.create_main_hydra2("app", create_config_search_path(None))


@contextmanager
def uncopied_store() -> Iterator[None]:
    """Within the block, Hydra does not copy its store: it copies what it loads. Saves a third of a composition."""
    store = ConfigStore.instance()
    vars(store)["__deepcopy__"] = lambda _: store
    try:
        yield
    finally:
        del vars(store)["__deepcopy__"]


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a function within the block, for this thread: others may use OmegaConf for something else."""
    with HYDRA:
        before, thread = getattr(owner, name), threading.get_ident()

        def choose(*args: Any, **named: Any) -> Any:
            return (function if threading.get_ident() == thread else before)(*args, **named)

        setattr(owner, name, choose)
        try:
            yield
        finally:
            setattr(owner, name, before)


def _num_values(value: Any) -> int:
    """The values in a node or plain value; a long text counts as several."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=False)
    elif isinstance(value, omegaconf.Node):
        value = value._value()
    match value:
        case dict():
            return 1 + sum(map(_num_values, value.values()))
        case list() | tuple():
            return 1 + sum(map(_num_values, value))
        case str():
            return 1 + len(value) // _VALUE_CHARACTERS
        case _:
            return 1


def check_num_jobs(overrides: list[Override]) -> None:
    """Reject a multirun of more jobs than anyone waits for, before a range of a billion values is written out."""
    num_jobs = 1
    for override in overrides:
        if not override.is_discrete_sweep():
            continue
        sweep = override.value()
        values = sweep.range() if isinstance(sweep, RangeSweep) else override.sweep_iterator()
        num_jobs *= sum(1 for _, _ in zip(range(MAX_JOBS + 1), values, strict=False))
        if num_jobs > MAX_JOBS:
            raise ConfigError(f"{override.input_line}: multirun (-m) would run more than {MAX_JOBS:,} jobs")


def read_variable(name: str, *default: Any) -> Any:
    """`${oc.env:NAME}` of the variables that are no secrets, with a default or without."""
    if name not in READABLE_VARIABLES and not str(name).startswith(VARIABLE_PREFIX):
        raise ValueError(
            f"{name} is not read from the environment, because recipes are published with the model: recipes read "
            f"{', '.join(READABLE_VARIABLES)} and {VARIABLE_PREFIX}*; write the value, or set {VARIABLE_PREFIX}{name}"
        )
    return oc.env(name, *default)


def refuse_hydra_settings(settings: DictConfig) -> None:
    """Refuse YAML that names code where `hydra.main` would run it. The compose API does not; the user should know."""
    plain = OmegaConf.to_container(settings, resolve=False)
    assert isinstance(plain, dict)
    for name, value in plain.items():
        if _names_code(value):
            raise ConfigError(f"hydra.{name!s} can name code to run, and YAML never runs code: leave it out")


def _names_code(value: Any) -> bool:
    """Whether settings name a class or function, except Hydra's launcher and sweeper, which are its defaults."""
    if isinstance(value, list):
        return any(map(_names_code, value))
    return isinstance(value, dict) and any(
        (key in ("_target_", "()") and not str(item).startswith("hydra._internal.")) or _names_code(item)
        for key, item in value.items()
    )


_PACKAGE = Path(__file__).resolve().parent.parent


def folder(name: str) -> Path:
    """The folder `configs` or `recipes`: inside an installed package, beside the package in a checkout."""
    for path in (_PACKAGE / name, _PACKAGE.parent / name):
        if path.is_dir():
            return path
    raise ConfigError(f"the folder {name} is neither in {_PACKAGE} nor in {_PACKAGE.parent}: reinstall embedtrain")


# `GROUP=NAME` chooses one of `choices(GROUP)`.
GROUPS = ("recipe", "model", "loss", "parallel")


def choices(group: str) -> list[str]:
    """The names that embedtrain offers for `group=NAME`."""
    if group == "loss":
        return sorted(LOSSES)
    directory = folder("recipes") if group == "recipe" else folder("configs") / group
    return sorted(path.stem for path in directory.glob("*.yaml"))


def register_recipes(without_loss: bool) -> None:
    """Store the schemas, and each file of recipes/ as an option of `recipe=`, without its `loss` if that is replaced.

    A search path cannot do the latter: the name of a group is that of its folder, and `recipes=` reads badly.
    """
    files = [(path, path.stat()) for path in sorted(folder("recipes").glob("*.yaml"))]
    states = tuple((path, status.st_mtime_ns, status.st_size) for path, status in files)
    ConfigStore.instance().repo.update(_schemas(), recipe=_recipes(states, without_loss))


# Kept, because reading and converting them takes longer than the composition of a recipe. Hydra copies what it loads.
@functools.lru_cache(maxsize=2)
def _recipes(states: tuple[tuple[Path, int, int], ...], without_loss: bool) -> dict[str, ConfigNode]:
    """The group `recipe` of Hydra's store."""
    nodes = {}
    for path, _, _ in states:
        recipe = OmegaConf.load(path)
        assert isinstance(recipe, DictConfig)
        if without_loss:
            recipe.pop("loss", None)
        nodes[path.name] = ConfigNode(path.name, recipe, "recipe", "_global_", None)
    return nodes


@functools.cache
def _schemas() -> dict[str, Any]:
    """The part of Hydra's store with the schema of a recipe and those of losses."""
    losses = {
        f"{name}.yaml": ConfigNode(f"{name}.yaml", OmegaConf.structured(kind), "loss", None, None)
        for name, kind in LOSSES.items()
    }
    return {"recipe_schema.yaml": ConfigNode("recipe_schema.yaml", recipe_schema(), None, None, None), "loss": losses}


def recipe_schema() -> DictConfig:
    """The dataclass of a recipe, into which any loss can be merged."""
    schema = OmegaConf.structured(Recipe)
    assert isinstance(schema, DictConfig)
    schema.loss = LossConfig()  # into the default, InfoNCE, only InfoNCE could be merged
    schema.model = ModelConfig()
    OmegaConf.set_struct(schema.model, False)  # the options of its kind, which is known after the composition
    return schema
