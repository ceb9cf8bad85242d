"""Checks of loss options that cannot work, and what Matryoshka options of a loss amount to."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from embedtrain.config.code import is_code_path
from embedtrain.config.evaluation import VectorPrecision, check_kind_of_vectors
from embedtrain.config.kinds import Kind, kinds
from embedtrain.config.losses import (
    LOSSES,
    SIGLIP_TEMPERATURE,
    CandidateSet,
    CombinedConfig,
    CustomConfig,
    DistillEmbeddingsConfig,
    DistillSimilaritiesConfig,
    Divergence,
    Hardness,
    Implementation,
    InfoNCEConfig,
    KDLossType,
    LayerWeighting,
    LossConfig,
    LossDirection,
    M3LossConfig,
    MatryoshkaConfig,
    MatryoshkaWeighting,
    OnMissing,
    OrthogonalConfig,
    PartitionMode,
    PrecisionSides,
    SentenceTransformersConfig,
    SigLIPConfig,
    Similarity,
    TeacherConfig,
    TeacherMap,
    XTRConfig,
)
from embedtrain.config.names import unknown_loss
from embedtrain.config.options import check_values
from embedtrain.config.row_requirements import (
    SENTENCE_TRANSFORMERS_LOSSES,
    UNSUPPORTED_LOSSES,
    ScoreRequirement,
)
from embedtrain.config.validation import OptionChecks, did_you_mean, written
from embedtrain.errors import ConfigError

# Of loss=sentence_transformers, checked without importing sentence-transformers.
MATRYOSHKA = "MatryoshkaLoss"
LOSSES_WITH_GUIDE = ("GISTEmbedLoss", "CachedGISTEmbedLoss")

_MATRIX = ("cos_sim", "dot_score", "euclidean_sim", "manhattan_sim")
_PAIRWISE = (
    "pairwise_cos_sim",
    "pairwise_dot_score",
    "pairwise_euclidean_sim",
    "pairwise_manhattan_sim",
    "pairwise_angle_sim",
)
_SIAMESE = ("EUCLIDEAN", "MANHATTAN", "COSINE_DISTANCE")
_BATCH = ("cosine_distance", "euclidean_distance")

# The functions that an argument may name. They are looked up by these names, never evaluated.
FUNCTION_ARGUMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "MultipleNegativesRankingLoss": {"similarity_fct": _MATRIX},
    "MultipleNegativesSymmetricRankingLoss": {"similarity_fct": _MATRIX},
    "CachedMultipleNegativesRankingLoss": {"similarity_fct": _MATRIX},
    "CachedMultipleNegativesSymmetricRankingLoss": {"similarity_fct": _MATRIX},
    "GlobalOrthogonalRegularizationLoss": {"similarity_fct": _MATRIX},
    "CoSENTLoss": {"similarity_fct": _PAIRWISE},
    "DistillKLDivLoss": {"similarity_fct": _PAIRWISE},
    "MarginMSELoss": {"similarity_fct": _PAIRWISE},
    "TripletLoss": {"distance_metric": ("COSINE", "EUCLIDEAN", "MANHATTAN")},
    "ContrastiveLoss": {"distance_metric": _SIAMESE},
    "OnlineContrastiveLoss": {"distance_metric": _SIAMESE},
    "BatchAllTripletLoss": {"distance_metric": _BATCH},
    "BatchHardTripletLoss": {"distance_metric": _BATCH},
    "BatchHardSoftMarginTripletLoss": {"distance_metric": _BATCH},
    "BatchSemiHardTripletLoss": {"distance_metric": _BATCH},
}

# Arguments that cannot be set, and why.
_REJECTED = {
    "model": "the model is that of the recipe; leave it out",
    "guide": "set the guide beside class_name instead: guide=a directory or a Hub id",
    "gather_across_devices": "the batch of all ranks is always gathered; leave it out",
    "loss_fct": "is a function, which YAML cannot name; leave it out",
    "cos_score_transformation": "is a function, which YAML cannot name; leave it out",
}


def check_loss(loss: LossConfig) -> None:
    """Reject options of the recipe's loss that cannot work: a ConfigError of the first check that fails."""
    OptionChecks(loss, "loss.").require(loss.weight == 1.0, "weight", "is for the parts of loss=combined; leave it out")
    _check(loss, "loss")


