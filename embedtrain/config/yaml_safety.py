"""What YAML may not do while Hydra composes it: name code to run, or read credentials from the environment."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

_CREDENTIALS = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY|APIKEY", re.IGNORECASE)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Refuse, before Hydra looks at them, the settings of its own through which YAML can name code to run.

    Callbacks, launchers and sweepers are instantiated from `_target_`, logging from `()`. All configurations
    pass through `ConfigLoaderImpl.load_configuration`, and packages on the search path, which are imported, through
    `ConfigRepository.initialize_sources` (private names, checked on Hydra 1.3.8).
    """
    load, search = ConfigLoaderImpl.load_configuration, ConfigRepository.initialize_sources
    OmegaConf.register_new_resolver("oc.env", _environment, replace=True)

    def checked(loader: ConfigLoaderImpl, config_name: str | None, *args: Any, **kwargs: Any) -> DictConfig:
        try:
            config = load(loader, config_name, *args, **kwargs)
        except yaml.YAMLError as error:  # which Hydra would print with its whole traceback
            raise ConfigCompositionException(str(error)) from None
        if config_name is None:  # `--hydra-help` prints Hydra's own and runs nothing
            return config
        node = config.hydra
        used = [name for name in ("job_logging", "hydra_logging") if not node[name] or node[name].root is not None]
        used += ["callbacks"] * bool(node.callbacks)
        for name in ("launcher", "sweeper"):
            if not str(node[name].get("_target_")).startswith("hydra._internal.core_plugins."):
                used.append(name)
        if used:
            raise ConfigCompositionException(
                f"hydra.{used[0]} can name code to run, and YAML never runs code: leave it out"
            )
        return config

    def of_folders(repository: ConfigRepository, searched: ConfigSearchPath) -> None:
        for place in searched.get_path():
            if str(place.path).startswith("pkg:") and place.provider != "hydra":
                raise ConfigCompositionException(
                    f"hydra.searchpath names {place.path}, a package, which would be imported: write a folder instead"
                )
        search(repository, searched)

    ConfigLoaderImpl.load_configuration = checked  # type: ignore[method-assign, assignment]
    ConfigRepository.initialize_sources = of_folders  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ConfigLoaderImpl.load_configuration = load  # type: ignore[method-assign]
        ConfigRepository.initialize_sources = search  # type: ignore[method-assign]


def _environment(name: str, *default: Any) -> Any:
    """`${oc.env:NAME}`: what a recipe resolves to is written to recipe.yaml, the model card and wandb."""
    if _CREDENTIALS.search(name):
        raise ValueError(f"{name} is not read from the environment: recipes are written down and published")
    return oc.env(name, *default)
