"""Every check of a recipe: a value that it rejects, and that the message names option and value."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

import embedtrain.kinds.dense as dense_options
import embedtrain.kinds.sparse.options as sparse_options
from embedtrain.commands.evaluate import EvaluateOptions, check_evaluate
from embedtrain.config import checks
from embedtrain.config import optim as optim_checks
from embedtrain.config.checks import check_recipe
from embedtrain.config.compose import compose_recipes
from embedtrain.config.evaluation import EvaluationSet, ScanDtype, SetKind, VectorDtype, VectorPlacement
from embedtrain.config.kind_settings import HeadConfig, QueryExpansion, ScoreHead, SparseQueries, SparseRegularizer
from embedtrain.config.losses import BCEConfig, M3LossConfig, MSEConfig, SoftmaxConfig
from embedtrain.config.optim import DecayShape, MuonDtype, OptimizerName, ParameterGroup, ScheduleKind, StateDtype
from embedtrain.config.options import check_values
from embedtrain.config.recipe import (
    BaseDtype,
    DataFormat,
    LoraConfig,
    Pooling,
    Precision,
    Recipe,
    Strategy,
    TrainSource,
)
from embedtrain.config.validation import written
from embedtrain.errors import ConfigError
from tests.config.failing_checks import all_checks, failed_check
from tests.small import model_options

Change = Callable[[Recipe], None]
NAN, INFINITE = float("nan"), float("inf")
SCRATCH = {"model_type": "bert"}
CROSS_ENCODER = {"model__kind": "cross_encoder"}
LATE_INTERACTION = {"model__kind": "late_interaction"}
SPARSE = {"model__kind": "sparse"}
M3 = {"model__kind": "m3", "loss": M3LossConfig()}
OWN_TEMPLATE = {"query": "{query}", "document": "{document}"}
ROPE = {"rope_type": "yarn", "factor": 2}


def valid_recipe() -> Recipe:
    recipe = Recipe(name="a", model=model_options(path="somewhere"))
    recipe.data.train = [TrainSource(path="rows.jsonl")]
    recipe.train.steps = 10
    return recipe


def setting(**options: object) -> Change:
    """Set options, `__` for the dots in their names."""

    def change(recipe: Recipe) -> None:
        if "model__kind" in options:
            recipe.model = model_options(str(options["model__kind"]), path="somewhere")
        for path, value in options.items():
            *sections, name = path.split("__")
            holder = recipe
            for section in sections:
                holder = getattr(holder, section)
            setattr(holder, name, value)

    return change


def option(name: str, value: object, **others: object) -> object:
    """A case in which one option is rejected: by its name and value."""
    change = setting(**{name.replace(".", "__"): value}, **others)
    return pytest.param(change, f"{re.escape(f'{name}={written(value)}')}: ", id=f"{name}={value}")


def in_head(out: int, **others: object) -> object:
    change = setting(model__heads=[HeadConfig(out=out)], **others)
    return pytest.param(change, rf"model\.heads\[0\]\.out={out}: ", id=f"heads-{out}-{len(others)}-{'-'.join(others)}")


def case(pattern: str, **options: object) -> object:
    return pytest.param(setting(**options), pattern, id=pattern)


def in_group(name: str, value: object, first: ParameterGroup | None = None, **others: object) -> object:
    """A case in which an option of a parameter group is rejected."""
    groups = [*([] if first is None else [first]), ParameterGroup(**({"match": "b"} | others | {name: value}))]
    pattern = re.escape(f"optim.groups[{len(groups) - 1}].{name}={written(value)}: ")
    return pytest.param(setting(optim__groups=groups), pattern, id=f"groups.{name}={value}-{len(others)}")


DEV = [EvaluationSet(path="dev")]
CASES = [
    case(r"recipe=NAME", name=""),
    option("seed", -1),
    option("seed", 2**63),
    case(r"model\.path .* model\.config", model__path=None),
    case(r"model\.path and model\.config .* keep one", model__config=SCRATCH),
    option("model.revision", "main", model__path=None, model__config=SCRATCH, model__pooling=Pooling.mean),
    option("model.tokenizer_revision", "main"),
    case(r"model\.pooling", model=model_options(config=SCRATCH)),
    option("model.dimension", 0, **M3),
    option("model.hybrid_weights", [1.0, 0.0], **M3),
    option("export.formats", ["adapter"], model__lora__rank=4, **M3),
    option("evaluation.index.dtype", VectorDtype.bf16, **M3),
    *[option("evaluation.index.scan_dtype", ScanDtype.int8, **kind) for kind in (M3, SPARSE, CROSS_ENCODER)],
    option("evaluation.index.scan_dtype", ScanDtype.bf16, evaluation__index__dtype=VectorDtype.bf16),
    option("evaluation.index.place", VectorPlacement.disk),
    option("evaluation.index.token_pooling", 2.0),
    option("evaluation.index.first_stage", 100),
    option("evaluation.index.first_stage_pooling", 2.0, **LATE_INTERACTION),
    option("evaluation.index.scan_dtype", ScanDtype.int8, evaluation__index__first_stage=10, **LATE_INTERACTION),
    option("sparsity.query_weight", 0.5),
    option("sparsity.document_weight", -1.0, **SPARSE),
    option("sparsity.query_threshold", -1, **SPARSE),
    option("sparsity.query_threshold", 8, sparsity__query_regularizer=SparseRegularizer.l1, **SPARSE),
    option("sparsity.ramp", -1.0, **SPARSE),
    option("export.formats", ["logit_score"], **SPARSE),
    option("export.truncate_dim", 8, **SPARSE),
    option("model.query_weights", "idf", model__queries=SparseQueries.encoded, **SPARSE),
    option("model.query_weights", "weights.txt", **SPARSE),
    option("sparsity.query_weight", 0.5, model__queries=SparseQueries.static, **SPARSE),
    option("model.dimension", 0, **LATE_INTERACTION),
    option("model.document_length", 2, **LATE_INTERACTION),
    option(
        "model.expansion_length",
        32,
        model__query_expansion=QueryExpansion.none,
        **LATE_INTERACTION,
    ),
    case(
        "model.expansion_token=a: .*query_expansion",
        model=model_options(config=SCRATCH, kind="late_interaction", expansion_token="a"),
    ),
    option(
        "model.query_length",
        16,
        model__query_expansion=QueryExpansion.min,
        model__expansion_length=32,
        **LATE_INTERACTION,
    ),
    option("model.pair_template", "qwen", **CROSS_ENCODER),
    option("model.pair_template", {"query": "{query}", "document": "{document}", "sufix": "x"}, **CROSS_ENCODER),
    option("model.pair_template", {"query": "Q: {query}", "document": "{documents}"}, **CROSS_ENCODER),
    *[
        option("model.score_tokens", tokens, **CROSS_ENCODER)
        for tokens in ([], ["a", "a"], ["a", "b", "c"], [""], ["True", "False"])
    ],
    *[option("model.score_labels", labels, **CROSS_ENCODER) for labels in ([], [1, 1], [2, 1, 0], [-1])],
    option("model.score_labels", [1, 0], model__score_head=ScoreHead.tokens, **CROSS_ENCODER),
    option("model.score_tokens", ["1", "0"], model__score_head=ScoreHead.classification, **CROSS_ENCODER),
    case(
        "model.score_head=tokens: .*model.path",
        model=model_options(config=SCRATCH, kind="cross_encoder", score_head=ScoreHead.tokens),
    ),
    option("model.score_head", ScoreHead.tokens, model__pair_template=OWN_TEMPLATE, **CROSS_ENCODER),
    option("export.formats", ["adapter"], model__kind="late_interaction", model__lora__rank=4),
    option("export.truncate_dim", 8, model__kind="late_interaction"),
    option("loss.matryoshka.dims", [8], **CROSS_ENCODER),
    option("evaluation.truncate_dims", [8], **CROSS_ENCODER),
    option("export.truncate_dim", 8, **CROSS_ENCODER),
    case(r"loss=infonce: .*loss=softmax", **CROSS_ENCODER),
    option("model.max_length", 2),
    *(
        case(
            rf"model\.include_prompt=false .* model\.pooling=mean.*{pooling.value}",
            model__include_prompt=False,
            model__pooling=pooling,
        )
        for pooling in (Pooling.cls, Pooling.last)
    ),
    case(r"model\.rope_scaling='yarn': .*rope_type", model__rope_scaling="yarn"),
    case(r"model\.rope_scaling\.rope_type=longrope: ", model__rope_scaling=ROPE | {"rope_type": "longrope"}),
    case(r"model\.rope_scaling\.rope_type=new: .*yarn", model__rope_scaling=ROPE | {"rope_type": "new"}),
    case(r"model\.rope_scaling\.factor=None: ", model__rope_scaling={"rope_type": "yarn"}),
    case(
        r"model\.rope_scaling\.original_max_position_embeddings=0: ",
        model__rope_scaling=ROPE | {"original_max_position_embeddings": 0},
    ),
    option("data.train", []),
    option("data.instruction_format", "{instruction}"),
    option("data.mixing_temperature", 0.0),
    option("data.workers", -1),
    option("data.batch_negatives", -1),
    option("data.batch_negatives", 4),
    case(r"data\.batch_negatives=4: loss=mse ", data__batch_negatives=4, loss=MSEConfig(), **CROSS_ENCODER),
    case(
        r"data\.batch_negatives=4: .*loss\.positive_above=-1",
        data__batch_negatives=4,
        loss=SoftmaxConfig(positive_above=-1.0),
        **CROSS_ENCODER,
    ),
    case(r"train\.steps=null and train\.epochs=null", train__steps=None),
    case(r"train\.steps=10 and train\.epochs=1\.0: .*train\.epochs=null", train__epochs=1.0),
    option("train.steps", 0),
    option("train.steps", -1),
    option("train.epochs", 0.0, train__steps=None),
    option("train.global_batch_size", 1),
    option("train.chunk_tokens", 0),
    option("train.activation_tokens", -1),
    option("train.pass_overhead_tokens", -1),
    option("train.gradient_accumulation_steps", 0),
    option("train.log_every", 0),
    option("optim.lr", 0.0),
    option("optim.lr", NAN),
    option("optim.lr", INFINITE),
    option("optim.betas", [0.9]),
    option("optim.betas", [0.9, 1.0]),
    option("optim.eps", -1e-8),
    option("optim.warmup", -0.1),
    option("optim.warmup", 0.0, optim__schedule=ScheduleKind.inverse_sqrt),
    option("optim.decay", 0.0, optim__schedule=ScheduleKind.wsd),
    option("optim.decay", 0.2),
    option("optim.decay_shape", DecayShape.cosine),
    option("optim.power", 0.0, optim__schedule=ScheduleKind.polynomial),
    option("optim.power", 2.0),
    option("optim.min_lr_ratio", -1e-7),
    option("optim.min_lr_ratio", 1.5),
    option("optim.min_lr_ratio", 0.1, optim__schedule=ScheduleKind.constant),
    option("optim.schedule_steps", 0),
    option("optim.betas", [0.9, 0.999], optim__state_dtype=StateDtype.bf16),
    option("optim.momentum", 1.0, optim__name=OptimizerName.muon),
    option("optim.momentum", 0.9),
    option("optim.muon_dtype", MuonDtype.bf16),
    option("optim.ema", 1.0),
    in_head(0),
    in_head(8, model__lora__rank=4, export__formats=["adapter"]),
    option("optim.layer_decay", 1.5),
    in_group("match", "(", lr=0.1),
    in_group("match", "a"),
    in_group("name", "x", lr=0.1, first=ParameterGroup(match="a", name="x", lr=0.1)),
    in_group("lr", -0.1),
    in_group("lr_scale", -0.1),
    in_group("lr_scale", 0.1, lr=0.1),
    in_group("weight_decay", -0.1),
    in_group("freeze_until", NAN),
    option("optim.weight_decay", NAN),
    option("optim.max_grad_norm", 0.0),
    option("parallel.shard_size", 2),
    option("parallel.shard_size", 0, parallel__strategy=Strategy.hsdp),
    option("parallel.activation_checkpointing", "full"),
    option("parallel.fp8", True, parallel__precision=Precision.fp32),
    option("parallel.compile", "always"),
    option("parallel.fused_kernels", "always"),
    option("parallel.timeout", 0.0),
    option("parallel.timeout", INFINITE),
    option("parallel.step_timeout", 0.0),
    option("evaluation.every", -1),
    option("evaluation.chunk_tokens", 0),
    option("evaluation.subset", 0),
    option("evaluation.metrics", []),
    option("evaluation.truncate_dims", [8, 0]),
    option("evaluation.function", "measure"),
    option("export.truncate_dim", 0),
    option("export.license", "Apache 2"),
    option("export.language", ["English"]),
    option("evaluation.trained_weights", True),
    option("evaluation.patience", 0),
    option("evaluation.rerank_depth", 0),
    option("evaluation.rerank_depth", 9),
    option("evaluation.document_windows", True),
    option("evaluation.function", "a:b", **CROSS_ENCODER),
    option("evaluation.patience", 3, evaluation__sets=DEV, evaluation__every=10),
    option("evaluation.patience", 3, evaluation__sets=DEV, checkpoint__best_metric="dev/ndcg@10"),
    option("checkpoint.every", -1),
    option("checkpoint.every_minutes", -1.0),
    option("checkpoint.keep", 0),
    option("checkpoint.keep_every", -1),
    option("checkpoint.max_disk_gb", 0.0),
    option("checkpoint.max_disk_gb", NAN),
    option("checkpoint.best_metric", "dev/ndcg@10"),
    option("checkpoint.best_metric", "ndcg@10", evaluation__sets=DEV),
    *(
        case(
            rf"checkpoint\.best_metric={theirs}: must be set/metric: write {ours};",
            checkpoint__best_metric=theirs,
            evaluation__sets=DEV,
        )
        for theirs, ours in (
            ("eval_dev_cosine_ndcg@10", "dev/ndcg@10"),
            ("cosine_accuracy@5", "SET/hit@5"),
            ("my-dev_spearman_cosine", "my-dev/spearman"),
            ("dev_mrr@10", "dev/mrr@10"),
            ("eval_dev_cosine_ap", "dev/ap"),
        )
    ),
    option("export.formats", ["tensorflow"]),
    option("export.formats", ["logit_score"]),
    option("export.max_file_size", "5 GiB"),
    option("export.push_to_hub", "me//model"),
    option("model.lora.rank", 0),
    option("model.lora.alpha", 0.0, model__lora__rank=4),
    option("model.lora.dropout", 1.0, model__lora__rank=4),
    option("model.lora.targets", [], model__lora__rank=4),
    option("model.lora.targets", ["all-linear", "q_proj"], model__lora__rank=4),
    option("model.lora.targets", ["q_proj"]),
    option("model.lora.base_dtype", BaseDtype.bf16),
    option("model.lora.rank", 4, model__lora__path="x"),
    option("model.lora.revision", "v1", model__lora__rank=4),
    case(r"export\.formats=\[adapter\]: .*model\.lora\.rank", export__formats=["adapter"]),
    case(r"export\.formats=\[onnx_fp16\]: needs onnx", export__formats=["onnx_fp16"]),
    case(r"export\.onnx_min_agreement=2: ", export__onnx_min_agreement=2),
    case(r"export\.rope_theta=0: ", export__rope_theta=0),
    case(r"model\.rope_theta=-1: ", model__rope_theta=-1),
    option("model.pooling", "avg"),
    option("model.pooling", "mine:Pooling", model__lora=LoraConfig(rank=4)),
    case(
        r"export\.formats has adapter and model\.lora\.modules_to_save has dense",
        export__formats=["adapter"],
        model__lora=LoraConfig(rank=4, modules_to_save=["dense"]),
    ),
    option("tracking.wandb_artifacts", True),
    option("tracking.wandb_init", {"base_url": "https://w"}),
    case(r"tracking\.wandb_init\.mode=disabled: ", tracking__wandb_init={"mode": "disabled"}),
    case(r"tracking\.wandb_init\.tags=zh: ", tracking__wandb_init={"tags": "zh"}),
    option("tracking.mlflow_init", {"project": "p"}),
    case(r"tracking\.mlflow_init\.tags=\[zh\]: ", tracking__mlflow_init={"tags": ["zh"]}),
    option("tracking.trackio_init", {"tags": ["zh"]}),
    option("tracking.profile", [0]),
    option("tracking.profile", [5, 21]),
    option("tracking.profile", list(range(1, 12)), train__steps=20),
    option("tracking.profile_ranks", []),
    option("tracking.profile_ranks", [-1]),
]
SOURCES = [
    {"weight": 0.0}, {"weight": NAN}, {"weight": INFINITE}, {"max_rows": 0}, {"documents_revision": "main"},
    {"negatives": -1}, {"score_scale": 0.0}, {"query_max_length": 2}, {"document_max_length": 0},
    {"instruction_format": "{text} {instruction}"}, {"name": "taken"}, {"delete_words": 1.0},
    {"text_as_positive": True, "columns": ["a", "b"]}, {"text_as_positive": True, "format": DataFormat.tevatron},
]  # fmt: skip
SETS = [
    {"path": ""}, {"path": "TripletEvaluator"},
    {"subset": 0}, {"subset_documents": 0}, {"query_max_length": 2}, {"document_max_length": 2},
    {"columns": ["only"]}, {"columns": {"query": "a", "positive": "b", "prompt": "c"}},
    {"metrics": []}, {"candidates": "bm25.run", "kind": SetKind.retrieval}, {"train": "t.tsv", "kind": SetKind.sts},
    {"samples_per_label": 0}, {"experiments": 0},
]  # fmt: skip


def rejected(recipe: Recipe) -> pytest.ExceptionInfo[ConfigError]:
    with pytest.raises(ConfigError) as caught:
        check_recipe(recipe)
    assert "\n" not in str(caught.value)
    return caught


def recipe_with_source(options: dict[str, object]) -> Recipe:
    recipe = valid_recipe()
    recipe.data.train = [TrainSource(path="a.jsonl", name="taken"), TrainSource(path="dir/b.jsonl", **options)]
    return recipe


def recipe_with_set(options: dict[str, object]) -> Recipe:
    recipe = valid_recipe()
    recipe.evaluation.sets = [*DEV, EvaluationSet(**{"path": "test", **options})]
    return recipe


def test_valid_recipes_pass():
    recipe = valid_recipe()
    assert check_recipe(recipe) is recipe
    recipe.parallel.strategy, recipe.parallel.shard_size = Strategy.hsdp, 2
    recipe.model = replace(recipe.model, include_prompt=False, pooling=Pooling.mean, rope_scaling=ROPE)
    recipe.evaluation.sets = [EvaluationSet(path="a", kind=SetKind.reranking, candidates="b")]
    recipe.data.train = [TrainSource(path="a", name="x"), TrainSource(path="b/x")]
    check_recipe(recipe)
    cross_encoder = model_options(kind="cross_encoder", config=SCRATCH)
    recipe.loss = BCEConfig()
    for template in (None, {"query": "{query}", "document": "{document}", "suffix": "?"}):
        recipe.model = replace(cross_encoder, pair_template=template)
        check_recipe(recipe)


@pytest.mark.parametrize(("change", "pattern"), CASES)
def test_a_rejected_option_is_named_with_its_value(change, pattern):
    recipe = valid_recipe()
    change(recipe)
    rejected(recipe).match(f"^.*{pattern}")


@pytest.mark.parametrize("options", SOURCES, ids=str)
def test_a_rejected_option_of_a_source_is_named_with_its_path(options):
    (name, value), *_ = options.items()
    expected = f"data.train, dir/b.jsonl: {name}={written(value)}: "
    assert str(rejected(recipe_with_source(options)).value).startswith(expected)


@pytest.mark.parametrize("options", SETS, ids=str)
def test_a_rejected_option_of_a_set_is_named_with_its_index(options):
    (name, value), *_ = options.items()
    recipe = recipe_with_set(options)
    assert str(rejected(recipe).value).startswith(f"evaluation.sets[1].{name}={written(value)}: ")
    with pytest.raises(ConfigError, match=rf"^sets\[1\]\.{name}="):
        check_evaluate(EvaluateOptions(model="m", sets=recipe.evaluation.sets))


def test_every_check_has_a_case(monkeypatch):
    modules = (checks, dense_options, optim_checks, sparse_options)
    recipes = [*map(recipe_with_source, SOURCES), *map(recipe_with_set, SETS)]
    for parameters in CASES:
        recipe = valid_recipe()
        parameters.values[0](recipe)
        recipes.append(recipe)
    reached = {failed_check(rejected(recipe).value, *modules) for recipe in recipes}
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda _: None)
    recipe = valid_recipe()
    recipe.parallel.fused_kernels = True
    caught = rejected(recipe)
    caught.match(r"parallel\.fused_kernels=true: .*liger-kernel.*pip install")
    reached.add(failed_check(caught.value, *modules))
    recipe = valid_recipe()
    recipe.model.lora = LoraConfig(rank=4, load_in_4bit=True)
    in_4bit = rejected(recipe)
    in_4bit.match(r"model\.lora\.load_in_4bit=true: .*bitsandbytes")
    recipe = valid_recipe()
    recipe.parallel.fp8 = True
    in_fp8 = rejected(recipe)
    in_fp8.match(r"^parallel\.fp8=true: .*torchao.*\[fp8\]")
    reached |= {failed_check(caught.value, *modules) for caught in (in_4bit, in_fp8)}
    assert all_checks(*modules) - reached == set()


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"model": ""}, "model="),
        ({"sets": []}, r"sets=\[PATH,...\] .* mteb=\[TASK,...\]"),
        ({"subset": 0}, "subset=0"),
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"run_depth": 0}, "run_depth=0"),
        ({"metrics": []}, r"metrics=\[\]"),
        ({"truncate_dims": [8, 8]}, r"truncate_dims=\[8,8\]"),
        ({"max_length": 1}, "max_length=1"),
        ({"timeout": 0.0}, "timeout=0"),
    ],
)
def test_options_of_evaluate(options, pattern):
    valid = EvaluateOptions(model="m", sets=[EvaluationSet(path="s")], pooling=Pooling.cls)
    assert check_evaluate(valid) is valid
    check_evaluate(replace(valid, sets=[], mteb=["STS12"]))

    def composed(options: EvaluateOptions) -> None:
        check_values(options)
        check_evaluate(options)

    with pytest.raises(ConfigError, match=pattern):
        composed(replace(valid, **options))


@pytest.mark.parametrize("targets", ["all-linear", "q_proj", "[q_proj,v_proj]"])
def test_targets_of_adapters_are_a_name_or_a_list(targets):
    arguments = ["name=t", "model.path=somewhere", "data.train=[x.jsonl]", "train.steps=1", "model.lora.rank=4"]
    (recipe,) = compose_recipes([*arguments, f"model.lora.targets={targets}"])
    assert recipe.model.lora.on


def test_options_of_tracking():
    recipe = valid_recipe()
    recipe.tracking = replace(
        recipe.tracking, wandb=True, wandb_artifacts=True, wandb_init={"mode": "offline"}, profile=[10, 3]
    )
    recipe.tracking.profile_ranks = None
    assert check_recipe(recipe) is recipe


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("optim.groups=[bias]", "optim.groups=[bias]: must be a list of mappings, such as optim.groups=[{match: ...}]"),
        ("optim.groups=bias", "optim.groups=[{match: ...}]"),
        ("optim.groups=[{lr: 1}]", "optim.groups=[{match: ...}]"),
        ("model.heads=[256]", "model.heads=[256]: must be a list of mappings, such as model.heads=[{out: ...}]"),
        ("model.heads=[{out: 8},{out: x}]", "model.heads[1].out: Value 'x'"),
        ("model.heads=[{out: 8, activation: swish}]", "model.heads[0].activation: Invalid value 'swish'"),
        ("optim.groups=[{mach: a}]", "unknown option optim.groups[0].mach, did you mean match?"),
    ],
)
def test_lists_of_options_of_another_form(argument, words):
    with pytest.raises(ConfigError) as caught:
        compose_recipes(["name=t", argument])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss.weight", 0.0, "loss.weight=0.0: is for the parts of loss=combined; leave it out"),
        ("sparsity.ramp", -1.0, "sparsity.ramp=-1.0: is for model.kind=sparse, not dense; leave it out"),
        ("parallel.shard_size", 0, "parallel.shard_size=0: is for parallel.strategy=hsdp, not auto"),
    ],
)
def test_what_an_option_is_for_comes_before_its_limits(name, value, message):
    recipe = valid_recipe()
    setting(**{name.replace(".", "__"): value})(recipe)
    with pytest.raises(ConfigError) as error:
        check_recipe(recipe)
    assert str(error.value) == message
