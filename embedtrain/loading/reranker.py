"""Loads the reranker of a command."""

from embedtrain.config.recipe import ParallelConfig, Precision
from embedtrain.config.reranker import RerankerConfig
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.loading.command_model import RERANKER_OPTION_NAMES, command_option_names
from embedtrain.loading.load import LoadedModel, load_model
from embedtrain.models.source import open_model_source


def load_reranker(
    reranker: RerankerConfig, precision: Precision, world: World, *, trust_remote_code: bool
) -> LoadedModel:
    """A finished cross-encoder; errors name the option `reranker`. A collective."""
    config = reranker.model_config(trust_remote_code=trust_remote_code)
    with command_option_names(RERANKER_OPTION_NAMES):
        with world.fail_together("opening the reranker"):
            source = open_model_source(config)
            if source.head is None or source.head.is_new:
                raise ConfigError(
                    f"reranker={reranker.path}: it has no weights of a head that scores pairs; write a finished "
                    "cross-encoder, such as a ...ForSequenceClassification with num_labels 1"
                )
        return load_model(config, ParallelConfig(precision=precision), world, seed=0, source=source, work=None)
