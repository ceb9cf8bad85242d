"""Names of other libraries, and of options that are elsewhere, are answered with the option to write."""

import re
from dataclasses import fields

import pytest
from sentence_transformers.cross_encoder import losses

from embedtrain.cli.console import _suggestion as suggestion
from embedtrain.commands.evaluate import compose as compose_evaluate
from embedtrain.commands.export import compose as compose_export
from embedtrain.commands.mine import compose as compose_mine
from embedtrain.commands.search import compose as compose_search
from embedtrain.config import migration
from embedtrain.config.commands import COMMANDS
from embedtrain.config.compose import compose_recipes
from embedtrain.config.kinds import kinds
from embedtrain.config.losses import LOSSES
from embedtrain.config.migration import SUBCOMMANDS, Row
from embedtrain.config.names import evaluator_sets, option_names, suggest, unknown_loss
from embedtrain.config.recipe import Recipe, TrainSource
from embedtrain.config.row_requirements import SENTENCE_TRANSFORMERS_LOSSES, UNSUPPORTED_LOSSES
from embedtrain.errors import ConfigError

GOOD = ["name=a", "model.path=m", "data.train=[x.jsonl]", "train.steps=5"]


@pytest.mark.parametrize(
    ("argument", "ours"),
    [
        ("train.lr=1e-4", "optim.lr=1e-4"),
        ("learning_rate=1e-4", "optim.lr=1e-4"),
        ("trainer.max_epochs=3", "train.epochs=3"),
        ("per_device_train_batch_size=32", "train.global_batch_size"),
        ("eval.steps=100", "evaluation.every=100"),
        ("fp16=true", "parallel.precision=bf16"),
        ("report_to=wandb", "tracking.wandb=true"),
        ("sentence_pooling_method=last_token", "model.pooling=last"),
        ("train_group_size=8", "negatives: 7"),
        ("data.train=[{path: x, train_group_size: 8}]", "negatives: 7"),
        ("loss.scale=20", "loss.temperature=0.05"),
        ("pooling=cls", "model.pooling=cls"),
        ("train.precision=fp32", "parallel.precision=fp32"),
        ("optim=adamw_torch", "optim.lr"),
        ("data=x.jsonl", "data.train=[x.jsonl]"),
        ("model=org/name", "model.path=org/name"),
        ("parallel=fsdp", "parallel.strategy=fsdp"),
        ("loss=MultipleNegativesRankingLoss", "loss=infonce"),
        ("loss=mnrl", "loss=infonce"),
        ("loss=Matryoshka", "loss.matryoshka.dims"),
        ("loss=MegaBatchMarginLoss", "loss=sentence_transformers loss.class_name=MegaBatchMarginLoss"),
        ("--learning_rate=1e-4", "optim.lr=1e-4"),
        ("loss=SpladeLoss", "model.kind=sparse"),
        ("cache_dir=/big", "HF_HOME"),
        ("fix_encoder=true", "optim.groups=[{match: backbone, lr: 0}]"),
        ("multi_dataset_batch_sampler=ROUND_ROBIN", "data.batches=by_source data.mixing_temperature=1e9"),
        ("ema=0.999", "optim.ema=0.999"),
        ("train.use_ema=true", "optim.ema=0.999"),
        ("layerwise_lr_decay=0.9", "optim.layer_decay=0.9"),
        ("freeze_layers=6", "optim.groups=[{match: PATTERN, lr: 0}]"),
        ("report_to=none", "leave it out"),
        ("max_steps=-1", "leave it out"),
        ("--resume", "write resume=auto|never|require"),
        ("resume_from_checkpoint=true", "the same command resumes"),
        ("--verbose", "tracking.verbose=true"),
        ("--wandb", "tracking.wandb=true"),
        ("--lora", "model.lora.rank=16"),
        ("model.lora=8", "model.lora.rank=8"),
        ("multi_dataset_batch_sampler=PROPORTIONAL", "write data.batches=by_source"),
        ("dev=dev.jsonl", "evaluation.sets=[dev.jsonl]"),
        ("model.kind=reranker", "model.kind=cross_encoder"),
        ("model.kind=cross-encoder", "model.kind=cross_encoder"),
        ("model.kind=bi_encoder", "model.kind=dense"),
        ("evaluator=InformationRetrievalEvaluator", "evaluation.sets=[{path: PATH, kind: retrieval}]"),
        ("evaluation.sets=[EmbeddingSimilarityEvaluator]", "evaluation.sets=[{path: PATH, kind: sts}]"),
        ("evaluation.sets=[{path: x, kind: TripletEvaluator}]", "kind: reranking"),
        ("loss=CachedMultipleNegativesRankingLoss", "loss.temperature=0.05"),
        ("model.pooling=avg", "model.pooling=mean"),
        ("parallel.strategy=full_shard", "parallel.strategy=fsdp"),
        ("parallel.precision=fp16", "parallel.precision=bf16"),
        ("optim.betas=0.9,0.98", "optim.betas=[0.9,0.98]"),
        ("max_train_samples=100", "max_rows: 100"),
        ("num_processes=8", "--gpus 8"),
        ("model=bert-base-uncased", "model.path=bert-base-uncased"),
    ],
)
def test_a_name_of_another_library_is_answered_with_the_option(argument, ours):
    with pytest.raises(ConfigError) as caught:
        compose_recipes([*GOOD, argument])
    sentence = str(caught.value)
    assert ours in sentence, sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("kind", "name", "ours"),
    [
        ("recipe=bce_reranker", "MultipleNegativesRankingLoss", "loss=softmax with data.batch_negatives=4"),
        ("model.kind=cross_encoder", "MSELoss", "loss=mse"),
        ("model.kind=cross_encoder", "CrossEntropyLoss", "loss=softmax"),
        ("recipe=bce_reranker", "LambdaLoss", "loss=lambdaloss"),
    ],
)
def test_a_loss_class_is_answered_for_the_kind_of_the_model(kind, name, ours):
    with pytest.raises(ConfigError, match=f"^loss={name}: write {re.escape(ours)}"):
        compose_recipes([*GOOD, kind, f"loss={name}"])


