"""Errors of Hydra and OmegaConf as one sentence: the option, its value, what is allowed, the nearest name."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from embedtrain.config.recipe import Recipe
from embedtrain.config.validation import did_you_mean, unknown_option

_NO_PACKAGE = "unknown option recipe: a recipe of your own must begin with the line `# @package _global_`"
_LOSSES_EXAMPLE = "must be a list, such as loss.losses=[{name: infonce}, {name: orthogonal, weight: 0.1}]"


def explain_hydra_error(error: Exception, values: Mapping[str, Any] | None = None) -> str:
    """The message for an error that Hydra or OmegaConf raised.

    Args:
        error: the exception.
        values: what the user wrote, by full option name.
    """
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        own = "; your own are DIR/recipe/NAME.yaml, with --config-dir DIR" if group == "recipe" else ""
        hint = did_you_mean(name, error.options or (), cutoff=0.4)
        return f"{group}={name}: there is no such {group}{hint} Available are {', '.join(error.options or ())}{own}"
    if isinstance(error, OverrideParseException):
        message = " ".join(error.message.partition("See https")[0].split())
        return f"{error.override}: {message}; write option=value, with quotes around a value that has blanks"
    cause = _omegaconf_error(error)
    if cause is None:
        if "@recipe." in str(error):  # the package of the options of a recipe without the line
            return _NO_PACKAGE
        return " ".join(str(error).split())
    option = cause.full_key or ""
    holder = cause.object_type
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        if holder is Recipe and option == "recipe":
            return _NO_PACKAGE
        if dataclasses.is_dataclass(holder):
            return unknown_option(option, [field.name for field in dataclasses.fields(holder)])
        parent, _, key = option.rpartition(".")
        return f"{parent} is a mapping: write {parent}={{{key}: ...}}"
    message = " ".join(str(cause).partition("full_key:")[0].split())
    if re.search(r"Merge error: \w+Config is not a subclass of \w+Config", message):
        return f"loss takes one loss; for several write loss=combined and loss.losses, which {_LOSSES_EXAMPLE}"
    if option == "loss.losses":
        return f"loss.losses {_LOSSES_EXAMPLE}"
    value = (values or {}).get(option)
    written = option if value is None else f"{option}={value}"
    if "is not a ListConfig" in message:
        return f"{written}: must be a list, such as {option}=[{'...' if value is None else value}]"
    return f"{written}: {message}" if option else message


def _omegaconf_error(error: BaseException | None) -> OmegaConfBaseException | None:
    """The error of OmegaConf that led to this one; Hydra chains some explicitly and some not."""
    while error is not None and not isinstance(error, OmegaConfBaseException):
        error = error.__cause__ or error.__context__
    return error
