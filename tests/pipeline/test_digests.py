"""Which options of a stage are inputs, whose content counts."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from embedtrain.commands.merge.options import PartWeights
from embedtrain.config.code import UserOptions
from embedtrain.config.columns import DataPath
from embedtrain.config.command_options import RerankerConfig
from embedtrain.config.commands import COMMANDS, WRITING
from embedtrain.config.evaluation import EvaluationSet, VectorFormat
from embedtrain.config.kinds import kinds
from embedtrain.config.losses import LOSSES
from embedtrain.config.options import info
from embedtrain.config.recipe import TrainSource
from embedtrain.errors import ConfigError
from embedtrain.pipeline.state import PipelineState, StageRecord, input_paths, options_of
from embedtrain.pipeline.types import Pipeline, Selection, Stage, compose_options


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    for name in ("encoder", "first", "second"):
        (tmp_path / name).mkdir()
    (tmp_path / "rows.jsonl").write_text('{"query": "a", "pos": ["b"]}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stage(kind: str, folder: Path, *arguments: str) -> Stage:
    user, command = UserOptions({}), COMMANDS[kind]
    options = compose_options(command, list(arguments), user)
    return Stage(kind, command, list(arguments), options, folder / "out" / kind, (), user)


def test_texts_are_no_paths(folder):
    """A prompt that looks like a pattern, or is the name of a file, counts as it is written."""
    prompts = ("query_prompt='what/is it? '", "document_prompt=first")
    mined = stage("mine", folder, "model=encoder", "data=[rows.jsonl]", f"output_dir={folder / 'out'}", *prompts)
    assert input_paths(mined) == {"model": "encoder", "data[0].path": "rows.jsonl"}
    assert options_of(mined)["query_prompt"] == "what/is it? "


def test_relative_paths_are_inputs(folder):
    loss = ("loss=distill_similarities", "loss.teachers=[first,second]", "model.config=encoder")
    trained = stage("train", folder, "name=t", "train.steps=1", "data.train=[rows.jsonl]", *loss, "model.pooling=mean")
    assert input_paths(trained) == {
        "model.config": "encoder",
        "data.train[0].path": "rows.jsonl",
        "loss.teachers[0]": "first",
        "loss.teachers[1]": "second",
    }


def test_values_of_a_mapping_are_inputs_where_they_are_declared_as_such(folder):
    """`first` is a folder; the value of a model's configuration is none, and that of an adapter is."""
    config = "model.config={model_type: bert, hidden_act: first, names: [second]}"
    options = ("name=t", "train.steps=1", "data.train=[rows.jsonl]", "model.pooling=mean")
    trained = stage("train", folder, config, *options)
    assert input_paths(trained) == {"data.train[0].path": "rows.jsonl"}
    assert options_of(trained)["model.config.hidden_act"] == "first"
    for run in "first", "second":
        (folder / run / "recipe.yaml").touch()
    exported = stage("export", folder, "adapters={qa: first, sts: second}", f"output_dir={folder / 'out'}")
    assert input_paths(exported) == {"adapters.qa": "first", "adapters.sts": "second"}


def test_a_stage_of_an_earlier_version_that_has_ended_does_not_run_again(folder):
    """Its record has options by names that were renamed since, or null where a number is written now."""
    kind = ("model.kind=late_interaction", "model.path=encoder", "model.dimension=8")
    options = ("name=t", "train.steps=1", "data.train=[{path: rows.jsonl, loss: {matryoshka: {dims: [4]}}}]")
    trained = stage("train", folder, *kind, *options, "loss.matryoshka.dims=[8,4]", "optim.min_lr_ratio=0")
    now = StageRecord("train", "", options_of(trained), {}, 0.0, 1)
    renamed = {"dims_per_step": "per_step", "dims": "dims", "dim_": "", "layers": "layers"}
    renamed = {f"matryoshka.{new}": f"matryoshka_{old}" for new, old in renamed.items()} | {
        "matryoshka.": "",  # others had no section
        "model.dimension": "model.late_interaction.dim",
    }
    pattern = re.compile("|".join(map(re.escape, renamed)))
    saved = {pattern.sub(lambda new: renamed[new[0]], name): value for name, value in now.options.items()}
    saved |= {"optim.min_lr_ratio": None}
    assert {"loss.matryoshka_dims[1]", "data.train[0].loss.matryoshka_dims[0]"} <= saved.keys()
    state = PipelineState(Pipeline("p", folder / "out", (trained,), 1.0, {}, Selection()))
    before = replace(now, options=saved, ended=1.0)
    state.require_same(trained, before, now)
    with pytest.raises(ConfigError, match=r"loss\.matryoshka\.dims\[0\] was 16 when the stage ran and is now 8"):
        state.require_same(trained, replace(before, options=saved | {"loss.matryoshka_dims[0]": 16}), now)


