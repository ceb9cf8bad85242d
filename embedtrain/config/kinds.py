"""The kinds of models: what each declares, and the only table of their names outside of `kinds/`.

A kind is one package under `kinds/`; its `__init__.py` imports no torch, and its methods import what they need when
they are called.
"""

import importlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from embedtrain.config.code import is_code_path, load_code
from embedtrain.config.losses import VECTOR_TEMPERATURE, VECTOR_TEMPERATURE_BOUNDS
from embedtrain.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from torch import Size, Tensor, device
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from embedtrain.config.kind_settings import PageLibrary
    from embedtrain.config.recipe import ModelConfig, Recipe
    from embedtrain.data.cache.token_store import TokenStore
    from embedtrain.data.tokens import Layout
    from embedtrain.distributed.world import World
    from embedtrain.formats.model_files import ModelFiles
    from embedtrain.losses.score import Score
    from embedtrain.losses.types import Loss
    from embedtrain.models.encoder import Encoder, Head
    from embedtrain.models.stored_weights import TensorLocation
    from embedtrain.models.types import ModelSource
    from embedtrain.tracking.console import Console

_KINDS = {
    "dense": "embedtrain.kinds.dense:Dense",
    "dual_encoder": "embedtrain.kinds.dual_encoder:DualEncoder",
    "image_text": "embedtrain.kinds.image_text:ImageText",
    "cross_encoder": "embedtrain.kinds.cross_encoder:CrossEncoder",
    "late_interaction": "embedtrain.kinds.late_interaction:LateInteraction",
    "m3": "embedtrain.kinds.m3:M3",
    "sparse": "embedtrain.kinds.sparse:Sparse",
}
KINDS = tuple(_KINDS)  # the names of those of the package

# In a model directory that a kind of a user's module has written: {"kind": "module:Class"}.
KIND_FILE = "kind.json"

_user_kinds: dict[str, "Kind"] = {}  # of users' modules that are named on the command line, by path