def test_every_loss_class_of_a_cross_encoder_is_answered_with_a_loss():
    classes = {name for row in migration.RERANKER_LOSSES for name in row.names.split()}
    assert classes >= {name for name in losses.__all__ if name.endswith("Loss")}
    assert all(row.ours.split("`")[1].removeprefix("loss=") in LOSSES for row in migration.RERANKER_LOSSES)


@pytest.mark.parametrize(
    ("arguments", "ours"),
    [
        (["--train_data", "a.jsonl", "b.jsonl"], "data.train=[a.jsonl,b.jsonl]"),
        (["--fp16", "--gradient_checkpointing"], "parallel.precision"),
        (["--name", "mine"], "name=mine"),
        (["--model", "org/name"], "model.path=org/name"),
        (["--loss", "MultipleNegativesRankingLoss"], "loss=infonce"),
        (["-c", "own.yaml"], "--config-dir . recipe=own"),
        (["--config_file", "own.yaml"], "parallel.accelerate_config=own.yaml"),
    ],
)
def test_flags_are_answered_with_their_values(arguments, ours):
    with pytest.raises(ConfigError, match=re.escape(f" {ours}")):
        compose_recipes([*GOOD, *arguments])


def test_in_a_file_as_well(tmp_path):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "own.yaml").write_text("# @package _global_\nname: own\ntrain: {lr: 1e-4}\n")
    with pytest.raises(ConfigError, match=r"unknown option train\.lr: write optim\.lr"):
        compose_recipes(["--config-dir", str(tmp_path), "recipe=own", *GOOD[1:]])


@pytest.mark.parametrize("argument", ["loss.temperature=0.05", "loss.scale=20", "loss.bias=1"])
def test_an_option_that_the_chosen_loss_does_not_have_is_not_suggested(argument):
    with pytest.raises(ConfigError) as caught:
        compose_recipes([*GOOD, "loss=triplet", argument])
    assert "write" not in str(caught.value)
    assert "Allowed are" in str(caught.value)
    assert "margin" in str(caught.value)