def check_loss_name(name: Any, option: str) -> str:
    """The name itself if a loss has it, else a ConfigError with the nearest name."""
    if str(name) not in LOSSES:
        raise ConfigError(unknown_loss(option, str(name)))
    return str(name)


def guide_paths(loss: LossConfig) -> list[str]:
    """The guide and teacher models of a loss, without duplicates."""
    match loss:
        case CombinedConfig(losses=parts):
            return list(dict.fromkeys(path for part in parts for path in guide_paths(part)))
        case InfoNCEConfig(guide=path) | SentenceTransformersConfig(guide=path):
            return [] if path is None else [path]
        case TeacherConfig():
            return loss.teacher_paths
        case _:
            return []


def _check(loss: LossConfig, option: str) -> None:
    """Check one loss, named `option` in the recipe (such as `loss.losses[1]`), and the parts of a combined one."""
    check = OptionChecks(loss, f"{option}.")
    check.require(
        type(loss) is LOSSES[check_loss_name(loss.name, f"{option}.name")],
        "name",
        f"does not choose a loss; write loss={loss.name}",
    )
    check_values(loss, f"{option}.")
    of_matryoshka = OptionChecks(loss.matryoshka, f"{option}.matryoshka.")
    _check_dims(of_matryoshka)
    _check_precisions(loss, of_matryoshka)
    _check_layers(loss, of_matryoshka)
    match loss:
        case InfoNCEConfig():
            _check_temperature_bounds(loss, check)
            _check_infonce(loss, check)
        case M3LossConfig():
            _check_m3(loss, check)
        case XTRConfig() | SigLIPConfig():
            _check_temperature_bounds(loss, check)
        case OrthogonalConfig():
            check.require(
                loss.mean_weight > 0 or loss.second_moment_weight > 0,
                "mean_weight",
                "second_moment_weight is 0 as well",
            )
        case TeacherConfig():
            check_teacher_loss(loss, check)
        case CustomConfig():
            _check_custom(loss, check)
        case SentenceTransformersConfig():
            check_sentence_transformers(loss, option)
        case CombinedConfig():
            _check_combined(loss, option)
    _check_layer_kl(loss, of_matryoshka)


def _check_m3(loss: M3LossConfig, check: OptionChecks) -> None:
    weights = loss.loss_weights
    check.require(
        len(weights) == 4 and all(0 <= weight < math.inf for weight in weights) and any(weights),
        "loss_weights",
        "must be 4 weights, not all 0: of the dense, lexical and multi-vector scores, and of their sum",
    )
    check.require(
        loss.self_distillation or loss.self_distillation_start_step == 0,
        "self_distillation_start_step",
        "has no effect without self_distillation; leave it out",
    )
    check.require(
        loss.kd_loss_type is not KDLossType.none or loss.teacher_temperature == 1.0,
        "teacher_temperature",
        "has no effect with kd_loss_type=none; leave it out, or write kd_loss_type=m3_kd_loss",
    )


def _check_custom(loss: CustomConfig, check: OptionChecks) -> None:
    check.require(is_code_path(loss.path), "path", "must be module:Class, such as my_losses:MyLoss")
    check.require(
        isinstance(loss.kwargs, dict) and all(isinstance(name, str) for name in loss.kwargs),
        "kwargs",
        "must be a mapping of the constructor's arguments, such as {margin: 0.2}",
    )
    check.require(not (loss.label and loss.scores), "label", "rows have one column of scores or classes, not both")


def _check_precisions(loss: LossConfig, check: OptionChecks) -> None:
    wrapper: MatryoshkaConfig = check.options
    precisions, weights = wrapper.precisions, wrapper.precision_weights
    check.require(
        precisions is None or (bool(precisions) and len(set(precisions)) == len(precisions)),
        "precisions",
        "must be different precisions, such as [float,int8,binary]; null switches it off",
    )
    check.require(
        VectorPrecision.uint8 not in (precisions or ()), "precisions", "uint8 has the steps of int8; write int8"
    )
    if weights is not None:
        check.require(
            precisions is not None and len(weights) == len(precisions),
            "precision_weights",
            f"must have one weight for each of precisions={written(precisions)}",
        )
        check.require(all(0 < weight < math.inf for weight in weights), "precision_weights", "must be above 0")
    check.require(
        wrapper.precisions_per_step is None or 2 <= wrapper.precisions_per_step <= len(precisions or ()),
        "precisions_per_step",
        f"must be from 2 to the number of precisions={written(precisions)}; null trains on all of them",
    )
    is_quantised = any(precision is not VectorPrecision.float for precision in precisions or ())
    for name in ("precision_warmup", "precision_sides"):
        is_set = getattr(wrapper, name) != getattr(MatryoshkaConfig, name)
        check.require(is_quantised or not is_set, name, "has no effect without int8 or binary in precisions")
    check.require(
        not wrapper.precision_warmup or VectorPrecision.float in (precisions or ()),
        "precision_warmup",
        f"starts with float vectors, which precisions={written(precisions)} leaves out; add float",
    )
    check.require(
        wrapper.precision_sides is PrecisionSides.both or loss.row_requirements.documents,
        "precision_sides",
        f"loss={loss.name} takes rows of one text, without documents; leave it out",
    )


