"""The head of cross-encoders: that of transformers' class for sequence classification, pairs of texts to scores.

N: pairs; L: tokens of a padded pair; H: hidden size.
"""

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from embedtrain.config.recipe import Pooling
from embedtrain.config.validation import written
from embedtrain.data.types import Chunk
from embedtrain.errors import ModelError
from embedtrain.models.build import build_encoder, read_model
from embedtrain.models.encoder import Encoder, hidden_size, prepare_backbone
from embedtrain.models.hub import one_line
from embedtrain.models.own_class import HEAD, ClassHead, StandIn, located_in_class, own_name, stand_in_of
from embedtrain.models.pooling import POOLING, PooledTokens
from embedtrain.models.score_head import HeadSource
from embedtrain.models.stored_weights import TensorLocation, stored_tensors
from embedtrain.models.types import ModelSource

# The weight of a score of tokens, and where the rows that it starts from are stored.
SCORE, _VOCABULARY_HEAD, _EMBEDDINGS = f"{HEAD}score.weight", "lm_head.weight", "embed_tokens.weight"
# The largest difference between a score and that of the whole class, relative to the larger one of the score and 1.
_TOLERANCE = 1e-3


class ScoreHead(ClassHead):
    """Scores of pairs: raw logits, before the sigmoid that turns them into probabilities.

    The head computes in float32 whatever the precision of the backbone: in bf16 most of the best candidates of a query
    would have the same score.

    Args:
        pooling: which hidden state of a pair the class receives.
    """

    dimension = 1
    reads_pairs = True

    def __init__(self, model: PreTrainedModel, pooling: Pooling) -> None:
        super().__init__(model)
        self.in_float32, self.pooling = model, pooling

    def __call__(self, hidden: Tensor, chunk: Chunk) -> tuple[Tensor, ...]:
        """The scores of pairs, [N, 1]."""
        vectors = self.compared(hidden, chunk)
        vectors = vectors.to(next(self.model.parameters()).dtype)  # float32, except where memory is estimated
        return (self.logits(vectors[:, None]).float(),)

    def compared(self, hidden: Tensor, chunk: Chunk) -> Tensor:
        """The pooled vectors [N, H], because scores near 0 have no relative difference."""
        hidden = hidden if chunk.packing is None else hidden[0]
        return POOLING[self.pooling].pool(hidden, PooledTokens.of(chunk))

    def of_whole_class(self, chunk: Chunk, backbone: nn.Module) -> Tensor:
        """The scores of padded pairs, with the class' own selection of a token."""
        return self.whole_logits(chunk, backbone)

    def difference(self, actual: Tensor, expected: Tensor) -> str | None:
        """Why scores are not those of the whole class; None if they are."""
        if actual.shape != expected.shape or actual.shape[1] != 1:
            return f"it returns {tuple(expected.shape)[1:]} numbers for a pair"
        difference = float(((actual - expected).abs() / expected.abs().clamp(min=1.0)).max())
        return None if difference <= _TOLERANCE else f"scores differ by {difference:.2g} from those of its own forward"

    @property
    def beside_adapters(self) -> dict[str, nn.Module]:
        """The class, as PEFT trains it for sequence classification."""
        return {HEAD.rstrip("."): self.model}

    @property
    def peft_modules(self) -> list[str]:
        """The parts of the class with weights."""
        named = {name: part for name, part in self.model.named_children() if not isinstance(part, StandIn)}
        pooler = stand_in_of(self.model).pooler
        named |= {} if pooler is None else {f"{self.model.base_model_prefix}.pooler": pooler}
        return [name for name, part in named.items() if next(part.parameters(), None) is not None]


def cross_encoder(classifier: PreTrainedModel, pooling: Pooling | str) -> Encoder:
    """The encoder of a sequence classifier, which becomes its head with a stand-in for the backbone."""
    backbone, name = classifier.base_model, classifier.base_model_prefix
    assert isinstance(backbone, PreTrainedModel)
    assert isinstance(pooling, Pooling)
    pooler, activation = getattr(backbone, "pooler", None), getattr(backbone, "pooler_activation", None)
    setattr(classifier, name, StandIn(pooler if isinstance(pooler, nn.Module) else None, activation))
    # A configuration of its own: decoders' classes reject several rows without a padding token.
    classifier.config = copy.deepcopy(classifier.config)
    config = classifier.config.get_text_config()
    config.pad_token_id = 0 if config.pad_token_id is None else config.pad_token_id
    return Encoder(prepare_backbone(backbone), ScoreHead(classifier, pooling))


def read_weights(source: ModelSource) -> tuple[dict[str, Tensor], set[str]]:
    """The weights that a source's files have, by the encoder's names, and the names of those that they lack.

    A new head is in neither.
    """
    head: HeadSource = source.settings
    if head.tokens:
        model = _causal_model(source)
        rows = [model.get_output_embeddings().weight.detach()[token] for token in head.tokens]
        backbone = prepare_backbone(model.base_model).state_dict()
        return {f"backbone.{name}": weight for name, weight in backbone.items()} | {SCORE: _score_of(rows)}, set()
    config = source.config
    if head.labels:
        config = copy.deepcopy(config)
        config.num_labels = head.num_labels
    model, missing_keys = read_model(source, AutoModelForSequenceClassification, config)
    encoder = cross_encoder(model, source.pooling)
    weights = _weights_of_labels(encoder, source, head) if head.labels else dict(encoder.state_dict())
    missing = {name for name in weights if own_name(name, model.base_model_prefix) in missing_keys}
    if head.linear is not None:
        location = linear_location(head.linear)
        with safe_open(location.path, framework="pt") as file:
            weights[SCORE] = file.get_tensor(location.key)
        missing -= {SCORE}
    new = {name for name in missing if head.is_new and name.startswith(HEAD)}
    return {name: weight for name, weight in weights.items() if name not in new}, missing - new