def test_nor_in_a_part_of_a_combined_loss():
    with pytest.raises(ConfigError, match=r"unknown option temperature\. Allowed are .*margin"):
        compose_recipes([*GOOD, "loss=combined", "loss.losses=[{name: triplet, temperature: 0.05}]"])


@pytest.mark.parametrize(
    ("options", "place"),
    [
        (["loss.temperature=0.02"], "loss.losses=[{name: LOSS, temperature: 0.02},...]"),
        (["loss.teacher_temperature=2"], "loss.losses=[{name: LOSS, teacher_temperature: 2},...]"),
        (["+loss.margin=0.1"], "loss.losses=[{name: LOSS, margin: 0.1},...]"),
    ],
)
def test_options_of_the_parts_of_a_combined_loss_are_written_in_them(options, place):
    with pytest.raises(ConfigError, match=f"the parts of loss=combined: .*{re.escape(place)}"):
        compose_recipes([*GOOD, "loss=combined", "loss.losses=[{name: infonce},{name: distill_scores}]", *options])


def test_those_of_a_combined_loss_of_a_source_as_well():
    source = "{path: a.jsonl, loss: {name: combined, losses: [{name: infonce}], temperature: 0.02}}"
    with pytest.raises(ConfigError, match=r"the parts of loss=combined: .*losses=\[\{name: LOSS, temperature: "):
        compose_recipes([*GOOD, f"data.train=[{source}]"])


def test_nor_in_a_file(tmp_path):
    (tmp_path / "recipe").mkdir()
    text = "# @package _global_\ndefaults: [override /loss: triplet]\nname: own\nloss: {temperature: 0.05}\n"
    (tmp_path / "recipe" / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"loss\.temperature, .* Allowed are .*remove"):
        compose_recipes(["--config-dir", str(tmp_path), "recipe=own", *GOOD[1:]])


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("scale: 20", "the recipe has an unknown option loss.scale: write loss.temperature, which is 1 / scale"),
        ("matryoshka: {matryoshka_dims: [4]}", "the recipe has an unknown option loss.matryoshka.matryoshka_dims"),
    ],
)
def test_a_name_of_another_library_in_a_recipe_is_translated(tmp_path, option, expected):
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "own.yaml").write_text(f"# @package _global_\nname: own\nloss: {{{option}}}\n")
    with pytest.raises(ConfigError, match="^(?!.*the recipe sets).*" + re.escape(expected)):
        compose_recipes(["--config-dir", str(tmp_path), "recipe=own", *GOOD[1:]])


@pytest.mark.parametrize(
    ("compose", "good", "argument", "ours"),
    [
        (compose_evaluate, ["model=m", "sets=[x]"], "batch_size=32", "chunk_tokens"),
        (compose_evaluate, ["model=m", "sets=[x]"], "parallel.precision=bf16", "precision=bf16"),
        (compose_evaluate, ["sets=[x]"], "model.path=x", "model=x"),
        (compose_evaluate, ["model=m"], "evaluator=TripletEvaluator", "sets=[{path: PATH, kind: reranking}]"),
        (compose_evaluate, ["model=m", "sets=[x]"], "kind=sts", "sets=[{path: PATH, kind: sts}]"),
        (compose_evaluate, ["model=m", "sets=[x]"], "k_values=[10]", "metrics=[ndcg@10,recall@100]"),
        (compose_evaluate, ["model=m", "sets=[x]"], "dtype=float16", "precision=bf16"),
        (
            *(compose_evaluate, ["reranker=r", "sets=[x]"], "document_windows=true"),
            "reranker={path: PATH, document_windows: true}",
        ),
        (
            *(compose_mine, ["model=m", "data=[x]", "output_dir=o"], "document_windows=true"),
            "teacher_document_windows=true",
        ),
        (compose_export, ["run=r"], "format=onnx", "formats=[onnx]"),
        (compose_export, [], "--model=runs/x", "model=runs/x"),
        (compose_export, [], "model=runs/x", "run=RUN"),
        (compose_search, ["model=m", "corpus=c"], "how many bones", "query='how many bones'"),
        (compose_evaluate, ["sets=[x]"], "--model_name_or_path=x", "model=x"),
        (compose_mine, ["model=m", "data=[x]", "output_dir=o"], "range_for_sampling=2-200", "rank_min=2 rank_max=200"),
    ],
)
def test_commands_have_options_of_their_own(compose, good, argument, ours):
    with pytest.raises(ConfigError, match=f"write {re.escape(ours)}"):
        compose([*good, argument])


