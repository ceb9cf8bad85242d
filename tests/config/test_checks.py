"""Every rule of the recipe and of the evaluation's options: what breaks it, and that the sentence names it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from embedtrain.config.data_checks import SOURCE_RULES

from embedtrain.config.checks import RULES, SET_RULES, check_recipe
from embedtrain.config.evaluation import EvaluationSet, SetKind
from embedtrain.config.recipe import ModelConfig, Pooling, Recipe, Strategy, TrainSource
from embedtrain.errors import ConfigError
from embedtrain.evaluate.options import EvaluateOptions, check_evaluate


def good() -> Recipe:
    recipe = Recipe(name="a", model=ModelConfig(path="somewhere"))
    recipe.data.train = [TrainSource(path="rows.jsonl")]
    recipe.train.steps = 10
    return recipe


def changed(path: str, value: object) -> Callable[[Recipe], None]:
    def change(recipe: Recipe) -> None:
        *parents, name = path.split(".")
        holder = recipe
        for parent in parents:
            holder = getattr(holder, parent)
        setattr(holder, name, value)

    return change


def patient(every: int, best: str | None) -> Callable[[Recipe], None]:
    def change(recipe: Recipe) -> None:
        recipe.evaluation.sets = [EvaluationSet(path="dev")]
        recipe.evaluation.patience, recipe.evaluation.every, recipe.checkpoint.best_metric = 3, every, best

    return change


def best_without_set(recipe: Recipe) -> None:
    recipe.evaluation.sets = [EvaluationSet(path="dev")]
    recipe.checkpoint.best_metric = "ndcg@10"


def revision_of_nothing(recipe: Recipe) -> None:
    recipe.model = ModelConfig(config={"model_type": "bert"}, pooling=Pooling.mean, revision="main")


BROKEN: list[tuple[str, Callable[[Recipe], None], str]] = [
    ("no name", changed("name", ""), "recipe=NAME"),
    ("negative seed", changed("seed", -1), "seed=-1"),
    ("huge seed", changed("seed", 2**63), "seed="),
    ("no model", changed("model.path", None), "model.path"),
    ("two models", changed("model.config", {"model_type": "bert"}), "keep one"),
    ("revision of nothing", revision_of_nothing, "model.revision=main chooses a version of a Hub repository"),
    ("tokenizer's", changed("model.tokenizer_revision", "main"), "model.tokenizer_revision=main has no use without"),
    ("no pooling", changed("model", ModelConfig(config={"model_type": "bert"})), "model.pooling"),
    ("short texts", changed("model.max_length", 2), "model.max_length=2"),
    ("no rows", changed("data.train", []), "data.train"),
    ("no text", changed("data.instruction_format", "{instruction}"), "data.instruction_format='{instruction}' must"),
    ("mixing", changed("data.mixing_temperature", 0.0), "data.mixing_temperature=0.0"),
    ("workers", changed("data.workers", -1), "data.workers=-1"),
    ("passes", changed("train.pass_overhead_tokens", -1), "train.pass_overhead_tokens=-1"),
    ("no length", changed("train.steps", None), "exactly one"),
    ("two lengths", changed("train.epochs", 1.0), "exactly one"),
    ("0 steps", changed("train.steps", 0), "train.steps=0"),
    ("keep tokens", changed("train.activation_tokens", -1), "train.activation_tokens=-1"),
    (
        "gradient_accumulation_steps",
        changed("train.gradient_accumulation_steps", 0),
        "train.gradient_accumulation_steps=0",
    ),
    ("the loss's lr", changed("optim.loss_lr", 0.0), "optim.loss_lr=0"),
    ("-1 steps", changed("train.steps", -1), "train.steps=-1"),
    ("batch of 1", changed("train.global_batch_size", 1), "train.global_batch_size=1"),
    ("chunk 0", changed("train.chunk_tokens", 0), "train.chunk_tokens=0"),
    ("evaluation chunk 0", changed("evaluation.chunk_tokens", 0), "evaluation.chunk_tokens=0"),
    ("log 0", changed("train.log_every", 0), "train.log_every=0"),
    ("lr 0", changed("optim.lr", 0.0), "optim.lr=0.0"),
    ("lr NaN", changed("optim.lr", float("nan")), "optim.lr=nan"),
    ("lr inf", changed("optim.lr", float("inf")), "optim.lr=inf"),
    ("one beta", changed("optim.betas", [0.9]), "optim.betas=[0.9]"),
    ("beta 1", changed("optim.betas", [0.9, 1.0]), "optim.betas"),
    ("eps", changed("optim.eps", -1e-8), "optim.eps"),
    ("warmup", changed("optim.warmup", -0.1), "optim.warmup=-0.1"),
    ("decay", changed("optim.weight_decay", float("nan")), "optim.weight_decay=nan"),
    ("clip 0", changed("optim.max_grad_norm", 0.0), "optim.max_grad_norm=0.0"),
    ("shards without hsdp", changed("parallel.shard_size", 2), "parallel.shard_size=2"),
    ("timeout", changed("parallel.timeout", 0.0), "parallel.timeout=0.0"),
    ("infinite timeout", changed("parallel.timeout", float("inf")), "parallel.timeout=inf"),
    ("step timeout", changed("parallel.step_timeout", 0.0), "parallel.step_timeout=0.0"),
    ("evaluation every", changed("evaluation.every", -1), "evaluation.every=-1"),
    ("evaluation subset", changed("evaluation.subset", 0), "evaluation.subset=0"),
    ("no patience", changed("evaluation.patience", 0), "evaluation.patience=0"),
    ("patience for nothing", patient(10, None), "set checkpoint.best_metric to set/metric"),
    ("patience without evaluations", patient(0, "dev/ndcg@10"), "set evaluation.every"),
    ("checkpoint every", changed("checkpoint.every", -1), "checkpoint.every=-1"),
    ("keep", changed("checkpoint.keep", 0), "checkpoint.keep=0"),
    ("keep every", changed("checkpoint.keep_every", -1), "checkpoint.keep_every=-1"),
    ("no room", changed("checkpoint.max_disk_gb", 0.0), "checkpoint.max_disk_gb=0.0: must be above 0"),
    ("room without end", changed("checkpoint.max_disk_gb", float("nan")), "checkpoint.max_disk_gb=nan"),
    ("best of nothing", changed("checkpoint.best_metric", "dev/ndcg@10"), "evaluation.sets is empty"),
    ("best without set", best_without_set, "checkpoint.best_metric=ndcg@10"),
]


BROKEN_SOURCES: list[tuple[dict[str, object], str]] = [
    ({"weight": 0.0}, "weight=0.0: must be above 0"),
    ({"weight": float("nan")}, "weight=nan"),
    ({"weight": float("inf")}, "weight=inf"),
    ({"documents_revision": "main"}, "documents_revision=main has no use without documents"),
    ({"negatives": -1}, "negatives=-1: a number from 0 on"),
    ({"score_scale": 0.0}, "score_scale=0.0"),
    ({"max_rows": 0}, "max_rows=0"),
    ({"query_max_length": 2}, "query_max_length=2"),
    ({"document_max_length": 0}, "document_max_length=0"),
    ({"instruction_format": "{text} {instruction}"}, "instruction_format='{text} {instruction}' must say where"),
]


BROKEN_SETS: list[tuple[dict[str, object], str]] = [
    ({"path": ""}, "path is empty"),
    ({"subset": 0}, "subset=0: at least 1 query or row"),
    ({"subset_documents": 0}, "subset_documents=0: at least 1 document"),
    ({"query_max_length": 2}, "query_max_length=2 leaves no room"),
    ({"document_max_length": 2}, "document_max_length=2 leaves no room"),
    ({"metrics": []}, "metrics=[] measures nothing"),
    ({"candidates": "bm25.run", "kind": SetKind.retrieval}, "candidates=bm25.run is for kind=reranking, not retrieval"),
    ({"train": "train.tsv", "kind": SetKind.sts}, "train=train.tsv is for kind=classification, not sts"),
    ({"samples_per_label": 0}, "samples_per_label=0: at least 1"),
    ({"experiments": 0}, "experiments=0: at least 1"),
]


def test_a_good_recipe_breaks_no_rule():
    recipe = good()
    assert check_recipe(recipe) is recipe


@pytest.mark.parametrize(("change", "words"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_broken_rules_name_the_option(change, words):
    recipe = good()
    change(recipe)
    with pytest.raises(ConfigError) as caught:
        check_recipe(recipe)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("options", "words"), BROKEN_SOURCES)
def test_broken_rules_of_sources_name_the_path_and_the_value(options, words):
    recipe = good()
    recipe.data.train.append(TrainSource(path="dir/b.jsonl", **options))
    with pytest.raises(ConfigError) as caught:
        check_recipe(recipe)
    assert str(caught.value).startswith(f"data.train, dir/b.jsonl: {words}")


def test_every_rule_of_sources_can_break():
    sources = [TrainSource(path="a", **options) for options, _ in BROKEN_SOURCES]
    assert all(any(broken(source) for source in sources) for broken, _ in SOURCE_RULES)


@pytest.mark.parametrize(("options", "words"), BROKEN_SETS)
def test_broken_rules_of_sets_name_the_element(options, words):
    recipe = good()
    recipe.evaluation.sets = [EvaluationSet(path="dev"), EvaluationSet(**{"path": "test", **options})]
    with pytest.raises(ConfigError) as caught:
        check_recipe(recipe)
    assert str(caught.value).startswith(f"evaluation.sets[1].{words}")
    with pytest.raises(ConfigError) as caught:
        check_evaluate(EvaluateOptions(model="m", sets=recipe.evaluation.sets))
    assert str(caught.value).startswith(f"sets[1].{words}")


def test_every_rule_of_sets_can_break():
    sets = [EvaluationSet(**{"path": "a", **options}) for options, _ in BROKEN_SETS]
    assert all(any(broken(one) for one in sets) for broken, _ in SET_RULES)
    assert not any(broken(EvaluationSet(path="a", kind=SetKind.reranking, candidates="b")) for broken, _ in SET_RULES)


def test_a_name_is_given_once():
    recipe = good()
    recipe.data.train = [TrainSource(path="a", name="x"), TrainSource(path="b/x"), TrainSource(path="c", name="x")]
    with pytest.raises(ConfigError, match=r"data\.train, c: name=x is the name of a too: give each a name of its own"):
        check_recipe(recipe)
    check_recipe(replace(recipe, data=replace(recipe.data, train=recipe.data.train[:2])))


def test_epochs_of_zero_are_refused():
    recipe = good()
    recipe.train.steps, recipe.train.epochs = None, 0.0
    with pytest.raises(ConfigError, match=r"train\.epochs=0"):
        check_recipe(recipe)


def test_hsdp_takes_a_shard_size_from_1_on():
    recipe = good()
    recipe.parallel.strategy, recipe.parallel.shard_size = Strategy.hsdp, 2
    check_recipe(recipe)
    recipe.parallel.shard_size = 0
    with pytest.raises(ConfigError, match=r"parallel\.shard_size=0"):
        check_recipe(recipe)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("formats", ["tensorflow"], "export.formats=['tensorflow']: allowed is sentence_transformers, onnx"),
        ("max_file_size", "5 GiB", "export.max_file_size=5 GiB: a number above 0 with KB, MB, GB or TB"),
        ("push_to_hub", "me//model", "export.push_to_hub=me//model: "),
    ],
)
def test_broken_export_options_are_named(option, value, words):
    recipe = good()
    setattr(recipe.export, option, value)
    with pytest.raises(ConfigError) as caught:
        check_recipe(recipe)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_every_rule_can_break():
    """No rule stands there that none of the cases above reaches."""
    reached = set()
    cases = [change for _, change, _ in BROKEN]

    def no_shards(recipe: Recipe) -> None:
        recipe.parallel.strategy, recipe.parallel.shard_size = Strategy.hsdp, 0

    for change in [*cases, no_shards]:
        recipe = good()
        change(recipe)
        reached.add(next(i for i, (broken, _) in enumerate(RULES) if broken(recipe)))
    assert reached == set(range(len(RULES)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": ""}, "model=DIR"),
        ({"sets": []}, r"sets=\[PATH,...\] .* mteb=\[TASK,...\]"),
        ({"subset": 0}, "subset=0"),
        ({"chunk_tokens": 0}, "chunk_tokens=0"),
        ({"run_depth": 0}, "run_depth=0"),
        ({"max_length": 1}, "max_length=1"),
        ({"timeout": 0.0}, "timeout=0"),
    ],
)
def test_evaluate_options(changes, words):
    options = EvaluateOptions(model="m", sets=[EvaluationSet(path="s")], pooling=Pooling.cls)
    assert check_evaluate(options) is options
    check_evaluate(replace(options, sets=[], mteb=["STS12"]))
    with pytest.raises(ConfigError, match=words):
        check_evaluate(replace(options, **changes))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"include_prompt": False, "pooling": Pooling.cls}, r"model\.include_prompt=false is for model\.pooling=mean"),
        ({"include_prompt": False, "pooling": Pooling.last}, r"model\.include_prompt=false is for model\.pooling=mean"),
        ({"rope_scaling": "yarn"}, "a mapping with rope_type and factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "longest text of a batch"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor=None"),
    ],
)
def test_options_that_no_model_can_have(change: dict[str, object], sentence: str) -> None:
    recipe = good()
    recipe.model = replace(recipe.model, **change)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=sentence):
        check_recipe(recipe)
    recipe.model = replace(
        recipe.model, include_prompt=False, pooling=Pooling.mean, rope_scaling={"rope_type": "yarn", "factor": 2}
    )
    assert check_recipe(recipe) is recipe
