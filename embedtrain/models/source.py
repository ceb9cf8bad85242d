"""Opens a model: reads pooling, prompts, maximal length and heads from its files, without its weights.

A Hub id (downloaded to a directory), a Hugging Face directory, a sentence-transformers directory and a configuration
without weights all become a `ModelSource`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from embedtrain.config.kinds import load_kind
from embedtrain.config.loss_choices import VectorSimilarity
from embedtrain.config.model_checks import include_prompt_error
from embedtrain.config.pair_template import PairTemplate, pair_template
from embedtrain.config.recipe import ModelConfig, Pooling
from embedtrain.errors import ConfigError, ModelError
from embedtrain.models.attention_direction import require_pooling, set_attention_direction
from embedtrain.models.configuration import check_config, read_config, reject_typos
from embedtrain.models.directory_modules import read_directory_modules
from embedtrain.models.export_record import verify_settings
from embedtrain.models.file_references import read_json
from embedtrain.models.heads import dense_heads
from embedtrain.models.hub import one_line, resolve_directory
from embedtrain.models.late_interaction_files import late_interaction_format, read_late_interaction
from embedtrain.models.m3_files import has_m3_layers, m3_settings, require_m3_directory
from embedtrain.models.module_settings import (
    CROSS_ENCODER,
    SETTINGS,
    read_prompts,
    read_similarity,
    read_transformer_settings,
    read_truncate_dim,
    task_prompts,
)
from embedtrain.models.projection import token_projection
from embedtrain.models.rope import scale_rope, set_rope_theta
from embedtrain.models.score_head import (
    SCORE_MODULES,
    HeadSource,
    RerankerFiles,
    is_reranker,
    new_score_head,
    read_score_head,
    score_pooling,
)
from embedtrain.models.security import require_bounded_numbers, require_safe_files
from embedtrain.models.static_embedding import (
    is_static,
    read_static_config,
    read_static_max_length,
    require_static_options,
)
from embedtrain.models.types import ModelSource, Tokenization
from embedtrain.models.word_weights import (
    word_weights_of,
)
from embedtrain.utils.files import expand_user


def open_model_source(model: ModelConfig) -> ModelSource:
    """Find the model and read its configuration files.

    A ConfigError unless one of `model.path` and `model.config` is set, if the pooling is unknown, or an option is not
    supported; a ModelError if there is no such directory or repository, or it cannot be trained here.
    """
    source = _from_path(model) if model.config is None else _from_config(model)
    if is_static(source.config):
        require_static_options(model)
    config = set_attention_direction(source.config, model.bidirectional)
    set_rope_theta(config, model.rope_theta, "model.rope_theta")
    scale_rope(config, model.rope_scaling)
    if model.kind == "cross_encoder":
        pooling = score_pooling(config)
        return replace(source, config=config, pooling=pooling, include_prompt=True, normalize=False)
    if model.kind == "late_interaction":
        dense, token_vectors = token_projection(source.dense, source.settings, config, model.late_interaction)
        max_length = source.tokenization.max_length or token_vectors.max_length
        tokenization = replace(source.tokenization, max_length=max_length, append_eos=model.append_eos)
        return replace(
            source, config=config, dense=dense, settings=token_vectors, tokenization=tokenization, normalize=True
        )
    if model.kind == "m3":
        settings = m3_settings(source.directory, config, model.m3)
        return replace(
            source, config=config, settings=settings, pooling=Pooling.cls, include_prompt=True, normalize=True
        )
    if model.kind == "sparse":
        return replace(
            source,
            config=config,
            settings=word_weights_of(source.settings, source.directory, config, model),
            normalize=False,
        )
    if model.pooling is not None:
        require_pooling(config, model.pooling)
    if model.include_prompt is False and source.pooling is not Pooling.mean:
        raise ConfigError(include_prompt_error(source.pooling))
    if source.pooling is Pooling.weighted_mean and not source.include_prompt and not model.include_prompt:
        raise ConfigError(
            "model.pooling=weighted_mean: counts the tokens of the prompt, and the model has include_prompt=false: "
            "write model.include_prompt=true"
        )
    return replace(
        source,
        config=config,
        dense=dense_heads(source.dense, config, model.heads),
        include_prompt=source.include_prompt if model.include_prompt is None else model.include_prompt,
        tokenization=replace(source.tokenization, append_eos=model.append_eos),
    )


def _from_path(model: ModelConfig) -> ModelSource:
    if not model.path:
        raise ConfigError("no model: set model.path to a Hub id or a directory, or model.config")
    directory = resolve_directory(model.path, model.revision, "model.path", "model.revision")
    require_safe_files(directory, trust_remote_code=model.trust_remote_code)
    verify_settings(directory)
    if late_interaction := late_interaction_format(directory):
        source = _read_late_interaction(directory, model, late_interaction)
    else:
        has_modules = (directory / "modules.json").is_file()
        source = _read_modules(directory, model) if has_modules else _read_plain(directory, model)
    max_length = model.max_length or source.tokenization.max_length
    prompts = {"query": model.query_prompt, "document": model.document_prompt}
    return replace(
        source,
        pooling=model.pooling or source.pooling,
        commit=None if expand_user(model.path).is_dir() else directory.name,
        normalize=source.normalize if model.normalize is None else model.normalize,
        similarity=model.similarity or source.similarity,
        tokenization=replace(source.tokenization, max_length=max_length),
        prompts=_template_prompts(source)
        | source.prompts
        | task_prompts(model.lora.path)
        | {name: text for name, text in prompts.items() if text is not None},
    )


def _template_prompts(source: ModelSource) -> dict[str, str]:
    template = source.settings.template if source.kind.name == "cross_encoder" else None
    return {} if template is None else dict(template.prompts)


def _from_config(model: ModelConfig) -> ModelSource:
    if model.path is not None:
        raise ConfigError(
            "model.path and model.config are both set: the first loads weights, the second has none; keep one"
        )
    options: Any = model.config
    try:
        if isinstance(options, str):
            path = expand_user(options)
            require_bounded_numbers(path / "config.json" if path.is_dir() else path)
            config = AutoConfig.from_pretrained(options, trust_remote_code=model.trust_remote_code)
        else:
            values = dict(options)
            kind = values.pop("model_type")
            reject_typos(values, AutoConfig.for_model(kind))
            config = AutoConfig.for_model(kind, **values)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise ConfigError(
            f"model.config: {one_line(error)} (it is a mapping with `model_type`, or the path of a config.json)"
        ) from None
    check_config(config, "model.config")
    head: HeadSource | None = None
    if model.kind == "cross_encoder":
        head = replace(new_score_head(config, "model.config"), template=pair_template(model.pair_template))
    source = ModelSource(
        kind=load_kind(model.kind),
        settings=head,
        directory=None,
        config=config,
        pooling=_required(model, None, "a model made from model.config"),
        normalize=True if model.normalize is None else model.normalize,
        similarity=model.similarity or VectorSimilarity.cosine,
        tokenization=Tokenization(max_length=model.max_length),
        prompts={"query": "", "document": ""},
        trust_remote_code=model.trust_remote_code,
    )
    prompts = {"query": model.query_prompt, "document": model.document_prompt}
    return replace(
        source,
        prompts=source.prompts
        | _template_prompts(source)
        | {name: text for name, text in prompts.items() if text is not None},
    )


def _read_plain(directory: Path, model: ModelConfig) -> ModelSource:
    config = read_config(directory, trust_remote_code=model.trust_remote_code)
    return ModelSource(
        kind=load_kind(model.kind),
        settings=_score_head(RerankerFiles(directory=directory), config, model),
        directory=directory,
        config=config,
        pooling=_required(model, config, f"{directory}, which has no modules.json,"),
        normalize=True,
        tokenization=Tokenization(),
        trust_remote_code=model.trust_remote_code,
    )


def _read_modules(directory: Path, model: ModelConfig) -> ModelSource:
    """Read a sentence-transformers directory."""
    modules = read_directory_modules(directory)
    modules.require_supported(directory, model)
    transformer, pooling, kinds, dense = modules.transformer, modules.pooling, modules.kinds, modules.dense
    if transformer != directory.resolve():
        _require_own_transformer(transformer, directory, model)
    settings = read_transformer_settings(transformer)
    config = (
        read_static_config(transformer)
        if modules.is_static
        else read_config(transformer, trust_remote_code=model.trust_remote_code)
    )
    stored = read_json(directory / SETTINGS) if (directory / SETTINGS).is_file() else {}
    is_scorer = modules.is_scorer or (kinds == SCORE_MODULES and stored.get("model_type") == CROSS_ENCODER)
    if is_scorer and model.kind == "dense" and model.pooling is None:
        raise _is_reranker_error(str(directory), f"with {', '.join(kinds)}")
    scorer = RerankerFiles(
        directory=transformer,
        modules=kinds,
        pooling=pooling,
        dense=[part.directory for part in dense if part.directory is not None],
        logit_score=modules.logit_score,
        transformer=settings,
        settings=stored,
    )
    head = _score_head(scorer, config, model)
    if model.kind == "m3" and has_m3_layers(transformer):  # another model is only the backbone
        require_m3_directory(pooling, len(dense), str(directory / "modules.json"))
    return ModelSource(
        kind=load_kind(model.kind),
        settings=modules.words if model.kind == "sparse" else head,
        directory=transformer,
        config=config,
        pooling=pooling or _required(model, config, f"{directory}, whose modules.json has no Pooling,"),
        normalize=modules.normalize,
        include_prompt=modules.include_prompt,
        tokenization=Tokenization(
            max_length=read_static_max_length(transformer) if modules.is_static else settings.get("max_seq_length"),
            lowercase=bool(settings.get("do_lower_case")),
            is_sentence_transformers=True,
        ),
        # Prompts of a model with a chat template are instructions in it, which are part of the template's prompts.
        prompts={}
        if head is not None and ((pooling is not None and not is_scorer) or _is_stored(head.template, model))
        else read_prompts(directory / SETTINGS, model.kind),
        truncate_dim=read_truncate_dim(directory / SETTINGS) if model.kind == "dense" else None,
        similarity=read_similarity(directory / SETTINGS, model.kind)
        if model.kind in ("dense", "sparse")
        else VectorSimilarity.cosine,
        dense=tuple(dense) if model.kind == "dense" else (),
        trust_remote_code=model.trust_remote_code,
    )


def _read_late_interaction(directory: Path, model: ModelConfig, what: str) -> ModelSource:
    """Read a directory that is `what`, of any of the formats of late-interaction models."""
    if model.kind != "late_interaction":
        raise ConfigError(
            f"model.kind={model.kind}: {directory} is {what}, a late-interaction model; set model.kind=late_interaction"
        )
    files = read_late_interaction(directory)
    if files.transformer != directory:
        _require_own_transformer(files.transformer, directory, model)
    tokenization = Tokenization(
        lowercase=files.lowercase, is_sentence_transformers=True, prompt_tokens=files.prompt_tokens
    )
    return ModelSource(
        kind=load_kind(model.kind),
        settings=files.token_vectors,
        directory=files.transformer,
        config=read_config(files.transformer, trust_remote_code=model.trust_remote_code),
        pooling=Pooling.cls,  # without an effect
        dense=files.dense,
        normalize=True,
        tokenization=tokenization,
        prompts=files.prompts,
        trust_remote_code=model.trust_remote_code,
    )


def _require_own_transformer(transformer: Path, directory: Path, model: ModelConfig) -> None:
    if (transformer / "modules.json").is_file():
        raise ModelError(f"{transformer / 'modules.json'} is a second one inside {directory}: remove one of them")
    require_safe_files(transformer, trust_remote_code=model.trust_remote_code)


def _is_stored(template: PairTemplate | None, model: ModelConfig) -> bool:
    return template is not None and model.pair_template is None


def _score_head(files: RerankerFiles, config: PretrainedConfig, model: ModelConfig) -> HeadSource | None:
    return read_score_head(files, config, model) if model.kind == "cross_encoder" else None


def _is_reranker_error(what: str, kinds: str) -> ConfigError:
    return ConfigError(
        f"{what} is a reranker ({kinds}), which scores "
        "pairs: set model.kind=cross_encoder, or model.pooling to train an embedding model from its backbone"
    )


def _required(model: ModelConfig, config: PretrainedConfig | None, what: str) -> Pooling:
    if model.kind == "cross_encoder":
        return Pooling.cls  # the architecture decides, see `score_pooling`
    if model.kind in ("late_interaction", "m3", "sparse"):
        return Pooling.cls  # without an effect
    if model.pooling is None and config is not None and is_reranker(config):
        raise _is_reranker_error(what.split(",", maxsplit=1)[0], ", ".join(config.architectures or ()))
    if model.pooling is None:
        raise ConfigError(f"{what} defines no pooling: set pooling (model.pooling in a recipe) to cls, mean or last")
    return model.pooling