def test_a_stage_of_static_of_an_earlier_version_does_not_run_again(folder):
    now = stage("static", folder, "model=encoder", f"output_dir={folder / 'out'}", "pca_dims=16")
    record = StageRecord("static", "", options_of(now), {}, 0.0, 1)
    saved = {name: value for name, value in record.options.items() if name != "pca_dims"}
    state = PipelineState(Pipeline("p", folder / "out", (now,), 1.0, {}, Selection()))
    before = replace(record, options=saved | {"dims": 16, "dtype": "fp32"}, ended=1.0)
    state.require_same(now, before, record)
    with pytest.raises(ConfigError, match="pca_dims was 32 when the stage ran and is now 16"):
        state.require_same(now, replace(before, options=before.options | {"dims": 32}), record)


def ended_with(before: Stage, now: Stage, folder: Path, **saved: object) -> None:
    """Begin `now` after `before` has ended, whose record has these options besides; ConfigError if they differ."""
    state = PipelineState(Pipeline("p", folder / "out", (now,), 1.0, {}, Selection()))
    record = state.current(before, ranks=1, versions={})
    record = replace(record, options=record.options | saved, ended=1.0)
    state.require_same(now, record, state.current(now, ranks=1, versions={}))


def test_evaluation_counts_in_training_where_it_chooses_the_best_step(folder):
    options = ("name=t", "model.path=encoder", "model.pooling=mean", "train.steps=1", "data.train=[rows.jsonl]")
    best = (*options, "checkpoint.best_metric=rows/ndcg@10")
    for chosen, counts in ((options, False), (best, True)):
        more = ("evaluation.sets=[{path: rows.jsonl, split: test}]", "evaluation.every=5")
        before = stage("train", folder, *chosen, *more)
        assert ("evaluation.every" in options_of(before)) is counts
        assert ("evaluation.sets[0].path" in input_paths(before)) is counts
        assert "evaluation.chunk_tokens" not in options_of(before)
        ended_with(before, before, folder)
    ended_with(stage("train", folder, *options, *more), stage("train", folder, *options), folder)
    with pytest.raises(ConfigError, match=r"evaluation\.every was 5 when the stage ran and is now 10"):
        ended_with(before, stage("train", folder, *best, more[0], "evaluation.every=10"), folder)
    with pytest.raises(ConfigError, match=r"evaluation\.sets\[0\]\.split was test when the stage ran and is now dev"):
        ended_with(before, stage("train", folder, *best, more[0].replace("test", "dev"), more[1]), folder)


def test_an_option_that_counted_in_an_earlier_version_is_no_difference(folder):
    """`implementation` of a part of a combined loss, and of a source's loss, does not change the result."""
    options = ("name=t", "model.path=encoder", "model.pooling=mean", "train.steps=1")
    loss = ("loss=combined", "loss.losses=[{name: infonce}]")
    now = stage("train", folder, *options, "data.train=[{path: rows.jsonl, loss: {name: infonce}}]", *loss)
    names = {"loss.losses[0].implementation": "auto", "data.train[0].loss.implementation": "auto"}
    assert not names.keys() & options_of(now).keys()
    ended_with(now, now, folder, **names)
    with pytest.raises(ConfigError, match=r"loss\.losses\[1\]\.weight was 0\.5 when the stage ran"):
        ended_with(now, now, folder, **{"loss.losses[1].weight": 0.5})


def test_a_changed_teacher_beside_a_directory_is_noticed(folder):
    options = ("name=t", "model.path=encoder", "model.pooling=mean", "train.steps=1", "data.train=[rows.jsonl]")
    before, now = (
        stage("train", folder, *options, "loss=distill_similarities", f"loss.teachers=[first,{teacher}]")
        for teacher in ("hub/one", "hub/two")
    )
    (folder / "first" / "vectors").write_text("v")
    ended_with(before, before, folder)
    with pytest.raises(ConfigError, match=r"loss\.teachers\[1\] was hub/one when the stage ran and is now hub/two"):
        ended_with(before, now, folder)