class Kind(ABC):
    """Everything in which one kind of model differs from others.

    Attributes:
        name: the value of `model.kind`.
        summary: what the model computes, in a few words.
        options: the dataclass of `model`, a subclass of ModelConfig with the options that only this kind has.
        backbone_options: options of commands with which a directory of this kind is opened as a dense model instead.
        command_options: options of `model` that commands have as well, for models of this kind.
        scores_pairs: whether a query and a document are read together, and a text alone has no embedding.
        reranks: whether it orders the documents that something else has found.
        new_part: what of the model starts from the seed if its files lack it.
        has_tables: whether a table of static embeddings can be such a model.
        has_one_model: whether `model.path` or `model.config` has to name the model.
        has_one_tower: whether all texts of a directory with one config.json are encoded by the same backbone.
        aliases: other names of it, in lower case and without underscores, which an error answers with `name`.
        losses: the losses that train it, by `loss.name`, the first as an example; None: all but those of other kinds.
        why_no_other_loss: why another one does not, for a message.
        example_loss: the first, and for which rows; empty: for all.
        why_no_dimensions: why the first dimensions of a vector are none (`loss.matryoshka.dims`); empty: they are one.
        why_no_similarity: why a loss names no similarity; empty: it does.
        has_sparsity: whether `sparsity` regularizes its weights of words.
        is_symmetric: whether the score of two texts is that of the texts exchanged.
        temperature: what `temperature_bounds` have to include if a recipe has none; None: not known before the model
            is read. The default itself is `Score.default_temperature`.
        temperature_bounds: default bounds of a trained temperature.
        own_losses: classes, as "module:Class", of losses that only this kind has, by `loss.name`; an instance is made
            of the options and the score.
        has_one_vector: whether a text has one vector and nothing else.
        has_token_vectors: whether a text has a vector for each of its tokens and nothing else, compared by MaxSim.
        measures_classes: whether classification and clustering, which need one vector per text, can be measured.
        views: names of the parts of the score that an evaluation also measures alone.
        has_vision: whether a model with a vision tower can be such a model.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    options: ClassVar[type[Any]]
    backbone_options: ClassVar[tuple[str, ...]] = ()
    command_options: ClassVar[tuple[str, ...]] = ()
    new_part: ClassVar[str] = "layers"
    has_tables: ClassVar[bool] = False
    has_one_model: ClassVar[bool] = True
    has_one_tower: ClassVar[bool] = True
    aliases: ClassVar[tuple[str, ...]] = ()
    losses: ClassVar[tuple[str, ...] | None] = None
    why_no_other_loss: ClassVar[str] = ""
    example_loss: ClassVar[str] = ""
    why_no_dimensions: ClassVar[str] = ""
    why_no_similarity: ClassVar[str] = ""
    has_sparsity: ClassVar[bool] = False
    is_symmetric: ClassVar[bool] = True
    temperature: ClassVar[float | None] = VECTOR_TEMPERATURE
    temperature_bounds: ClassVar[tuple[float, float]] = VECTOR_TEMPERATURE_BOUNDS
    own_losses: ClassVar[Mapping[str, str]] = {}
    scores_pairs: ClassVar[bool] = False
    reranks: ClassVar[bool] = False
    has_one_vector: ClassVar[bool] = False
    has_token_vectors: ClassVar[bool] = False
    measures_classes: ClassVar[bool] = False
    views: ClassVar[tuple[str, ...]] = ()
    has_vision: ClassVar[bool] = False

    @property
    def all_names(self) -> tuple[str, ...]:
        """The name and the aliases, in lower case and without underscores."""
        return (self.name.replace("_", ""), *self.aliases)

    @property
    def own_options(self) -> tuple[str, ...]:
        """The names of the options of `model` that not all kinds have."""
        *_, common_options, _ = self.options.__mro__  # of ModelConfig, before `object`
        common = {field.name for field in fields(common_options)}
        return tuple(field.name for field in fields(self.options) if field.name not in common)

    def model_options(self, **options: Any) -> Any:
        """The options of `model` with these values, by which a model of this kind is opened.

        The default of `kind` in a user's dataclass may be that of another kind, or of another path.
        """
        return self.options(**{"kind": self.name, **options})

    def stored_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of `model` in a recipe.yaml.

        Earlier versions wrote the options of all kinds into it, and those of some in sections of their own.
        """
        flat = dict(options)
        if self.name in ("late_interaction", "m3", "sparse") and isinstance(section := options.get(self.name), Mapping):
            flat |= {"dimension" if name == "dim" else name: value for name, value in section.items()}
        own = {field.name for field in fields(self.options)}
        of_others = {"late_interaction", "m3", "sparse"}.union(*(kind.own_options for kind in kinds())) - own
        return {name: value for name, value in flat.items() if name not in of_others}

    def check_options(self, model: Any) -> None:  # noqa: B027 - a kind may have none
        """Raise a ConfigError for options that cannot work, as far as they show before the model is opened."""

    def with_any_pooling(self, model: Any) -> Any:
        """The options with a pooling if they lack one, for what needs no vectors."""
        return model

    def check_other_options(self, recipe: "Recipe") -> None:  # noqa: B027 - a kind may have nothing to add
        """Raise a ConfigError for options outside of `model` that cannot work with such a model."""

    def recognise(self, directory: Path) -> str | None:
        """What the model in a directory is, in words for a message, if it is of this kind; else None.

        Of a directory that this kind has written, if it is a user's kind, KIND_FILE says so.
        """
        return None

    def require_other(  # noqa: B027 - most kinds can
        self, directory: Path, what: str, model: "ModelConfig"
    ) -> None:
        """Raise a ConfigError if a directory of this kind cannot be opened as one of another kind, that of `model`.

        Any directory has a backbone, on which another kind can be trained. `what` is what `recognise` returns.
        """

    @abstractmethod
    def read(self, directory: Path, model: Any) -> "ModelSource":
        """The model in a directory, of this kind or of another one whose backbone it has, with the options of a recipe.

        Raises ModelError for files that cannot be used, and ConfigError for options that do not fit them.
        """

    def with_models(self, model: Any, change: Callable[[Any], Any]) -> Any:
        """The options with those of each model, which have `path` and `revision`, as `change` returns them."""
        return change(model)

    def assembled(self, model: Any) -> "ModelSource | None":
        """The model that the options of a recipe describe without `model.path` and `model.config`; None if they do not.

        Raises as `read`.
        """
        return None

    @abstractmethod
    def new(self, source: "ModelSource", model: Any) -> "ModelSource":
        """A model of random weights, whose configuration `source` has, with the options of a recipe."""

    def dimension(self, source: "ModelSource") -> int:
        """The columns of what the encoder returns."""
        dense = source.vectors.dense
        return dense[-1].num_out if dense else int(source.config.get_text_config().hidden_size)

    def outputs(self, source: "ModelSource") -> str:
        """What the model computes in a few words, such as `mean pooling, normalised`."""
        return self.summary

    def compared_settings(self, source: "ModelSource") -> dict[str, Any]:
        """The kind's settings that have to be equal in models whose weights are combined, by names for a message."""
        return {} if source.settings is None else {"settings": source.settings}

    def served_as(self, source: "ModelSource") -> str:
        """What serving engines know such a model as, in `formats/serving_engines.yaml`."""
        return self.name

    def notes(self, source: "ModelSource") -> list[str]:
        """Lines for the user about how the model was opened."""
        return []

    def ends_texts(self, source: "ModelSource") -> bool:
        """Whether texts end with the end-of-text token by default if the vector is that of the last token."""
        return True

    @abstractmethod
    def layout(self, source: "ModelSource", tokenizer: "PreTrainedTokenizerBase") -> "Layout":
        """How texts become tokens and rows of a chunk.

        Raises ConfigError or ModelError if the tokenizer does not fit the model.
        """

    @abstractmethod
    def score(self, source: "ModelSource") -> "Score":
        """How two texts that the model has encoded compare, in training and in search."""

    @abstractmethod
    def model_class(self, config: "PretrainedConfig") -> Any:
        """Transformers' class that opens a model with the parts that this kind needs of it."""

    @abstractmethod
    def encoder(self, source: "ModelSource", model: "PreTrainedModel") -> "Encoder":
        """The encoder of a model of `model_class`; the weights of what the model does not have are new."""

    def head(self, source: "ModelSource") -> "Head | None":
        """The head on a backbone, with new weights; None for kinds whose head is transformers' own."""
        return None

    @abstractmethod
    def read_weights(self, source: "ModelSource") -> tuple[dict[str, "Tensor"], set[str]]:
        """The weights in a source's directory, by the encoder's names, and the names of those that it lacks.

        New ones are in neither. Dense modules are read by whoever calls. Raises ModelError.
        """

    def missing_weights_hint(self, names: Sequence[str]) -> str:
        """What to do about files that lack these weights, as the end of a sentence."""
        return ""

    def convert(self, source: "ModelSource", library: "PageLibrary") -> "ModelSource":
        """A model over pages as the class of another library computes it."""
        raise ConfigError(
            f"page_library={library.value}: {source.directory} is no late-interaction model over pages; leave it out"
        )

    def conversion_notes(
        self, source: "ModelSource", converted: "ModelSource", weights: "Mapping[str, Tensor]"
    ) -> list[str]:
        """Lines for the user about what `convert` has changed."""
        return []

    def head_weights(self, source: "ModelSource") -> dict[str, "Tensor"]:
        """The weights of the head that are not in safetensors files under their names, by the encoder's names."""
        return {}

    def locate_head(
        self, source: "ModelSource", shapes: "Mapping[str, Size]", stored: "Mapping[str, TensorLocation]"
    ) -> tuple[dict[str, "TensorLocation"], set[str]]:
        """Where the weights of the head are among the `stored` ones, and the names of those in `head_weights`."""
        return {}, set()

    def output_error(self, encoder: "Encoder", source: "ModelSource", device: "device") -> str | None:
        """Why the outputs of a loaded encoder cannot be right, as a sentence; None if they may be.

        Its forward passes are collectives: every rank calls it. The encoder has no dropout.
        """
        return None

    def identity(self, source: "ModelSource") -> dict[str, Any]:
        """Settings that change the vectors of the same files, for the identity of a model: none by default."""
        return {}

    def weight_files(self, source: "ModelSource") -> Mapping[str, Path]:
        """Files of weights outside of the source's own folders, for the identity of a model, by a name of each."""
        return {}

    @property
    @abstractmethod
    def files(self) -> "ModelFiles":
        """Its model directories: how they are written, opened by other libraries, and described."""

    def check_recipe(self, recipe: "Recipe", source: "ModelSource") -> None:  # noqa: B027 - a kind may have none
        """Raise a ConfigError for options that do not fit the files of the model."""

    def trained_instruction_format(self, source: "ModelSource") -> str | None:
        """How the instructions of the rows were formatted that the model was trained on; None if nobody knows."""
        return None

    def training_loss(self, loss: "Loss", recipe: "Recipe", source: "ModelSource", num_batches: int) -> "Loss":
        """The loss of a run of so many global batches, with what the kind adds to that of the recipe."""
        return loss

    def share_weights(  # noqa: B027 - most have none
        self, loss: "Loss", encoder: "Encoder"
    ) -> None:
        """Let the loss train weights that the model's files have, such as a temperature; both are on the device.

        Called once, before weights of a checkpoint are read. Weights are shared if they have one memory.
        """

    def weights_of_data(
        self, source: "ModelSource", stores: "Sequence[TokenStore]", world: "World", console: "Console"
    ) -> "Mapping[str, Tensor]":
        """Weights of a model from scratch that follow from its training texts, by the encoder's names. A collective."""
        return {}

    def reads_vocabulary(self, source: "ModelSource") -> bool:
        """Whether outputs are computed from rows of the vocabulary, so that none of its tokens can be left out."""
        return False

    def max_document_length(self, source: "ModelSource") -> int | None:
        """The tokens at which documents are cut, besides those of all texts; None: no others."""
        return None

    def longest_item(self, source: "ModelSource", max_length: int) -> int:
        """The most tokens of an item of which the texts have at most so many; a picture counts its patches."""
        return max_length

    def vectors_per_text(self, source: "ModelSource", max_length: int) -> tuple[int, int]:
        """The largest number of vectors of a query and of a document, for texts of at most so many tokens."""
        return 1, 1