def _check_temperature_bounds(loss: InfoNCEConfig | SigLIPConfig | XTRConfig, check: OptionChecks) -> None:
    bounds = loss.temperature_bounds
    if bounds is None:  # those of the kind of model, see `Kind.temperature_bounds`
        return
    check.require(
        len(bounds) == 2 and 0 < bounds[0] < bounds[1] < math.inf,
        "temperature_bounds",
        "must be two numbers above 0, the smaller first, such as [0.01,1.0]",
    )
    check.require(
        not loss.learn_temperature or loss.temperature is None or bounds[0] <= loss.temperature <= bounds[1],
        "temperature",
        f"must be within temperature_bounds={written(bounds)}",
    )


def _check_infonce(loss: InfoNCEConfig, check: OptionChecks) -> None:
    directions = loss.directions
    check.require(
        LossDirection.query_document in directions and len(set(directions)) == len(directions),
        "directions",
        "must have query_document, the direction with the positive, "
        f"and any of {', '.join(list(LossDirection)[1:])}, each once",
    )
    without_positive = [
        direction
        for direction in directions
        if direction in (LossDirection.query_query, LossDirection.document_document)
    ]
    check.require(
        loss.partition_mode is PartitionMode.joint or not without_positive,
        "partition_mode",
        f"a softmax over {written(without_positive)} has no positive; write partition_mode=joint",
    )
    if not loss.in_batch_negatives:
        check.require(
            directions == [LossDirection.query_document],
            "directions",
            "must be [query_document] with in_batch_negatives=false",
        )
        check.require(
            loss.hardness is not Hardness.in_batch, "hardness", "there are none with in_batch_negatives=false"
        )
    check.require(
        not loss.mixes_negatives or loss.similarity is not Similarity.dot,
        "similarity",
        "mixed negatives have length 1; write cosine, or leave mixed_pairs and mixed_list out",
    )
    check.require(
        not loss.mixes_negatives or loss.partition_mode is PartitionMode.joint or len(directions) == 1,
        "partition_mode",
        "mixed negatives are of one softmax; write joint, or leave mixed_pairs and mixed_list out",
    )
    check.require(
        (loss.hardness is Hardness.none) == (loss.hardness_strength == 0),
        "hardness",
        f"one of hardness and hardness_strength={loss.hardness_strength} has no effect without the other",
    )
    check.require(loss.guide is not None or loss.guide_margin == 0, "guide_margin", "has no effect without guide")


def _check_combined(loss: CombinedConfig, option: str) -> None:
    OptionChecks(loss, f"{option}.").require(
        bool(loss.losses), "losses", "must name losses, such as [{name: infonce}, {name: distill_scores, weight: 0.5}]"
    )
    for index, part in enumerate(loss.losses):
        part_option = f"{option}.losses[{index}]"
        if isinstance(part, CombinedConfig):
            raise ConfigError(f"{part_option}.name=combined: a combination cannot hold another; list its parts here")
        check = OptionChecks(part.matryoshka, f"{part_option}.matryoshka.")
        for name in ("dims", "layers"):
            check.require(
                getattr(loss.matryoshka, name) is None or getattr(part.matryoshka, name) is None,
                name,
                f"{option}.matryoshka.{name} is set as well; keep one",
            )
        check.require(
            part.matryoshka.precisions is None,
            "precisions",
            f"is for the whole loss; write {option}.matryoshka.precisions",
        )
        # The dimensions of the combination are those of each part.
        dims = loss.matryoshka.dims or part.matryoshka.dims
        _check(replace(part, matryoshka=replace(part.matryoshka, dims=dims)), part_option)
    _check_same_rows(loss, option)