SET_OPTIONS = ("sets", "find.sets", "find.held_out", "evaluation.sets")
LOSS_OPTIONS = ("loss", "loss.losses", "data.train.loss", "data.train.loss.losses")
# Options of all kinds of stages that name files, directories or ids of the Hub. Others are texts, whatever they look
# like.
INPUT_OPTIONS = {
    *(
        "model",
        "models",
        "adapter",
        "adapters",
        "base",
        "teacher",
        "run",
        "pdfs",
        "corpus",
        "reranker",
        "reranker.path",
    ),
    *("reranker.adapter", "model.path", "model.config", "model.tokenizer", "model.lora.path"),
    *(
        "model.query_weights",
        "model.query.path",
        "model.document.path",
        "model.text.path",
        "model.image.path",
        "parallel.accelerate_config",
        "train.init_from",
        "prompts",
        *(f"{model}.model" for model in ("writer", "checks.judge.writer", "checks.round_trip")),
    ),
    *(
        f"{rows}{option}"
        for rows in ("data", "data.train", "queries.examples")
        for option in ("", ".path", ".documents", ".image_dir")
    ),
    *(f"{sets}{option}" for sets in SET_OPTIONS for option in ("", ".path", ".candidates", ".train", ".image_dir")),
    *("corpus.path", "corpus.image_dir"),
    *(f"{loss}.{option}" for loss in LOSS_OPTIONS for option in ("guide", "teacher", "teachers")),
}
# Options that hold texts and no inputs, by the last part of their names.
_TEXTS = {
    # what is written, and where; what is cached
    "name", "output_dir", "cache_dir", "vectors_dir", "push_to_hub", "license", "language", "formats", "max_file_size",
    "wandb_init", "mlflow_init", "trackio_init",
    # settings of PEFT, none of which names a file
    "model.adapter",
    # where a language model is, whose answers are the same anywhere
    "url", "key_env",
    # what a model is and how it pools, by name or as module:Class
    "kind", "pooling",
    # versions of inputs, and what is read of them
    "revision", "tokenizer_revision", "teacher_revision", "documents_revision", "qrels_revision", "subset",
    "split", "columns", "image_columns", "where", "exclude_same",
    # texts that a model reads, and names of its parts
    "query_prompt", "document_prompt", "instruction_format", "item_template", "pair_template", "teacher_pair_template",
    "score_tokens",
    "expansion_token", "skiplist_words", "rope_scaling", "targets", "modules_to_save", "block_class", "match",
    "names", "kinds", "languages", "layers", "activation_checkpointing", "compile", "fused_kernels",
    # measures and choices
    "metrics", "metric", "best_metric", "mteb", "suite", "first_stage", "step", "steps",
    # losses, and code, which Python finds by the name of its module
    "loss", "losses", "class_name", "arguments", "kwargs", "function",
    # lists of options
    "parts", "vectors",
    # paths of code, and configurations of data sets
    *(f"{loss}.path" for loss in LOSS_OPTIONS), *(f"{sets}.config" for sets in SET_OPTIONS),
}  # fmt: skip
_ELEMENTS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("data", "data.train", "queries.examples"), (TrainSource,)),
    **dict.fromkeys(SET_OPTIONS, (EvaluationSet,)),
    "corpus": (DataPath,),
    **dict.fromkeys(LOSS_OPTIONS, tuple(LOSSES.values())),
    **dict.fromkeys(("vectors", "evaluation.vectors"), (VectorFormat,)),
    "reranker": (RerankerConfig,),
    "parts": (PartWeights,),
}


def types_in(annotation: Any) -> set[Any]:
    return {each for part in get_args(annotation) for each in types_in(part)} or {annotation}


def options_with_texts(options: type, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Options that may hold a text, and whether each is an input; also of elements, whose types no dataclass says."""
    hints = get_type_hints(options)
    for option in fields(options):
        name, types = f"{prefix}{option.name}", types_in(hints[option.name])
        if types & {str, Any}:
            yield name, info(option).is_input
        for element in (*_ELEMENTS.get(name, ()), *filter(is_dataclass, types)):
            yield from options_with_texts(element, f"{name}.")


def test_every_option_that_holds_a_text_is_an_input_or_listed_as_none():
    found = {option for kind in WRITING for option in options_with_texts(COMMANDS[kind].option_class)}
    found |= {option for kind in kinds() for option in options_with_texts(kind.options, "model.")}
    names = {name for name, is_input in found if is_input}
    assert names == INPUT_OPTIONS
    others = {name for name, is_input in found if not is_input} - names
    assert others <= {name for name in others if {name, name.rpartition(".")[2]} & _TEXTS}, "an input, or a text?"