def load_kind(name: str, option: str = "model.kind") -> Kind:
    """The kind that the value of an option names; a ConfigError if there is none, or only a file names its code."""
    if name in _user_kinds:
        return _user_kinds[name]
    if is_code_path(name):
        raise ConfigError(
            f"{option}={name}: a file cannot name code to run; if you trust it, name it yourself: write "
            f"model.kind={name} on the command line of train, kind={name} on that of another command, below "
            "stages.NAME for a stage of a pipeline"
        )
    if name not in _KINDS:
        simplified = re.sub(r"[\W_]", "", name.lower())
        meant = next((f": write {option}={kind.name}" for kind in kinds() if simplified in kind.all_names), "")
        raise ConfigError(f"{option}={name}: expected one of {', '.join(_KINDS)}{meant}")
    return _instance(name)


def trust_kind(path: str, option: str) -> Kind:
    """The kind `module:Class` of a user's module, which the user has named on the command line or in Python.

    From now on it is among the kinds of this process: its directories are recognised, also by files that name it.
    """
    if path not in _user_kinds:
        kind = load_code(path, option)()
        if not isinstance(kind, Kind):
            raise ConfigError(f"{option}={path}: is no embedtrain.config.kinds.Kind")
        kind.name = path  # type: ignore[misc]
        _user_kinds[path] = kind
    return _user_kinds[path]


