"""The dataclass of each `loss=NAME`."""

from embedtrain.config.listwise_losses import (
    ADRMSEConfig,
    BCEConfig,
    LambdaLossConfig,
    ListNetConfig,
    MSEConfig,
    PListMLEConfig,
    RankNetConfig,
    SoftmaxConfig,
)
from embedtrain.config.losses import (
    AnglEConfig,
    BatchTripletConfig,
    CombinedConfig,
    ContrastiveConfig,
    CoSENTConfig,
    CosineMSEConfig,
    CustomConfig,
    DistillScoresConfig,
    InfoNCEConfig,
    LossConfig,
    M3LossConfig,
    MarginMSEConfig,
    OnlineContrastiveConfig,
    OrthogonalConfig,
    SentenceTransformersConfig,
    SigLIPConfig,
    TripletConfig,
    XTRConfig,
)
from embedtrain.config.similarity_losses import DistillEmbeddingsConfig, DistillSimilaritiesConfig, SimilarityMSEConfig

LOSSES: dict[str, type[LossConfig]] = {
    kind.name: kind
    for kind in (
        InfoNCEConfig,
        XTRConfig,
        M3LossConfig,
        SigLIPConfig,
        CoSENTConfig,
        AnglEConfig,
        CosineMSEConfig,
        ContrastiveConfig,
        OnlineContrastiveConfig,
        TripletConfig,
        BatchTripletConfig,
        DistillScoresConfig,
        MarginMSEConfig,
        BCEConfig,
        SoftmaxConfig,
        ListNetConfig,
        RankNetConfig,
        LambdaLossConfig,
        PListMLEConfig,
        ADRMSEConfig,
        MSEConfig,
        DistillEmbeddingsConfig,
        DistillSimilaritiesConfig,
        SimilarityMSEConfig,
        OrthogonalConfig,
        CombinedConfig,
        SentenceTransformersConfig,
        CustomConfig,
    )
}

# The losses that are functions of the scores of a query's own documents, and fit every kind of model.
SCORE_LOSSES = (
    "bce",
    "softmax",
    "listnet",
    "ranknet",
    "lambdaloss",
    "plistmle",
    "adr_mse",
    "mse",
    "distill_scores",
    "margin_mse",
)
