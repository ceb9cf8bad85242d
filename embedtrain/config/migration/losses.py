"""Losses, their arguments, and evaluators of sentence-transformers."""

from embedtrain.config.conversions import Row, integers, number, one_of, same

_SCALE = "`loss.temperature=0.05`, which is 1 / its default scale of 20 and the default here"
_DISTANCES = {name: name for name in ("cosine", "euclidean", "manhattan")}

# Arguments of the losses of sentence-transformers.
LOSS_ARGUMENTS = (
    Row(
        "scale",
        "`loss.temperature`, which is 1 / scale",
        number("loss.temperature={}", lambda scale: 1 / scale),
    ),
    Row("mini_batch_size", "`train.chunk_tokens`: gradients are cached in chunks of tokens, not of rows"),
    Row("gather_across_devices", "not needed: a loss always sees the batch of all GPUs"),
    Row("hardness_mode", "`loss.hardness`, with `loss.hardness_strength`", same),
    Row(
        "",
        "`loss.directions=[query_document,document_query,...]`, `loss.partition_mode`",
        shown="`directions=...` (symmetric, GTE)",
    ),
    Row("similarity_fct", "`loss.similarity`", one_of({"cos_sim": "cosine", "dot_score": "dot"})),
    Row("guide", "`loss.guide`", same, also="guide_model"),
    Row("triplet_margin", "`loss.margin`", same),
    Row("matryoshka_dims", "`loss.matryoshka.dims`", integers, also="dims matryoshka matryoshka_dimensions"),
    Row("distance_metric", "`loss.distance`", one_of(_DISTANCES)),
)

# Losses of lists of documents, of a CrossEncoder and in other libraries.
_LISTWISE = (
    Row("BinaryCrossEntropyLoss", "`loss=bce`", also="BCEWithLogitsLoss BCELoss binary_cross_entropy pointwise"),
    Row("ListNetLoss", "`loss=listnet`"),
    Row("RankNetLoss", "`loss=ranknet` with `loss.mean_over=pairs`; its logarithms are binary"),
    Row(
        "LambdaLoss",
        "`loss=lambdaloss` with `loss.weighting`, `loss.top_k` and `loss.mean_over=pairs`; its logarithms are binary; "
        "`NDCGLoss1Scheme` is not available",
        also="LambdaRankLoss NDCGLoss NDCGLoss2PP",
    ),
    Row("ListMLELoss", "`loss=plistmle` with `loss.position_weights=false`"),
    Row("PListMLELoss", "`loss=plistmle`"),
    Row("ADRMSELoss", "`loss=adr_mse`"),
    Row("", "`loss=softmax`", also="CrossEntropyLoss LocalizedContrastiveEstimation LCE listwise"),
)

# Loss classes of sentence-transformers and names from papers. All other classes of sentence-transformers that compute
# from embeddings are loss=sentence_transformers.
LOSSES = (
    Row(
        "MultipleNegativesRankingLoss",
        f"`loss=infonce` with {_SCALE}",
        also="MNRL MNR InfoNCELoss NTXent NTXentLoss SimCSE in_batch_negatives",
    ),
    Row(
        "CachedMultipleNegativesRankingLoss",
        f"`loss=infonce` with {_SCALE}; gradients are cached in chunks of `train.chunk_tokens`",
        also="CMNRL CachedMNRL GradCache",
    ),
    Row(
        "MultipleNegativesSymmetricRankingLoss CachedMultipleNegativesSymmetricRankingLoss",
        "`loss=infonce` with `loss.directions=[query_document,document_query]`, `loss.partition_mode=separate` and "
        f"{_SCALE}",
    ),
    Row(
        "GISTEmbedLoss CachedGISTEmbedLoss",
        "`loss=infonce` with `loss.guide=DIR`, `loss.guide_margin` and `loss.temperature=0.01`, its default",
        also="GIST",
    ),
    Row("MatryoshkaLoss", "`loss.matryoshka.dims=[768,256,64]`, an option of every loss", also="MRL"),
    Row(
        "AdaptiveLayerLoss",
        "`loss.matryoshka.layers=[3,6]`, an option of every loss, with "
        "`loss.matryoshka.layers_per_step=1`; `loss.matryoshka.layer_kl` compares "
        "similarities of texts where theirs compares dimensions",
    ),
    Row(
        "Matryoshka2dLoss",
        "`loss.matryoshka.layers` and `loss.matryoshka.dims`, with `loss.matryoshka.layers_per_step=1`",
    ),
    Row("CoSENTLoss", "`loss=cosent`"),
    Row("AnglELoss", "`loss=angle`"),
    Row("CosineSimilarityLoss", "`loss=cosine_mse`", also="CosineEmbeddingLoss"),
    Row("ContrastiveLoss", "`loss=contrastive`"),
    Row("OnlineContrastiveLoss", "`loss=online_contrastive`"),
    Row(
        "TripletLoss",
        "`loss=triplet`; its defaults are `loss.distance=euclidean` and `loss.margin=5`",
        also="TripletMarginLoss",
    ),
    Row(
        "BatchHardTripletLoss BatchAllTripletLoss BatchSemiHardTripletLoss BatchHardSoftMarginTripletLoss",
        "`loss=batch_triplet` with `loss.mining`",
    ),
    Row("MarginMSELoss", "`loss=margin_mse`"),
    Row("DistillKLDivLoss", "`loss=distill_scores`", also="KLDivLoss kl_div knowledge_distillation"),
    Row(
        "MSELoss EmbedDistillLoss",
        "`loss=distill_embeddings`; `MSELoss` of a CrossEncoder, which takes scores, is `loss=mse`",
    ),
    *_LISTWISE,
    Row(
        "SpladeLoss CachedSpladeLoss",
        "`loss=infonce` with `model.kind=sparse`, whose regularizers are options of `sparsity`",
        also="SPLADE FlopsLoss SparseMultipleNegativesRankingLoss",
    ),
    Row("GlobalOrthogonalRegularizationLoss", "`loss=orthogonal`, in `loss=combined`", also="GOR"),
    Row("", "`loss=distill_similarities`", also="InfoNCEDistillLoss distill_infonce"),
    Row("", "`loss=siglip`", also="SigmoidLoss SigLIPLoss"),
    Row(
        "",
        "`loss=sentence_transformers loss.class_name=NAME loss.arguments={...}`",
        shown="any other loss class that computes from embeddings",
    ),
)