def _check_same_rows(loss: CombinedConfig, option: str) -> None:
    """Reject parts that require different rows."""
    requirements = [part.row_requirements for part in loss.losses]
    of_classes = [row.loss for row in requirements if row.label]
    of_pairs = [row.loss for row in requirements if row.documents]
    if of_classes and of_pairs:
        raise ConfigError(
            f"{option}.losses: {of_classes[0]} takes rows of one text and its class, {of_pairs[0]} rows of a query and "
            "documents; they cannot be trained on the same rows"
        )
    of_scores = [row.loss for row in requirements if row.scores is not ScoreRequirement.none]
    of_vectors = [row.loss for row in requirements if row.vectors]
    if of_vectors and (of_scores or of_classes):
        raise ConfigError(
            f"{option}.losses: rows have one column of values, which holds vectors for {of_vectors[0]} and scores or "
            f"classes for {(of_scores or of_classes)[0]}; give {of_vectors[0]} a `teacher` instead"
        )


def check_teacher_loss(loss: TeacherConfig, check: OptionChecks) -> None:
    """Reject options of a loss with a teacher's vectors that have no effect or no meaning together."""
    teachers, weights = loss.teachers, loss.teacher_weights
    if teachers is not None:
        check.require(loss.teacher is None, "teacher", "loss.teachers is set as well; keep one")
        check.require(
            len(teachers) > 1 and len(set(teachers)) == len(teachers) and all(teachers),
            "teachers",
            "must be two or more different models or directories of vectors; write teacher=PATH for one",
        )
    if weights is not None:
        check.require(
            teachers is not None and len(weights) == len(teachers) and all(0 < weight < math.inf for weight in weights),
            "teacher_weights",
            "must be a number above 0 for each of teachers",
        )
    check.require(
        loss.on_missing is OnMissing.stop or bool(loss.teacher_paths),
        "on_missing",
        "has no effect without a directory of vectors; write loss.teacher",
    )
    match loss:
        case DistillSimilaritiesConfig():
            _check_distill_similarities(loss, check)
        case DistillEmbeddingsConfig():
            check.require(
                not loss.project or loss.matryoshka.dims is None,
                "project",
                "a projection takes all dimensions; it cannot be combined with matryoshka.dims",
            )
            check.require(
                loss.teacher_map is None or not loss.project,
                "teacher_map",
                "project=true maps the model's vectors to the teacher's dimensions already; keep one",
            )
            check.require(
                loss.teacher_map is not TeacherMap.pca or loss.teacher is not None,
                "teacher_map",
                "needs one teacher, a directory of embedtrain vectors; write loss.teacher, or another map",
            )


def _check_distill_similarities(loss: DistillSimilaritiesConfig, check: OptionChecks) -> None:
    directions = loss.directions
    check.require(
        bool(directions) and len(set(directions)) == len(directions),
        "directions",
        f"must be one or more of {', '.join(LossDirection)}, each once",
    )
    if loss.candidates is CandidateSet.row:
        check.require(
            directions == [LossDirection.query_document],
            "directions",
            "must be [query_document] with candidates=row",
        )
        check.require(
            loss.implementation is Implementation.auto,
            "implementation",
            "has no effect with candidates=row, which has no matrix of scores; leave it out",
        )
    for name in ("temperature", "teacher_temperature"):
        check.require(
            loss.divergence is not Divergence.mse or getattr(loss, name) is None,
            name,
            f"has no effect with divergence={written(Divergence.mse)}, which has no softmax; leave it out",
        )


def matryoshka_dims_of(loss: LossConfig) -> set[int]:
    """The dimensions on which a loss, or a part of it, also trains."""
    if isinstance(loss, CombinedConfig):
        return set(loss.matryoshka.dims or ()).union(*(matryoshka_dims_of(part) for part in loss.losses))
    of_class = loss.arguments if isinstance(loss, SentenceTransformersConfig) else None
    return set(loss.matryoshka.dims or (of_class or {}).get("matryoshka_dims") or ())


def matryoshka_layers_of(loss: LossConfig) -> set[int]:
    """The numbers of layers after which a loss, or a part of it, also trains."""
    parts = loss.losses if isinstance(loss, CombinedConfig) else []
    return set(loss.matryoshka.layers or ()).union(*(matryoshka_layers_of(part) for part in parts))


