"""Opens and loads the reranker of a command: a cross-encoder, or a late-interaction model."""

from dataclasses import replace

from embedtrain.config.evaluation import Backend
from embedtrain.config.recipe import ParallelConfig, Precision
from embedtrain.config.reranker import RerankerConfig
from embedtrain.config.validation import written
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.inference.loading.command_model import RERANKER_OPTION_NAMES, command_option_names
from embedtrain.inference.loading.encoder_model import late_interaction_of
from embedtrain.inference.loading.graph import load_graph
from embedtrain.inference.loading.load import LoadedModel, load_model
from embedtrain.models.adapter_files import open_adapter
from embedtrain.models.source import open_model_source
from embedtrain.models.types import ModelSource


def open_reranker(reranker: RerankerConfig | None, world: World, *, trust_remote_code: bool) -> ModelSource | None:
    """The files of a finished reranker; None without one. Errors name the option `reranker`. A collective.

    Commands open it before they load other models, which may take minutes.
    """
    if reranker is None:
        return None
    with world.fail_together("opening the reranker"), command_option_names(RERANKER_OPTION_NAMES):
        config = reranker.model_config(trust_remote_code=trust_remote_code)
        what = late_interaction_of(config)
        if what is not None:
            for name in ("pair_template", "score_tokens", "score_labels", "document_windows"):
                if getattr(reranker, name) != getattr(RerankerConfig(path=""), name):
                    raise ConfigError(
                        f"reranker.{name}={written(getattr(reranker, name))}: is of cross-encoders, and "
                        f"{reranker.path} is {what}; leave it out"
                    )
            return open_model_source(replace(config, kind="late_interaction"))
        source, adapter = open_model_source(config), open_adapter(config.lora)
        if source.kind.name != "cross_encoder" or (
            source.settings.is_new and (adapter is None or not adapter.has_head)
        ):
            raise ConfigError(
                f"reranker={reranker.path}: it has no weights of a head that scores pairs; write a finished "
                "cross-encoder, such as a ...ForSequenceClassification with num_labels 1, or a late-interaction model; "
                "or set reranker.pair_template to qwen3, gemma or mxbai for a language model that answers yes or no"
            )
        return source


def load_reranker(source: ModelSource, reranker: RerankerConfig, precision: Precision, world: World) -> LoadedModel:
    """Load the weights of an open reranker; errors name the option `reranker`. A collective."""
    if reranker.backend is not Backend.torch:
        return load_graph(source, reranker.backend, world)
    config = replace(reranker.model_config(trust_remote_code=source.trust_remote_code), kind=source.kind.name)
    with command_option_names(RERANKER_OPTION_NAMES):
        return load_model(config, ParallelConfig(precision=precision), world, seed=0, source=source, work=None)
