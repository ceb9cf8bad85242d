"""The model of a command: from its options to those of a recipe, whose kind its files decide."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from embedtrain.config.command_options import EncodeOptions, RerankerConfig
from embedtrain.config.evaluation import Backend
from embedtrain.config.kinds import kind_of_files, load_kind
from embedtrain.config.recipe import LoraConfig, ModelConfig, ParallelConfig, Precision
from embedtrain.config.validation import model_option, model_options_named
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.formats.hub import resolve_directory
from embedtrain.formats.peft import open_adapter
from embedtrain.formats.source import CommandModel, open_model_source, require_trained, with_kind_of_files
from embedtrain.inference.loading.graph import load_graph
from embedtrain.inference.loading.load import LoadedModel, load_model
from embedtrain.models.types import ModelSource


def command_model_config(options: EncodeOptions, hybrid_weights: list[float] | None = None) -> CommandModel:
    """The options of the model, as a recipe has them."""
    return CommandModel(
        path=options.model,
        kind=options.kind or "",
        lora=LoraConfig(path=options.adapter),
        pooling=options.pooling,
        normalize=options.normalize,
        similarity=options.similarity,
        hybrid_weights=hybrid_weights,
        max_length=options.max_length,
        query_prompt=options.query_prompt,
        document_prompt=options.document_prompt,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )


def open_encoder_source(model: ModelConfig) -> tuple[ModelConfig, ModelSource]:
    """`open_model_source` of a model that encodes texts, and the options with its kind.

    The files decide the kind, unless the options are those of another kind than the default one. With an option of
    dense models, such as `model.pooling`, some other kinds are opened as a dense model.

    A ConfigError for an option that this kind of model does not have, and for a part that the files lack.
    """
    if model.path:
        model, what = with_kind_of_files(model, model.kind if model.kind != ModelConfig.kind else None)
        if load_kind(model.kind).scores_pairs:
            directory = resolve_directory(
                str(model.path), model.revision, model_option("path"), model_option("revision")
            )
            if not kind_of_files(directory)[0].scores_pairs:
                raise ConfigError(
                    f"kind={model.kind}: models of this kind score pairs, and are written as reranker (evaluate, "
                    f"search) or teacher (mine); {model.path} is {what}: leave kind out"
                )
            raise ConfigError(
                f"{model_option('path')}={model.path}: it is {what}, which scores pairs: write it as reranker "
                "(evaluate, search) "
                "or teacher (mine)"
            )
    source = open_model_source(model)
    if model.path:
        require_trained(source, model, what)
    if model.lora.path is not None and source.towers:
        folders = " or ".join(f"{model_option('path')}={tower.directory}" for tower in source.towers.values())
        raise ConfigError(
            f"{model_option('lora.path')}={model.lora.path}: is the adapter of one model, and {model.path} has one for "
            f"queries and another for documents; leave it out, or write {folders}"
        )
    adapter = open_adapter(model.lora)
    return model, source if adapter is None else replace(source, adapter=adapter.directory)


def load_encoder_model(
    model: ModelConfig,
    precision: Precision,
    world: World,
    names: Mapping[str, str] | None = None,
    *,
    backend: Backend = Backend.torch,
    check: Callable[[ModelSource], None] = lambda source: None,
) -> LoadedModel:
    """Open and load the model of a command that encodes texts. A collective.

    `names` are those of `model_options_named`, for errors; `check` raises for a model that the command cannot use,
    before its weights are read.
    """
    with model_options_named(MODEL_OPTION_NAMES if names is None else names):
        with world.fail_together("opening the model"):
            model, source = open_encoder_source(model)
            check(source)
        if backend is not Backend.torch:
            return load_graph(source, backend, world)
        return load_model(model, ParallelConfig(precision=precision), world, seed=0, source=source, work=None)


def open_reranker(reranker: RerankerConfig | None, world: World, *, trust_remote_code: bool) -> ModelSource | None:
    """Open the finished model of `reranker`, which scores pairs or compares vectors of tokens, without its weights.

    Errors name the option; no reranker stays None. A collective.
    """
    if reranker is None:
        return None
    with world.fail_together("opening the reranker"), model_options_named(RERANKER_OPTION_NAMES):
        source, adapter = (
            open_model_source(_reranker_model(reranker, trust_remote_code)),
            open_adapter(LoraConfig(path=reranker.adapter)),
        )
        has_no_weights = source.has_new_head and (adapter is None or not adapter.has_head)
        if has_no_weights:
            raise ConfigError(
                f"reranker={reranker.path}: it has no weights of a head that scores pairs; write a finished "
                "cross-encoder, such as a ...ForSequenceClassification with num_labels 1, or a late-interaction model; "
                "or set reranker.pair_template to qwen3, qwen3_vl, gemma or mxbai for a language model that answers "
                "yes or no"
            )
        if reranker.document_windows and not source.kind.scores_pairs:
            directory = resolve_directory(
                reranker.path, reranker.revision, model_option("path"), model_option("revision")
            )
            what = kind_of_files(directory)[1]
            raise ConfigError(
                f"reranker.document_windows=true: is for models that score pairs, and {reranker.path} is {what}; leave "
                "it out"
            )
        return source


def load_reranker(source: ModelSource, reranker: RerankerConfig, precision: Precision, world: World) -> LoadedModel:
    """Load the weights of an open reranker; errors name the option `reranker`. A collective."""
    if reranker.backend is not Backend.torch:
        return load_graph(source, reranker.backend, world)
    with model_options_named(RERANKER_OPTION_NAMES):
        model = _reranker_model(reranker, source.trust_remote_code)
        return load_model(model, ParallelConfig(precision=precision), world, seed=0, source=source, work=None)


def _reranker_model(reranker: RerankerConfig, trust_remote_code: bool) -> ModelConfig:
    """The options of the model; one whose files are of no kind that ranks is a cross-encoder's backbone."""
    config = reranker.model_config(trust_remote_code=trust_remote_code)
    directory = resolve_directory(str(config.path), config.revision, model_option("path"), model_option("revision"))
    return with_kind_of_files(config)[0] if kind_of_files(directory)[0].reranks else config


MODEL_OPTION_NAMES = {
    "path": "model",
    "lora.path": "adapter",
    **{
        name: name
        for name in (
            "pooling",
            "normalize",
            "similarity",
            "hybrid_weights",
            "max_length",
            "revision",
            "trust_remote_code",
        )
    },
}
RERANKER_OPTION_NAMES = {
    "path": "reranker",
    "lora.path": "reranker.adapter",
    "trust_remote_code": "trust_remote_code",
    **{
        name: f"reranker.{name}" for name in ("max_length", "revision", "pair_template", "score_tokens", "score_labels")
    },
}
TEACHER_OPTION_NAMES = {
    "path": "teacher",
    "max_length": "teacher_max_length",
    "revision": "teacher_revision",
    "pair_template": "teacher_pair_template",
    "score_labels": "teacher_score_labels",
    "trust_remote_code": "trust_remote_code",
}