def dim_weights(wrapper: MatryoshkaConfig) -> list[float]:
    """The weight of each of `dims`, in the order of the option."""
    dims = wrapper.dims or []
    if wrapper.dim_weights is not None:
        return wrapper.dim_weights
    if wrapper.dim_weighting is MatryoshkaWeighting.uniform:
        return [1.0] * len(dims)
    largest_first = sorted(dims, reverse=True)
    return [math.sqrt(dim / largest_first[0]) / (largest_first.index(dim) + 1) for dim in dims]


def layer_weights(wrapper: MatryoshkaConfig) -> list[float]:
    """The weight of each of `layers`, in the order of the option."""
    layers = wrapper.layers or []
    if wrapper.layer_weights is not None:
        return wrapper.layer_weights
    match wrapper.layer_weighting:
        case LayerWeighting.uniform:
            return [1.0] * len(layers)
        case LayerWeighting.log:
            return [1 / (1 + math.log(layer)) for layer in layers]
        case LayerWeighting.linear:
            return [1 / layer for layer in layers]


def _check_dims(check: OptionChecks) -> None:
    wrapper: MatryoshkaConfig = check.options
    dims = wrapper.dims
    _check_numbers(check, "dims", "dim_weights", "[768,256,64]")
    check.require(
        wrapper.dim_weighting is MatryoshkaWeighting.uniform or (dims is not None and wrapper.dim_weights is None),
        "dim_weighting",
        "chooses the weights of dims, without dim_weights",
    )
    check.require(
        wrapper.dims_per_step is None or 2 <= wrapper.dims_per_step <= len(dims or ()),
        "dims_per_step",
        f"must be from 2 to the number of dims={written(dims)}; null trains on all of them",
    )


def _check_layers(loss: LossConfig, check: OptionChecks) -> None:
    wrapper: MatryoshkaConfig = check.options
    layers = wrapper.layers
    _check_numbers(check, "layers", "layer_weights", "[3,6]")
    check.require(
        wrapper.layer_weighting is LayerWeighting.uniform or (layers is not None and wrapper.layer_weights is None),
        "layer_weighting",
        "chooses the weights of layers, without layer_weights",
    )
    check.require(
        wrapper.layers_per_step is None or 1 <= wrapper.layers_per_step <= len(layers or ()),
        "layers_per_step",
        f"must be from 1 to the number of layers={written(layers)}; null trains all of them",
    )
    check.require(
        wrapper.precisions is None or layers is not None or not matryoshka_layers_of(loss),
        "precisions",
        "is for the whole loss, and a part has layers; write them for the whole loss as well",
    )
    check.require(wrapper.layer_kl == 0 or layers is not None, "layer_kl", "has no effect without layers")


def _check_layer_kl(loss: LossConfig, check: OptionChecks) -> None:
    """Reject `layer_kl` of a loss, whose other options are checked, without pairs of queries and documents."""
    check.require(
        loss.matryoshka.layer_kl == 0 or not loss.row_requirements.label,
        "layer_kl",
        f"compares queries with documents, and loss={loss.name} takes rows of one text; leave it out",
    )


def _check_numbers(check: OptionChecks, option: str, weights_option: str, example: str) -> None:
    numbers, weights = getattr(check.options, option), getattr(check.options, weights_option)
    check.require(
        numbers is None or (bool(numbers) and min(numbers) >= 1 and len(set(numbers)) == len(numbers)),
        option,
        f"must be different numbers from 1 on, such as {example}; null switches it off",
    )
    if weights is not None:
        check.require(
            numbers is not None and len(weights) == len(numbers),
            weights_option,
            f"must have one weight for each of {option}={written(numbers)}",
        )
        check.require(all(0 < weight < math.inf for weight in weights), weights_option, "must be above 0")


