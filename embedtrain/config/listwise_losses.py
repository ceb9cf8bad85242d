"""Options of the losses of each query's own documents: `bce`, `softmax`, `ranknet`, ..."""

from dataclasses import dataclass
from enum import Enum

from embedtrain.config.loss_choices import Similarity
from embedtrain.config.losses import LossConfig
from embedtrain.config.options import option


class MeanOver(str, Enum):
    """What a loss of pairs of documents is a mean over."""

    queries = "queries"  # the mean over each query's pairs, then over queries: long lists weigh as much as short ones
    pairs = "pairs"  # over all pairs of the global batch


class LambdaWeighting(str, Enum):
    """The weight of a pair of documents in LambdaLoss (Wang et al., 2018)."""

    lambdarank = "lambdarank"
    ndcg_loss2 = "ndcg_loss2"
    ndcg_loss2pp = "ndcg_loss2pp"


@dataclass(kw_only=True)
class ListConfig(LossConfig):
    """Options of the losses of each query's own documents."""

    # Scores are divided by it: 1 for the logits of a cross-encoder, 0.02 to 0.1 for cosines.
    temperature: float = option(1.0, above=0, hint="1 is usual")
    # Of a dense model, by default its own; a cross-encoder's scores are taken as they are.
    similarity: Similarity | None = None


@dataclass(kw_only=True)
class BCEConfig(ListConfig):
    """Binary cross entropy of single pairs of query and document, labelled from 0 to 1."""

    name: str = "bce"
    # factor of the positives' part of the loss
    pos_weight: float = option(1.0, above=0, hint="1 weighs positives and negatives alike")


@dataclass(kw_only=True)
class SoftmaxConfig(ListConfig):
    """Softmax over a query's own documents, without those of other queries (Gao et al., 2021)."""

    name: str = "softmax"
    # A document with a higher label is a positive, and a row must have one; null: the first document of a row is.
    positive_above: float | None = option(None, finite=True)


@dataclass(kw_only=True)
class ListNetConfig(ListConfig):
    """Cross entropy of the softmax of labels and that of scores (Cao et al., 2007)."""

    name: str = "listnet"


@dataclass(kw_only=True)
class RankNetConfig(ListConfig):
    """Logistic loss of each query's pairs of documents with different labels (Burges et al., 2005)."""

    name: str = "ranknet"
    mean_over: MeanOver = MeanOver.queries


@dataclass(kw_only=True)
class LambdaLossConfig(ListConfig):
    """RankNet's pairs weighted by their effect on nDCG (Wang et al., 2018)."""

    name: str = "lambdaloss"
    weighting: LambdaWeighting = LambdaWeighting.ndcg_loss2pp
    mu: float = option(10.0, at_least=0)  # of ndcg_loss2pp: factor of ndcg_loss2 beside lambdarank
    # only pairs with a document among the first k by score, for nDCG@k; null: all pairs
    top_k: int | None = option(None, at_least=1, hint="null for all pairs")
    mean_over: MeanOver = MeanOver.queries


@dataclass(kw_only=True)
class PListMLEConfig(ListConfig):
    """Likelihood of the documents' order by label (Lan et al., 2014)."""

    name: str = "plistmle"
    position_weights: bool = True  # weigh the first positions higher; false: ListMLE (Xia et al., 2008)


@dataclass(kw_only=True)
class ADRMSEConfig(ListConfig):
    """Squared difference of a document's rank by label and its approximate rank by score (Schlatt et al., 2024)."""

    name: str = "adr_mse"


@dataclass(kw_only=True)
class MSEConfig(LossConfig):
    """Squared difference of a pair's score and the teacher's."""

    name: str = "mse"
    similarity: Similarity = Similarity.dot  # of a dense model; a cross-encoder's scores are taken as they are
