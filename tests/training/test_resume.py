"""Options that a resumed run must share or may change, and the messages about changes."""

import contextlib
import io
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embedtrain.checkpoint.step_directory import Checkpoint, Manifest
from embedtrain.config.compose import compose_recipes, to_plain
from embedtrain.config.losses import LOSSES
from embedtrain.config.options import Effect, effect_of
from embedtrain.config.recipe import CheckpointContents, CheckpointLayout, Recipe
from embedtrain.data.cache.cache import Cache
from embedtrain.data.train_data import load_recipe_data
from embedtrain.errors import CheckpointError
from embedtrain.tracking.console import Console
from embedtrain.training.resume import (
    RunStart,
    describe_changes,
    require_same_run,
    run_identity,
)
from tests.runs import run_without_base
from tests.small import save_small, small_model, write_rows

PROMPTS = {"query": "ask: "}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Two sources; the rows of the second one have instructions."""
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder / "plain.jsonl", 12)
    (folder / "with_instructions.jsonl").write_text(
        "".join(f'{{"query": "alpha {i}", "pos": ["beta {i}"], "prompt": "find it"}}\n' for i in range(8))
    )
    write_rows(folder / "others.jsonl", 13)
    return folder


def compose(rows: Path, *changes: str) -> tuple[Recipe, dict[str, Any]]:
    """A recipe and its identity, computed from its files as in a run."""
    paths = rows / "plain.jsonl", rows / "with_instructions.jsonl"
    sources = f"[{{path: {paths[0]}, name: plain}}, {{path: {paths[1]}, name: instructed}}]"
    base = ["name=t", "model.path=somewhere", "train.steps=10", "train.global_batch_size=4", f"data.train={sources}"]
    (recipe,) = compose_recipes([*base, *changes])
    data, losses = load_recipe_data(recipe, PROMPTS, Cache(directory=rows / "cache"))
    return recipe, run_identity(recipe, data, losses, PROMPTS)


def checkpoint_of(recipe: Recipe, identity: dict[str, Any]) -> Checkpoint:
    manifest = Manifest(
        step=4, layout=CheckpointLayout.full, shards=1, tensors={"weights": {}}, identity=identity,
        recipe=to_plain(recipe),
    )  # fmt: skip
    return Checkpoint(Path("step-00000004"), manifest)


def leaves(options: dict[str, Any], prefix: str = "") -> list[str]:
    return [
        name
        for key, value in options.items()
        for name in (leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"])
    ]


def test_every_option_has_an_effect():
    recipe = Recipe()
    options = leaves(to_plain(recipe)) + [
        f"loss.{name}" for kind in LOSSES.values() for name in leaves(to_plain(kind()))
    ]
    losses = {name: replace(recipe, loss=kind()) for name, kind in LOSSES.items()}
    effects = {option: effect_of(option, recipe) for option in options}
    effects |= {
        f"loss.{name}": effect_of(f"loss.{name}", changed)
        for changed in losses.values()
        for name in leaves(to_plain(changed.loss))
    }
    assert {
        "seed",
        "model.path",
        "data.train",
        "loss.temperature",
        "loss.losses",
        "train.gradient_accumulation_steps",
        "optim.name",
    } <= {option for option, effect in effects.items() if effect is Effect.must_match}
    assert {option for option, effect in effects.items() if effect is Effect.changes_training} == {
        *(f"{group}.{name}" for group in ("optim", "sparsity") for name in to_plain(getattr(recipe, group))
          if name != "name"),
        "model.dropout", "train.init_from", "train.steps", "train.epochs", "parallel.precision", "parallel.fp8",
        "evaluation.patience", "checkpoint.best_metric",
    }  # fmt: skip
    recipe.checkpoint.best_metric = "dev/ndcg@10"
    assert effect_of("evaluation.sets[0].subset", recipe) is Effect.changes_training
    assert effect_of("evaluation.chunk_tokens", recipe) is Effect.no_effect


REJECTED = [
    ("seed=7", r"seed=42, this run has seed=7: set it back, or choose another output_dir"),
    ("train.global_batch_size=5", "train.global_batch_size=4, this run has train.global_batch_size=5"),
    (
        "train.gradient_accumulation_steps=2",
        "train.gradient_accumulation_steps=1, this run has train.gradient_accumulation_steps=2",
    ),
    ("loss.temperature=0.5", "loss.temperature=0.05, this run has loss.temperature=0.5"),
    ("loss=siglip", "written with loss.name=infonce, this run has loss.name=siglip"),
    ("optim.name=lion", "written with optim.name=adamw, this run has optim.name=lion"),
    ("model.path=elsewhere", "model.path=somewhere, this run has model.path=elsewhere"),
    ("model.max_length=64", "model.max_length=None, this run has model.max_length=64"),
    ("model.normalize=false", "model.normalize=None, this run has model.normalize=False"),
    ("data.train[0].negatives=1", "data.train.plain.negatives=7, this run has data.train.plain.negatives=1"),
    ("data.train[0].query_prompt=find", "data.train.plain.query_prompt='ask: ', this run has .*=find"),
    ("data.train[0].loss={temperature: 0.5}", "data.train.plain.loss=None, this run has data.train.plain.loss={"),
    ("data.train[0].weight=2", r"written with \[12, 8\] rows .* per epoch, this run has \[24, 8\]: set"),
    ("data.weight_mode=proportions", r"written with \[12, 8\] rows .* per epoch, this run has \[10, 10\]"),
    ("data.mixing_temperature=9", "rows of the sources per epoch.*data.mixing_temperature back"),
    ("data.train[0].name=other", r"data.train=\['plain', 'instructed'\], .* data.train=\['other', 'instructed'\]"),
    ("data.instruction_format='{instruction}: {text}'", r"data.train.instructed.instruction_format='Instr.*='\{instr"),
    ("data.batches=by_source", "data.batches=mixed, this run has data.batches=by_source"),
    ("data.train[0].path=OTHERS", "with other rows than those of data.train.plain: restore its old files"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REJECTED, ids=[change for change, _ in REJECTED])
def test_a_change_of_identity_is_rejected(rows, change, message):
    folder = checkpoint_of(*compose(rows))
    if change.startswith("data.train[0]."):  # Hydra sets a list as a whole
        option, _, value = change.removeprefix("data.train[0].").partition("=")
        first = {"path": str(rows / "plain.jsonl"), "name": "plain"} | {option: value}
        first["path"] = first["path"].replace("OTHERS", str(rows / "others.jsonl"))
        written = ", ".join(f"{key}: {value}" for key, value in first.items())
        change = f"data.train=[{{{written}}}, {{path: {rows / 'with_instructions.jsonl'}, name: instructed}}]"
    with pytest.raises(CheckpointError, match=message):
        require_same_run(folder, compose(rows, change)[1])


def test_all_changes_of_identity_are_named_once(rows):
    """Prompts are options of each source as well; rows have content, which no option says."""
    folder = checkpoint_of(*compose(rows))
    changed = compose(rows, "seed=7", "loss.temperature=0.5", "model.query_prompt=find")[1]
    with pytest.raises(CheckpointError) as caught:
        require_same_run(folder, {**changed, "prompts": {"query": "find", "document": ""}})
    assert str(caught.value) == (
        "step-00000004 was written with seed=42, loss.temperature=0.05, prompts.query='ask: ', this run has seed=7, "
        "loss.temperature=0.5, prompts.query=find: set them back, or choose another output_dir to start from scratch"
    )
    paths = rows / "others.jsonl", rows / "with_instructions.jsonl"
    sources = f"[{{path: {paths[0]}, name: plain}}, {{path: {paths[1]}, name: instructed}}]"
    with pytest.raises(
        CheckpointError, match=r"seed=42, this run has seed=7, and with other rows .*plain: set it back, rest"
    ):
        require_same_run(folder, compose(rows, "seed=7", f"data.train={sources}")[1])


def test_documents_of_other_rows_are_part_of_the_identity(rows):
    reranker = "model.kind=cross_encoder", "loss=softmax", "data.batch_negatives=2"
    recipe, identity = compose(rows, *reranker)
    folder = checkpoint_of(recipe, identity)
    require_same_run(folder, compose(rows, *reranker)[1])
    with pytest.raises(CheckpointError, match=r"data\.batch_negatives=2, this run has data\.batch_negatives=3"):
        require_same_run(folder, compose(rows, *reranker[:2], "data.batch_negatives=3")[1])
    path = rows / "plain.jsonl"
    sources = [f"{{path: {path}, name: plain, in_batch_negatives: false}}", str(rows / "with_instructions.jsonl")]
    alone, (first, _) = f"data.train=[{{path: {path}, name: plain}}]", sources
    folder = checkpoint_of(*compose(rows, "model.kind=cross_encoder", "loss=bce", "data.batch_negatives=2", alone))
    with pytest.raises(CheckpointError, match=r"data\.train\.plain\.batch_negatives=2, this run has .*=0"):
        require_same_run(
            folder,
            compose(rows, "model.kind=cross_encoder", "loss=bce", "data.batch_negatives=2", f"data.train=[{first}]")[1],
        )


ALLOWED = [
    ("optim.lr=0.5", Effect.changes_training, "optim.lr 5e-05 -> 0.5"),
    ("optim.betas=[0.9,0.95]", Effect.changes_training, "optim.betas [0.9, 0.999] -> [0.9, 0.95]"),
    ("train.steps=20", Effect.changes_training, "train.steps 10 -> 20"),
    ("parallel.precision=fp32", Effect.changes_training, "parallel.precision auto -> fp32"),
    ("loss.implementation=tiled", Effect.changes_rounding, "loss.implementation auto -> tiled"),
    ("model.attention=padded", Effect.changes_rounding, "model.attention auto -> padded"),
    ("parallel.strategy=ddp", Effect.changes_rounding, "parallel.strategy auto -> ddp"),
    ("train.chunk_tokens=99", Effect.changes_rounding, "train.chunk_tokens 16384 -> 99"),
    ("data.on_error=skip", Effect.no_effect, "data.on_error stop -> skip"),
    ("evaluation.sets=[a,b]", Effect.no_effect, "evaluation.sets [] -> ['a', 'b']"),
    ("checkpoint.contents=model", Effect.no_effect, "checkpoint.contents all -> model"),
    ("checkpoint.max_disk_gb=3", Effect.no_effect, "checkpoint.max_disk_gb None -> 3.0"),
    ("output_dir=elsewhere", Effect.no_effect, "output_dir runs/t -> elsewhere"),
    ("tracking.wandb=true", Effect.no_effect, "tracking.wandb False -> True"),
]


@pytest.mark.parametrize(("change", "effect", "difference"), ALLOWED, ids=[change for change, *_ in ALLOWED])
def test_other_changes_are_reported_with_their_effect(rows, change, effect, difference):
    folder = checkpoint_of(*compose(rows))
    recipe, identity = compose(rows, change)
    require_same_run(folder, identity)
    assert describe_changes(folder, recipe) == {effect: f"{effect.value.format(step=4)}: {difference}"}


def start_of(rows: Path, *changes: str, step: int = 4, state: dict[str, Any] | None = None) -> tuple[RunStart, str]:
    """The start of a run with a checkpoint of a run of four steps, and what it prints."""
    recipe, identity = compose(rows, "train.steps=4")
    folder = checkpoint_of(recipe, identity)
    folder = replace(folder, manifest=replace(folder.manifest, step=step, state=state or {}))
    recipe, identity = compose(rows, "train.steps=4", *changes)
    start = RunStart(folder)
    with contextlib.redirect_stderr(io.StringIO()) as warnings, contextlib.redirect_stdout(io.StringIO()) as notes:
        start.check(identity, recipe, recipe.train.steps or 4, Console())
    return start, warnings.getvalue() + notes.getvalue()


def test_a_finished_run_with_other_options_of_training_is_rejected(rows):
    assert start_of(rows)[0].has_finished
    for changes, names in (
        (["optim.lr=0.5"], ["optim.lr=5e-05, this run has optim.lr=0.5: set it back, or choose another output_dir"]),
        (["seed=7", "optim.warmup=0.5"], ["seed=42, optim.warmup=", "this run has seed=7, optim.warmup=0.5: set them"]),
        (["train.init_from=runs/a"], ["train.init_from=None", "train.init_from=runs/a"]),
        (["optim.schedule=constant"], ["optim.schedule=linear, this run has optim.schedule=constant"]),
        (["train.steps=3"], ["train.steps=4, this run has train.steps=3: set it back"]),
    ):
        with pytest.raises(CheckpointError) as caught:
            start_of(rows, *changes)
        assert all(name in str(caught.value) for name in names), str(caught.value)


def test_a_finished_run_may_be_exported_and_tracked_otherwise_and_continue(rows):
    start, printed = start_of(
        rows, "export.dtype=bf16", "tracking.wandb=true", "evaluation.sets=[a]", "train.chunk_tokens=9"
    )
    assert start.has_finished and "export.dtype source -> bf16" in printed and "evaluation.sets" in printed
    start, printed = start_of(rows, "train.steps=8", "optim.lr=0.5")
    assert not start.has_finished and "optim.lr 5e-05 -> 0.5" in printed and "train.steps 4 -> 8" in printed
    start, printed = start_of(rows, "train.steps=2", step=2)  # a run that was stopped ends early
    assert start.has_finished and "train.steps 4 -> 2" in printed
    assert start_of(rows, "train.steps=null", "train.epochs=1")[0].has_finished  # as many steps


def test_a_run_that_patience_has_ended_is_finished(rows):
    state = {"step": 2, "best_by": "dev/ndcg@10", "not_better": 3}
    patience = "checkpoint.best_metric=dev/ndcg@10", "evaluation.sets=[dev]", "evaluation.patience=3"
    with pytest.raises(
        CheckpointError, match=r"checkpoint\.best_metric=None.*this run has.*checkpoint\.best_metric=dev"
    ):
        start_of(rows, *patience, "evaluation.every=1", step=2, state=state)
    assert not start_of(rows, *patience[:2], "evaluation.patience=4", "evaluation.every=1", step=2, state=state)[
        0
    ].has_finished


def test_a_run_that_must_continue_needs_a_checkpoint(rows):
    recipe, identity = compose(rows, "train.steps=8", "resume=require")
    with pytest.raises(CheckpointError, match=r"^resume=require: output_dir=runs/t holds no intact checkpoint"):
        RunStart(None).check(identity, recipe, 8, Console())
    folder = checkpoint_of(recipe, identity)
    RunStart(folder).check(identity, recipe, 8, Console())
    folder = replace(folder, manifest=replace(folder.manifest, contents=CheckpointContents.model))
    with pytest.raises(CheckpointError, match=r"resume=require: .*contents=model"):
        RunStart(folder).check(identity, recipe, 8, Console())
    RunStart(folder).check(identity, recipe, 4, Console())  # has finished


def test_changes_are_grouped_by_effect(rows):
    folder = checkpoint_of(*compose(rows))
    assert describe_changes(folder, compose(rows)[0]) == {}
    recipe, _ = compose(rows, "optim.lr=0.5", "train.log_every=3", "parallel.compile=true", "tracking.wandb=true")
    assert list(describe_changes(folder, recipe).values()) == [
        f"{Effect.changes_training.value.format(step=4)}: optim.lr 5e-05 -> 0.5",
        f"{Effect.changes_rounding.value.format(step=4)}: parallel.compile auto -> True",
        f"{Effect.no_effect.value.format(step=4)}: train.log_every None -> 3, tracking.wandb False -> True",
    ]


def test_the_path_of_files_does_not_matter(rows, tmp_path):
    folder = checkpoint_of(*compose(rows))
    for name in ("plain.jsonl", "with_instructions.jsonl"):
        (tmp_path / name).write_bytes((rows / name).read_bytes())
    require_same_run(folder, compose(tmp_path)[1])


def test_an_option_without_effect_on_these_rows_may_change(rows):
    """No row has an instruction, and a single source is not mixed."""
    alone = f"data.train=[{rows / 'plain.jsonl'}]"
    folder = checkpoint_of(*compose(rows, alone))
    recipe, identity = compose(
        rows, alone, "data.instruction_format='{instruction}: {text}'", "data.weight_mode=proportions"
    )
    require_same_run(folder, identity)
    (line,) = describe_changes(folder, recipe).values()
    assert line.startswith("changed since step 4, without effect on training: data.weight_mode epochs -> proportions")


def removing(*options: str) -> Callable[[dict[str, Any]], None]:
    def remove(identity: dict[str, Any]) -> None:
        for option in options:
            identity.pop(option, None)
        for mapping in (identity["loss"], *identity["data.train"].values()):
            for option in options:
                mapping.pop(option, None)

    return remove


@pytest.mark.parametrize(
    ("option", "change"),
    [
        ("train.gradient_accumulation_steps", None),
        ("model.revision", "model.revision=abc"),
        ("model.vocab_size", "model.vocab_size=99"),
        ("false_negative_margin", "loss.false_negative_margin=0.1"),
        ("mask_duplicates", "loss.mask_duplicates=false"),
        ("query_max_length", None),
        ("data.batch_negatives", None),
        ("batch_negatives", None),
    ],
)
def test_an_option_missing_in_an_older_checkpoint_had_its_default(rows, option, change):
    """Its default is no difference, another value is one."""
    recipe, identity = compose(rows)
    older = deepcopy(identity)
    removing(option)(older)
    assert older != identity
    folder = checkpoint_of(recipe, older)
    require_same_run(folder, identity)
    assert describe_changes(folder, recipe) == {}
    if change is not None:
        name, _, value = change.partition("=")
        with pytest.raises(CheckpointError, match=f"this run has {name}={value.replace('false', 'False')}"):
            require_same_run(folder, compose(rows, change)[1])


def test_a_recipe_of_an_older_version_may_lack_options_and_groups(rows):
    recipe, _ = compose(rows)
    older = to_plain(recipe)
    del older["tracking"], older["checkpoint"]["keep_every"]
    folder = checkpoint_of(recipe, {})
    folder = replace(folder, manifest=replace(folder.manifest, recipe=older))
    assert describe_changes(folder, recipe) == {}
    recipe.checkpoint.keep_every = 100
    assert list(describe_changes(folder, recipe).values()) == [
        "changed since step 4, without effect on training: checkpoint.keep_every 0 -> 100"
    ]


def test_a_run_resumes_with_another_recipe_and_reports_changes_once(ranks, tmp_path):
    """One change is another implementation of the loss, which other GPUs may need."""
    save_small(small_model("xlm-roberta"), tmp_path / "model")
    write_rows(tmp_path / "train.jsonl", 12)
    common = (
        f"model.path={tmp_path / 'model'}", "model.pooling=mean", f"data.train=[{tmp_path / 'train.jsonl'}]",
        f"output_dir={tmp_path / 'run'}", "train.global_batch_size=4", "parallel.precision=fp32",
    )  # fmt: skip
    ranks(2, run_without_base, "name=t", *common, "train.steps=2")
    changed = ("train.steps=3", "loss.implementation=tiled", "parallel.strategy=fsdp", "checkpoint.layout=full")
    (output, errors), other = ranks(2, run_without_base, "name=t", *common, *changed)
    assert other == ("", "")
    lines = [line for line in f"{output}\n{errors}".splitlines() if "changed since step 2" in line]
    assert len(lines) == 3
    assert lines[0].endswith(": train.steps 2 -> 3")
    assert "loss.implementation auto -> tiled, parallel.strategy auto -> fsdp" in lines[1]
    assert lines[2].endswith("without effect on training: checkpoint.layout sharded -> full")
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())][-1] == "step-00000003"
    with pytest.raises(AssertionError, match=r"CheckpointError.*written with loss.temperature=0.05, this run has"):
        ranks(2, run_without_base, "name=t", *common, *changed, "loss.temperature=0.5")