# Loss classes of a CrossEncoder of sentence-transformers, for model.kind=cross_encoder.
RERANKER_LOSSES = (
    Row(
        "MultipleNegativesRankingLoss CachedMultipleNegativesRankingLoss",
        "`loss=softmax` with `data.batch_negatives=4`, which draws from the batch of all GPUs; its scores are logits, "
        "where theirs are 10 times a sigmoid",
    ),
    Row("MarginMSELoss", "`loss=margin_mse`"),
    Row("MSELoss", "`loss=mse`"),
    Row("DistillKLDivLoss", "`loss=distill_scores`"),
    Row(
        "CrossEntropyLoss",
        "`loss=softmax`, a positive against negatives; a model of two classes is one of a score with "
        "`model.score_labels=[1,0]`, for which `loss=bce` is the same loss; more classes are not available",
    ),
    *_LISTWISE,
)

# Evaluators of sentence-transformers, and what else their kind of set is called.
EVALUATORS = (
    Row(
        "InformationRetrievalEvaluator",
        "`evaluation.sets=[{path: PATH, kind: retrieval}]`, a BEIR folder or a table of questions and answers",
        also="information_retrieval ir",
    ),
    Row(
        "NanoBEIREvaluator",
        "a benchmark of MTEB: `embedtrain evaluate model=runs/NAME/model mteb=[NanoBEIR]`",
        also="NanoBEIR nano_beir",
    ),
    Row(
        "EmbeddingSimilarityEvaluator",
        "`evaluation.sets=[{path: PATH, kind: sts}]`: `sentence1`, `sentence2` and `score`",
        also="embedding_similarity similarity",
    ),
    Row(
        "BinaryClassificationEvaluator",
        "`evaluation.sets=[{path: PATH, kind: pair_classification}]`: `sentence1`, `sentence2` and `label`",
        also="binary_classification binary pairs",
    ),
    Row(
        "TripletEvaluator",
        "`evaluation.sets=[{path: PATH, kind: reranking}]`: `query`, `positive` and `negative`; with one negative in "
        "each row, `map` is (1 + accuracy) / 2",
        also="triplet triplets",
    ),
    Row(
        "RerankingEvaluator",
        "`evaluation.sets=[{path: PATH, kind: reranking}]`: `query`, `positive` and `negative`",
        also="rerank reranker",
    ),
    Row(
        "TranslationEvaluator",
        "`evaluation.sets=[{path: PATH, kind: bitext}]`, two columns of sentences",
        also="translation bitext_mining",
    ),
    Row(
        "LabelAccuracyEvaluator",
        "`evaluation.sets=[{path: PATH, kind: classification}]`, which fits a classifier to the vectors of `text`",
        also="label_accuracy",
    ),
    Row("SequentialEvaluator", "`evaluation.sets=[PATH,PATH,...]`, one row of metrics for each"),
    Row(
        "MSEEvaluator MSEEvaluatorFromDataFrame ParaphraseMiningEvaluator",
        "not available; `evaluation.function=module:function` calls a function of your own",
    ),
)