def tables() -> dict[str, tuple[Row, ...]]:
    return {
        name: value
        for name, value in vars(migration).items()
        if isinstance(value, tuple) and all(isinstance(row, Row) for row in value)
    }


def options(kind: type, prefix: str = "") -> set[str]:
    """Full names of options, with those of parts that are dataclasses by default."""
    names: set[str] = set()
    for field in fields(kind):
        names.add(f"{prefix}{field.name}")
        part = getattr(kind(), field.name) if kind is not TrainSource else None
        if hasattr(part, "__dataclass_fields__"):
            names |= options(type(part), f"{prefix}{field.name}.")
    return names


def test_what_is_called_not_available_is_not_an_option():
    """An option that is added later leaves these lists."""
    options = {re.sub("_", "", name.rpartition(".")[2]) for name in option_names()}
    libraries = ("TRAINER", "SENTENCE_TRANSFORMERS", "FLAGEMBEDDING", "TEVATRON", "OPEN_CLIP")
    for row in (row for library in libraries for row in tables()[library]):
        if row.ours.startswith("not available"):
            assert not {re.sub("_", "", name.lower()) for name in f"{row.names} {row.also}".split()} & options, row


def test_a_misspelt_command_is_answered_with_the_nearest():
    assert not SUBCOMMANDS.keys() & COMMANDS.keys(), "a command is no other name of another one"
    assert set(SUBCOMMANDS.values()) <= COMMANDS.keys()
    for command in COMMANDS:
        for misspelt in (command[:-1], f"{command}s", command[:2] + command[3:]):
            if misspelt not in {*SUBCOMMANDS, *COMMANDS}:
                assert f"did you mean `embedtrain {command}`?" in suggestion([misspelt]), misspelt


def test_every_option_of_the_tables_exists():
    ours = options(Recipe) | {f"loss.{field.name}" for kind in LOSSES.values() for field in fields(kind)}
    ours |= {name for kind in kinds() for name in options(kind.options, "model.")}
    groups = {name.partition(".")[0] for name in ours if "." in name}
    num_checked = 0
    for name, rows in tables().items():
        if name == "COMMANDS":
            continue
        for row in rows:
            for option in re.findall(r"`([a-z_]+\.[a-z_.0-9]+)[^`]*`", row.ours):
                if option.partition(".")[0] in groups:
                    is_open = any(option.startswith(f"{mapping}.") for mapping in ("tracking.wandb_init",))
                    assert option in ours or is_open, f"{name}: {row.names}: {option}"
                    num_checked += 1
    assert num_checked > 80


def test_every_loss_class_of_sentence_transformers_is_answered():
    for name in SENTENCE_TRANSFORMERS_LOSSES:
        loss = re.search(r"loss=(\w+)", unknown_loss("loss", name).partition(": ")[2])
        assert loss is not None, name
        assert loss[1] in LOSSES
    for name, reason in UNSUPPORTED_LOSSES.items():
        message = unknown_loss("loss", name)
        assert reason in message or "write loss.matryoshka.layers" in message


def test_every_evaluator_of_sentence_transformers_is_answered():
    from sentence_transformers.sentence_transformer import evaluation

    names = [name for name in evaluation.__all__ if re.fullmatch(r"(?!Base|Sentence)\w+Evaluator", name)]
    assert len(names) > 8
    for name in names:
        assert evaluator_sets(name, "sets"), name


def test_every_name_of_the_tables_is_answered():
    names = [
        name
        for rows in (migration.TRAINER, migration.FLAGEMBEDDING, migration.TEVATRON, migration.OPEN_CLIP)
        for row in rows
        for name in f"{row.names} {row.also}".split()
    ]
    assert len(names) > 120
    for name in names:
        assert name == "output_dir" or suggest(name, Recipe), name