def check_sentence_transformers(loss: SentenceTransformersConfig, option: str = "loss") -> None:
    """Reject options, named `option` in the recipe, that no supported version of sentence-transformers accepts.

    A ConfigError for an unknown class, one that needs more than embeddings, an argument that cannot be set, a function
    that is not known by name, a missing or superfluous guide, and `matryoshka.dims` for a class that takes whole
    embeddings.
    """
    _check_class(loss.class_name, loss.arguments, option)
    name = loss.class_name
    if name == MATRYOSHKA:
        name = _check_matryoshka_arguments(loss.arguments, option)
    check = OptionChecks(loss.matryoshka, f"{option}.matryoshka.")
    check.require(
        loss.matryoshka.dims is None or loss.class_name != MATRYOSHKA,
        "dims",
        f"{MATRYOSHKA} shortens embeddings itself; leave it out",
    )
    check.require(
        loss.matryoshka.precisions is None or loss.class_name != MATRYOSHKA,
        "precisions",
        f"{MATRYOSHKA} would truncate vectors after they are quantised; write loss.matryoshka.dims instead of it",
    )
    check.require(
        loss.matryoshka.dims is None or (name != "SoftmaxLoss" and not SENTENCE_TRANSFORMERS_LOSSES[name].vectors),
        "dims",
        f"{name} takes whole embeddings; leave it out",
    )
    check = OptionChecks(loss, f"{option}.")
    if name in LOSSES_WITH_GUIDE:
        check.require(loss.guide is not None, "guide", f"{name} needs a guide; write a directory or a Hub id")
    check.require(
        loss.guide is None or name in LOSSES_WITH_GUIDE,
        "guide",
        f"is for {' and '.join(LOSSES_WITH_GUIDE)}; {name} has no guide",
    )


def _check_class(name: Any, arguments: Any, option: str) -> None:
    """Check a class's name and arguments; `option` is that of the mapping that holds both."""
    supported = [*SENTENCE_TRANSFORMERS_LOSSES, MATRYOSHKA]
    if not name:
        raise ConfigError(f"{option}.class_name is missing: set it to one of {', '.join(supported)}")
    if name in UNSUPPORTED_LOSSES:
        raise ConfigError(
            f"{option}.class_name={name}: needs {UNSUPPORTED_LOSSES[name]}, but losses see embeddings only. "
            f"Available are {', '.join(supported)}"
        )
    if name not in supported:
        hint = did_you_mean(str(name), supported)
        raise ConfigError(
            f"{option}.class_name={name}: there is no such class{hint} Available are {', '.join(supported)}"
        )
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{option}.arguments={arguments!r}: must be a mapping of the arguments of {name}")
    for argument, value in arguments.items():
        if argument in _REJECTED:
            raise ConfigError(f"{option}.arguments.{argument}={written(value)}: {_REJECTED[argument]}")
        allowed = FUNCTION_ARGUMENTS.get(name, {}).get(argument)
        if allowed and value not in allowed:
            raise ConfigError(
                f"{option}.arguments.{argument}={written(value)}: {name} takes one of {', '.join(allowed)}"
            )


def _check_matryoshka_arguments(arguments: Mapping[str, Any], option: str) -> str:
    """Check the arguments of MatryoshkaLoss, and return the name of the class that it wraps."""
    inner, inner_option = arguments.get("loss"), f"{option}.arguments.loss"
    if not isinstance(inner, Mapping) or "class_name" not in inner or set(inner) - {"class_name", "arguments"}:
        raise ConfigError(
            f"{inner_option}={inner!r}: {MATRYOSHKA} takes a mapping such as "
            "{class_name: MultipleNegativesRankingLoss, arguments: {scale: 20}}"
        )
    name, inner_arguments = inner["class_name"], inner.get("arguments", {})
    if name == MATRYOSHKA:
        raise ConfigError(f"{inner_option}.class_name={name}: {MATRYOSHKA} cannot wrap itself")
    _check_class(name, inner_arguments, inner_option)
    dims = arguments.get("matryoshka_dims")
    if not isinstance(dims, list | tuple) or not dims or not all(type(dim) is int and dim > 0 for dim in dims):
        raise ConfigError(
            f"{option}.arguments.matryoshka_dims={dims}: must be a list of dimensions, such as [768,256,64]"
        )
    # A linear layer has one input width, so torch would raise about a matrix product; and a loss of several parts is
    # a dictionary, which MatryoshkaLoss could not add up.
    unsupported = {
        "SoftmaxLoss": f"its classifier takes whole embeddings, and {MATRYOSHKA} shortens them",
        "GlobalOrthogonalRegularizationLoss": f"it has several parts, and {MATRYOSHKA} takes a loss of one",
    }
    if name in unsupported:
        raise ConfigError(f"{inner_option}.class_name={name}: {unsupported[name]}")
    if inner_arguments.get("projection_dim") is not None:
        raise ConfigError(
            f"{inner_option}.arguments.projection_dim={inner_arguments['projection_dim']}: a projection takes whole "
            f"embeddings, and {MATRYOSHKA} shortens them; leave it out"
        )
    return str(name)


