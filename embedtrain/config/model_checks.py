"""Options of a model that cannot work, as far as that can be told before it is opened."""

from embedtrain.config.rope import rope_problem
from embedtrain.config.schema import ModelConfig, Pooling
from embedtrain.errors import ConfigError


def check_model(model: ModelConfig) -> None:
    """Refuse what no model can have.

    Raises:
        ConfigError: the first such option.
    """
    if model.include_prompt is False and model.pooling not in (None, Pooling.mean):
        raise ConfigError(no_prompt_to_leave_out(model.pooling))
    if model.rope_scaling is not None and (problem := rope_problem(model.rope_scaling)) is not None:
        raise ConfigError(problem)


def no_prompt_to_leave_out(pooling: Pooling) -> str:
    """The sentence to say where a vector is one token's."""
    return (
        f"model.include_prompt=false is for model.pooling=mean: with {pooling.value} a vector is one token's, and no "
        "prompt is in it to be left out; leave it out (null)"
    )
