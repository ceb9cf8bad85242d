"""Opens and loads the reranker of a command."""

from embedtrain.config.recipe import ParallelConfig, Precision
from embedtrain.config.reranker import RerankerConfig
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.loading.command_model import RERANKER_OPTION_NAMES, command_option_names
from embedtrain.loading.load import LoadedModel, load_model
from embedtrain.models.adapter_files import open_adapter
from embedtrain.models.source import ModelSource, open_model_source


def open_reranker(reranker: RerankerConfig | None, world: World, *, trust_remote_code: bool) -> ModelSource | None:
    """The files of a finished cross-encoder; None without one. Errors name the option `reranker`. A collective.

    Commands open it before they load other models, which may take minutes.
    """
    if reranker is None:
        return None
    with world.fail_together("opening the reranker"), command_option_names(RERANKER_OPTION_NAMES):
        config = reranker.model_config(trust_remote_code=trust_remote_code)
        source, adapter = open_model_source(config), open_adapter(config.lora)
        if source.head is None or (source.head.is_new and (adapter is None or not adapter.has_head)):
            raise ConfigError(
                f"reranker={reranker.path}: it has no weights of a head that scores pairs; write a finished "
                "cross-encoder, such as a ...ForSequenceClassification with num_labels 1, or set "
                "reranker.pair_template to qwen3, gemma or mxbai for a language model that answers yes or no"
            )
        return source


def load_reranker(source: ModelSource, reranker: RerankerConfig, precision: Precision, world: World) -> LoadedModel:
    """Load the weights of an open cross-encoder; errors name the option `reranker`. A collective."""
    config = reranker.model_config(trust_remote_code=source.trust_remote_code)
    with command_option_names(RERANKER_OPTION_NAMES):
        return load_model(config, ParallelConfig(precision=precision), world, seed=0, source=source, work=None)