def check_kind_loss(loss: LossConfig, kind: Kind, option: str = "loss") -> None:
    """Raise a ConfigError for a loss, or an option of it, that this kind of model cannot be trained with.

    `loss` has passed `check_loss`; `option` is its name in the recipe.
    """
    _check_vectors(loss, kind, f"{option}.")
    if isinstance(loss, CombinedConfig):
        for index, part in enumerate(loss.losses):
            _check_vectors(part, kind, f"{option}.losses[{index}].")
            _check_loss_of_kind(part, kind, f"{option}={loss.name}: losses[{index}].name", f"{option}.losses[{index}].")
    else:
        _check_loss_of_kind(loss, kind, option, f"{option}.")


def _check_vectors(loss: LossConfig, kind: Kind, prefix: str) -> None:
    """Reject what is computed from the vectors of texts, in a loss or a part of one, for a kind that has none."""
    check = OptionChecks(loss.matryoshka, f"{prefix}matryoshka.")
    if loss.matryoshka.precisions is not None:
        check_kind_of_vectors(kind, f"{prefix}matryoshka.precisions")
    check.require(
        loss.matryoshka.dims is None or not kind.why_no_dimensions,
        "dims",
        f"{kind.why_no_dimensions}; leave it out",
    )
    check.require(
        (kind.has_one_vector and kind.has_one_model) or loss.matryoshka.layers is None,
        "layers",
        f"is for the vectors of model.kind=dense, not {kind.name}; leave it out",
    )


def _check_loss_of_kind(loss: LossConfig, kind: Kind, option: str, prefix: str) -> None:
    check = OptionChecks(loss, prefix)
    owner = next((other for other in kinds() if loss.name in other.own_losses), kind)
    if kind.losses is not None and loss.name not in kind.losses:
        allowed = ", ".join(dict.fromkeys(kind.losses))
        raise ConfigError(
            f"{option}={loss.name}: {kind.why_no_other_loss}; write one of {allowed}, such as "
            f"loss={kind.example_loss or kind.losses[0]}"
        )
    if owner is not kind and kind.losses is None:
        raise ConfigError(
            f"{option}={loss.name}: is for {owner.summary}, and model.kind={kind.name} computes {kind.summary}; write "
            f"loss=infonce, or model.kind={owner.name}"
        )
    check.require(
        not kind.why_no_similarity or getattr(loss, "similarity", None) is getattr(type(loss), "similarity", None),
        "similarity",
        f"is for the vectors of model.kind=dense, and model.kind={kind.name} {kind.why_no_similarity}",
    )
    if isinstance(loss, InfoNCEConfig):
        _check_infonce_of_kind(loss, kind, check)
        _check_temperature_of_kind(loss, kind.temperature, kind, check)
    if isinstance(loss, SigLIPConfig):
        _check_temperature_of_kind(loss, None if kind.temperature is None else SIGLIP_TEMPERATURE, kind, check)


def _check_infonce_of_kind(loss: InfoNCEConfig, kind: Kind, check: OptionChecks) -> None:
    check.require(
        kind.is_symmetric or loss.directions == [LossDirection.query_document],
        "directions",
        f"must be [query_document] for model.kind={kind.name}, whose score is not that of the texts exchanged",
    )
    check.require(
        not loss.mixes_negatives or kind.has_one_vector,
        "mixed_pairs" if loss.mixed_pairs else "mixed_list",
        f"mixes the vectors of texts, but model.kind={kind.name} has no single vector per text; leave it out",
    )


def _check_temperature_of_kind(
    loss: InfoNCEConfig | SigLIPConfig, default: float | None, kind: Kind, check: OptionChecks
) -> None:
    """`default` is the temperature of a recipe that names none; None: that of the model."""
    low, high = loss.temperature_bounds or kind.temperature_bounds
    temperature = default if loss.temperature is None else loss.temperature
    check.require(
        not loss.learn_temperature or temperature is None or low <= temperature <= high,
        "temperature",
        f"{f'is the default {default} and ' if loss.temperature is None else ''}must be within "
        f"temperature_bounds={written([low, high])}",
    )