def _weights_of_labels(encoder: Encoder, source: ModelSource, head: HeadSource) -> dict[str, Tensor]:
    """The weights of the class of one label whose score is that of the labels of `encoder`.

    Its last layer is the rows of the labels. A ModelError if scores of random vectors differ, as in a class of other
    layers.
    """
    single = build_encoder(source).eval()
    shapes = {name: tensor.shape for name, tensor in single.state_dict().items()}
    weights = {
        name: _score_of([weight[label] for label in head.labels])
        if weight.shape != shapes.get(name) and weight.shape[:1] == (head.num_labels,)
        else weight
        for name, weight in encoder.state_dict().items()
    }
    vectors = torch.randn(4, 1, hidden_size(source.config), generator=torch.Generator().manual_seed(0))
    chunk = Chunk(torch.zeros((4, 1), dtype=torch.int64), torch.ones((4, 1), dtype=torch.int64), has_padding=False)
    try:
        single.load_state_dict(weights, assign=True)
        with torch.no_grad():
            scores = single.output(vectors, chunk)[0]
            logits = encoder.eval().output(vectors, chunk)[0]
    except RuntimeError as error:
        raise ModelError(f"{source.directory}: model.score_labels: {one_line(error)}") from None
    expected = _score_of([logits[:, label] for label in head.labels]).T
    if not torch.allclose(scores, expected, rtol=1e-3, atol=1e-3):
        raise ModelError(
            f"{source.directory}: model.score_labels={written(list(head.labels))}: the scores of "
            f"{source.config.model_type} for a single label are computed in another way than its logits of several"
        )
    return weights


def locate_head(
    source: ModelSource, shapes: Mapping[str, torch.Size], stored: Mapping[str, TensorLocation]
) -> tuple[dict[str, TensorLocation], set[str]]:
    """Where the weights of the head are, by the encoder's names, and the names of those that `score_weights` reads."""
    head: HeadSource = source.settings
    locations = located_in_class(shapes, stored)
    if head.linear is not None:
        locations[SCORE] = linear_location(head.linear)
    return locations, {SCORE} if head.tokens else set()


def linear_location(directory: Path) -> TensorLocation:
    """The weight of the Dense module that is the head of a cross-encoder."""
    stored = stored_tensors(directory)
    if "linear.weight" not in stored:
        raise ModelError(f"{directory / 'model.safetensors'} has no linear.weight: this head would be random")
    return stored["linear.weight"]


def _causal_model(source: ModelSource) -> PreTrainedModel:
    """The language model in a source's directory; a ModelError if it has no vocabulary head that scores need."""
    model, missing = read_model(source, AutoModelForCausalLM, None)
    vocabulary = model.get_output_embeddings()
    if vocabulary is None or getattr(vocabulary, "bias", None) is not None:
        raise ModelError(
            f"{source.directory}: {type(model).__name__} has no vocabulary head without a bias, which scores need"
        )
    for name in sorted(missing):
        raise ModelError(
            f"{source.directory} lacks weights of {type(model).__name__}, such as {name}: they would be random"
        )
    assert isinstance(model, PreTrainedModel)
    return model


def vocabulary_head(source: ModelSource) -> Tensor:
    """The vocabulary head [V, H] in float32, of a model whose score is that of tokens."""
    assert source.directory is not None
    stored = stored_tensors(source.directory)
    if not stored:
        weight: Tensor = _causal_model(source).get_output_embeddings().weight.detach()
        return weight
    key = _vocabulary_key(source, stored)
    with safe_open(stored[key].path, framework="pt") as file:
        head: Tensor = file.get_tensor(key)
    return head.float()


def score_weights(source: ModelSource) -> dict[str, Tensor]:
    """The weight [1, H] of the head that starts from tokens, by the encoder's name; nothing for other heads.

    Only the rows of these tokens are read, from safetensors. A ModelError if the directory has no vocabulary head.
    """
    if not source.settings.tokens or source.directory is None:
        return {}
    stored = stored_tensors(source.directory)
    key = _vocabulary_key(source, stored)
    with safe_open(stored[key].path, framework="pt") as file:
        rows = [file.get_slice(key)[token : token + 1][0] for token in source.settings.tokens]
    return {SCORE: _score_of(rows)}


def _vocabulary_key(source: ModelSource, stored: Mapping[str, TensorLocation]) -> str:
    """The name of the vocabulary head in the files, of the embedding table if both are tied; ModelError without one."""
    keys = [key for key in (_VOCABULARY_HEAD,) if key in stored]
    if getattr(source.config.get_text_config(), "tie_word_embeddings", False):
        keys = [key for key in stored if key.split(".", 1)[-1] == _EMBEDDINGS or key == _EMBEDDINGS]
    if len(keys) != 1 or keys[0].replace(".weight", ".bias") in stored:
        raise ModelError(
            f"{source.directory} has no vocabulary head without a bias ({_VOCABULARY_HEAD}), whose rows the score of "
            "tokens starts from; set model.score_head=classification to train a new head"
        )
    return keys[0]


def _score_of(rows: list[Tensor]) -> Tensor:
    """The first row, minus the second if there is one, [1, ...]."""
    return (rows[0].float() - sum(row.float() for row in rows[1:]))[None]