@cache
def _instance(name: str) -> Kind:
    kind: Kind = _load(_KINDS[name])()
    return kind


def kinds() -> tuple[Kind, ...]:
    """All kinds of the package."""
    return tuple(map(_instance, _KINDS))


def kind_of_pairs() -> Kind:
    """The kind that scores a query and a document, which are read together."""
    return next(kind for kind in kinds() if kind.scores_pairs)


def kind_of_files(directory: Path) -> tuple[Kind, str]:
    """The kind of the model in a directory, and what it is, in words for a message.

    Raises a ConfigError if it is of a kind whose code the user has not named.
    """
    if (path := _code_of(directory)) is not None:
        if path not in _user_kinds:
            raise ConfigError(
                f"{directory} is a model of kind={path}, which is code, and a file cannot name code to run; if you "
                f"trust it, name it yourself: write kind={path} on the command line, or model.kind={path} of train"
            )
        kind = _user_kinds[path]
        return kind, kind.recognise(directory) or f"a model of kind={path}"
    dense, *others = kinds()  # a directory that no other kind recognises is that of a dense model
    for kind in (*_user_kinds.values(), *others, dense):
        if (what := kind.recognise(directory)) is not None:
            return kind, what
    raise AssertionError(directory)


def _code_of(directory: Path) -> str | None:
    """The `module:Class` that KIND_FILE names; None without one."""
    try:
        content = json.loads((directory / KIND_FILE).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    path = content.get("kind") if isinstance(content, dict) else None
    if not isinstance(path, str) or not is_code_path(path):
        raise ModelError(f'{directory / KIND_FILE}: expected {{"kind": "MODULE:CLASS"}}; export the model again')
    return path


def loss_of_kind(name: str) -> Callable[..., Any] | None:
    """The class of a loss that only one kind has, by `loss.name`; None for other losses."""
    paths = {loss: path for kind in (*kinds(), *_user_kinds.values()) for loss, path in kind.own_losses.items()}
    return _load(paths[name]) if name in paths else None


def _load(path: str) -> Any:
    """What `module:attribute` names."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
