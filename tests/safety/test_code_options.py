"""What makes code run is named by the user: on the command line or in Python, never in a file, whichever command."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from embedtrain.commands.export import ExportOptions
from embedtrain.commands.merge.options import MergeOptions
from embedtrain.config.code import code_option, code_options
from embedtrain.config.commands import COMMANDS, WRITING
from embedtrain.config.compose import compose_command, compose_recipe
from embedtrain.config.losses import CombinedConfig, CustomConfig
from embedtrain.config.recipe import Recipe, TrainSource
from embedtrain.errors import ConfigError
from embedtrain.pipeline.compose import compose_pipeline
from tests.conftest import ROOT

PACKAGE = ROOT / "embedtrain"
MARK = next(iter(code_option(None).metadata))
# Options with which each kind of stage can be composed.
STAGES: dict[str, dict[str, Any]] = {
    "train": {"model": {"path": "m", "pooling": "mean"}, "data": {"train": ["rows.jsonl"]}, "train": {"steps": 1}},
    "mine": {"model": "m", "data": ["rows.jsonl"]},
    "filter": {"model": "m", "data": ["rows.jsonl"]},
    "merge": {"models": ["a", "b"]},
    "vectors": {"model": "m", "data": ["rows.jsonl"]},
    "calibrate": {"model": "m", "data": "docs.jsonl"},
    "prune": {"model": "m", "keep": 2},
    "trim": {"model": "m", "corpus": ["docs.jsonl"]},
    "static": {"model": "m"},
    "evaluate": {"model": "m", "sets": ["dev"]},
    "export": {"run": "r"},
}
LOSS = {"name": "custom", "path": "evil:Mod"}


def marked(options: Any, prefix: str = "") -> Iterator[tuple[str, "dataclasses.Field[Any]"]]:
    """The options of a dataclass tree that make code run, whatever they are set to."""
    for option in dataclasses.fields(options):
        value = getattr(options, option.name)
        if MARK in option.metadata:
            yield f"{prefix}{option.name}", option
        elif dataclasses.is_dataclass(value):
            yield from marked(value, f"{prefix}{option.name}.")


def cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each kind of stage with each option that makes code run, and its value; losses in all places."""
    for kind in STAGES:
        for name, option in marked(COMMANDS[kind].option_class()):
            yield kind, name, {name: True if option.default is False else "evil:Mod"}
    yield "train", "loss.path", {"loss": LOSS}
    yield "train", "loss.losses[1].path", {"loss": {"name": "combined", "losses": [{"name": "infonce"}, LOSS]}}
    yield "train", "data.train[0].loss.path", {"data": {"train": [{"path": "rows.jsonl", "loss": LOSS}]}}


CASES = [pytest.param(*case, id="-".join(case[:2])) for case in cases()]


def nested(options: dict[str, Any]) -> dict[str, Any]:
    """{"model.trust_remote_code": True} as YAML has it."""
    result: dict[str, Any] = {}
    for name, value in options.items():
        *groups, last = name.split(".")
        level = result
        for group in groups:
            level = level.setdefault(group, {})
        level[last] = value
    return result


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(base[key], more[key]) for key in base.keys() & more.keys() if isinstance(more[key], dict)}
    return {**base, **more, **both}


def composed(folder: Path, content: dict[str, Any], *arguments: str) -> Any:
    """The last stage of a pipeline whose models and data need not be there."""
    (folder / "recipe").mkdir(exist_ok=True)
    content = {"name": "theirs", "kind": "pipeline", **content}
    (folder / "recipe" / "theirs.yaml").write_text(yaml.safe_dump(content))
    pipeline = compose_pipeline(["recipe=theirs", "--config-dir", str(folder), *arguments], check_paths=False)
    assert pipeline is not None
    return pipeline.stages[-1]


def named(stage: Any) -> dict[str, Any]:
    return {option.name: option.value for option in code_options(stage.options)}


PLACES = ("stage", "each", "repeat", "loop", "shared")


# Every option in the stage itself, and those of a training in every place: expansion knows no kind of stage.
@pytest.mark.parametrize(
    ("place", "kind", "name", "options"),
    [
        pytest.param(
            place, *case.values, id=f"{case.id}-{place}",
            marks=() if place == "stage" or case.values[:2] == ("train", "loss.path") else pytest.mark.slow,
        )
        for place in PLACES
        for case in CASES
    ],
)  # fmt: skip
def test_the_file_of_a_pipeline_names_no_code(tmp_path, place, kind, name, options):
    stage = {"do": kind, **merged(STAGES[kind], nested(options))}
    content: dict[str, Any] = {"stages": {"s": stage}}
    if place == "each":
        content = {"stages": {"s": {"do": kind, **STAGES[kind], "each": {"a": nested(options)}}}}
    elif place == "repeat":
        content["stages"]["s"]["repeat"] = 2
        if kind not in ("train", "split"):  # others have no seed
            return
    elif place == "loop":
        training = {"do": "train", **STAGES["train"]}
        content = {"stages": {"l": {"repeat": 1, "stages": {"a": training, "s": stage}}}}
    elif place == "shared":
        shared = {key: value for key, value in stage.items() if key != "do"}
        content = {"shared": shared, "stages": {"s": {"do": kind, **{key: f"${{shared.{key}}}" for key in shared}}}}
    with pytest.raises(ConfigError, match="a file cannot") as caught:
        composed(tmp_path, content)
    assert f"{name}=" in str(caught.value)
    assert "\n" not in str(caught.value)


# A kind that the user names is imported when the stage is composed; tests/extending/test_kind.py names one.
@pytest.mark.quick(
    "train-loss.path",
    "train-model.trust_remote_code",
    "mine-trust_remote_code",
    "evaluate-pooling",
    "merge-trust_remote_code",
)
@pytest.mark.parametrize(
    ("kind", "name", "options"), [case for case in CASES if "[" not in case.values[1] and case.values[1] != "kind"]
)
def test_the_user_names_the_code_of_a_stage_and_its_model(tmp_path, kind, name, options):
    (value,) = options.values() if name in options else ["evil:Mod"]
    said = f"stages.s.{name}={str(value).lower() if value is True else value}"
    content = {"stages": {"s": {"do": kind, **merged(STAGES[kind], nested(options))}}}
    if value is True:  # it trusts the models that the user names, not those of the file
        with pytest.raises(ConfigError, match=r"a file names it, and .*trust_remote_code=true would run its code"):
            composed(tmp_path, content, said)
    models = {"merge": "models=[a,b]", "export": "run=r", "train": "model.path=m"}.get(kind, "model=m")
    assert named(composed(tmp_path, content, said, f"stages.s.{models}")) == {name: value}


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("evaluate", {"reranker": "other"}),
        ("evaluate", {"reranker": {"path": "other", "revision": "refs/pr/1"}}),
        ("evaluate", {"revision": "refs/pr/1"}),
        ("mine", {"teacher": "other"}),
        ("merge", {"method": "ties", "base": "other"}),
        ("train", {"model": {"tokenizer": "other"}}),
        ("train", {"model": {"revision": "refs/pr/1"}}),
        ("train", {"model": {"tokenizer": "m", "tokenizer_revision": "refs/pr/1"}}),
    ],
)
def test_trust_in_the_users_model_is_none_in_another_one_of_the_file(tmp_path, kind, file):
    stage = {"do": kind, **merged(STAGES[kind], file)}
    own = {
        "train": ["model.trust_remote_code=true", "model.path=m"],
        "merge": ["trust_remote_code=true", "models=[a,b]"],
    }.get(kind, ["trust_remote_code=true", "model=m"])
    own = [f"stages.s.{option}" for option in own]
    composed(tmp_path, {"stages": {"s": stage}})  # without trust its files are read and nothing of them runs
    with pytest.raises(ConfigError, match="a file names it"):
        composed(tmp_path, {"stages": {"s": stage}}, *own)


def test_the_model_of_an_earlier_stage_is_the_pipelines_own(tmp_path):
    stages = {
        "a": {"do": "train", **STAGES["train"]},
        "s": {"do": "evaluate", "model": "${out:a.model}", "sets": ["dev"]},
    }
    assert named(composed(tmp_path, {"stages": stages}, "stages.s.trust_remote_code=true"))
    for model in ("runs/theirs/stages/a/model/../../../other", "runs/theirs/stages/a/other", "runs/theirs/stages"):
        stages["s"]["model"] = model
        with pytest.raises(ConfigError, match="a file names it"):
            composed(tmp_path, {"stages": stages}, "stages.s.trust_remote_code=true")


def test_trust_in_the_reranker_that_a_stage_trains(tmp_path):
    """`evaluation.after` makes the model of the stage the reranker: the gate sees it where the user's trust is."""
    training = {"do": "train", **STAGES["train"], "loss": {"name": "bce"}}
    training["model"] = {"path": "m", "kind": "cross_encoder"}
    content = {"stages": {"s": training}, "evaluation": {"after": ["s"], "sets": ["dev"]}}
    said = "evaluation.trust_remote_code=true"
    assert named(composed(tmp_path, content, said)) == {"trust_remote_code": True}
    for more in ({"revision": "refs/pr/1"}, {"trust_remote_code": True}):
        content["evaluation"] = {"after": ["s"], "sets": ["dev"], **more}
        with pytest.raises(ConfigError, match=r"a file (names it|cannot trust)"):
            composed(tmp_path, content, *([said] if "revision" in more else []))
    content["evaluation"] = {"after": ["s"], "sets": ["dev"], "model": "evil"}
    with pytest.raises(ConfigError, match="a file names it"):
        composed(tmp_path, content, said)


def test_code_of_evaluations_after_stages_and_of_members(tmp_path):
    training = {"do": "train", **STAGES["train"], "loss": LOSS}
    evaluation = {"after": ["s"], "sets": ["dev"], "function": "evil:Mod"}
    content = {"stages": {"s": training}, "evaluation": evaluation}
    loss, function = "stages.s.loss.path=evil:Mod", "evaluation.function=evil:Mod"
    for one in (loss, function):
        with pytest.raises(ConfigError, match="a file cannot name code to run"):
            composed(tmp_path, content, one)
    assert named(composed(tmp_path, content, loss, function)) == {"function": "evil:Mod"}
    members = {"stages": {"s": {"do": "train", **STAGES["train"], "each": {"a": {}, "b": {"loss": LOSS}}}}}
    with pytest.raises(ConfigError, match=r"stages\.s-b: loss\.path=evil:Mod"):
        composed(tmp_path, members, "stages.s.each.a.loss.path=evil:Mod", "stages.s.each.a.loss.name=custom")
    assert named(composed(tmp_path, members, "stages.s.each.b.loss.path=evil:Mod"))


@pytest.mark.parametrize("said", ["shared.code=evil:Mod", "name=evil:Mod", "stages.s.loss.path='${shared.code}'"])
def test_a_value_of_another_option_names_no_code(tmp_path, said):
    """What the user says somewhere else, or by an interpolation whose value the file sets, does not count."""
    training = {"do": "train", **STAGES["train"], "loss": {"name": "custom", "path": "${shared.code}"}}
    with pytest.raises(ConfigError, match="a file cannot name code to run"):
        composed(tmp_path, {"shared": {"code": "evil:Mod"}, "stages": {"s": training}}, said)


def test_a_recipe_trusts_no_model(tmp_path):
    (tmp_path / "recipe").mkdir()
    recipe = {"name": "t", "model": {"path": "m", "trust_remote_code": True}, "data": {"train": ["rows.jsonl"]}}
    (tmp_path / "recipe" / "theirs.yaml").write_text("# @package _global_\n" + yaml.safe_dump(recipe))
    theirs = ["--config-dir", str(tmp_path), "recipe=theirs"]
    with pytest.raises(ConfigError, match=r"model\.trust_remote_code=true: a file cannot trust the code of a model"):
        compose_recipe(theirs)
    with pytest.raises(ConfigError, match=r"model\.path=m: a file names it"):
        compose_recipe([*theirs, "model.trust_remote_code=true"])
    for own in (["model.trust_remote_code=yes", "model.path=m"], ["model={path: m, trust_remote_code: true}"]):
        assert compose_recipe([*theirs, *own]).model.trust_remote_code
    with pytest.raises(ConfigError, match="a file cannot trust"):
        compose_recipe([*theirs, "model.path=m", "model.trust_remote_code='${export.check}'"])


def test_an_id_of_the_hub_is_no_folder_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "author" / "model").mkdir(parents=True)
    own, trust = ["name=t", "data.train=[rows.jsonl]"], "model.trust_remote_code=true"
    assert compose_recipe([*own, "model.path=author/model"]).model.path == "author/model"
    with pytest.raises(
        ConfigError, match=r"model\.path=author/model: has the form of a Hub id and is a folder"
    ) as caught:
        compose_recipe([*own, "model.path=author/model", trust])
    assert "./author/model" in str(caught.value)
    with pytest.raises(ConfigError, match=r"tokenizer=author/model: has the form"):
        compose_recipe([*own, "model.path=author/other", "model.tokenizer=author/model", trust])
    for path in ("author/other", "./author/model", str(tmp_path / "author" / "model")):
        assert compose_recipe([*own, f"model.path={path}", trust]).model.path == path
    export = compose_command("export", ExportOptions, ["run=author/model", "trust_remote_code=true"], "")
    assert export.run == "author/model"  # a run is never on the Hub
    merge = ["models=[author/model,author/other]", "output_dir=o", "trust_remote_code=true"]
    with pytest.raises(ConfigError, match=r"models\[0\]=author/model: has the form"):
        compose_command("merge", MergeOptions, merge, "")


def test_a_source_inherits_the_class_that_the_user_named():
    own = ["name=t", "model.path=m", "loss=custom", "loss.path=my:Loss", "train.steps=1"]
    recipe = compose_recipe([*own, "data.train=[{path: a, loss: {kwargs: {scale: 2}}}]"])
    assert [option.value for option in code_options(recipe)] == ["my:Loss", "my:Loss"]


def test_code_options_are_found_at_any_depth():
    recipe = Recipe(loss=CombinedConfig(losses=[CustomConfig(path="a:A")]))
    recipe.data.train = [TrainSource(path="rows", loss=CombinedConfig(losses=[CustomConfig(path="b:B")]))]
    recipe.evaluation.function, recipe.model.trust_remote_code = "c:c", True
    assert {option.name: option.value for option in code_options(recipe)} == {
        "loss.losses[0].path": "a:A",
        "data.train[0].loss.losses[0].path": "b:B",
        "evaluation.function": "c:c",
        "model.trust_remote_code": True,
    }


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name in (getattr(node.func, "id", None), getattr(node.func, "attr", None)):
            yield node


def test_no_option_that_makes_code_run_is_forgotten():
    """Whoever adds one has to mark it: all options that trust a model, and all that become a module to import."""
    importing: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        tree, file = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(PACKAGE).as_posix()
        for function in ("load_code", "import_module", "__import__", "get_class_from_dynamic_module", "run_module"):
            for _ in calls(tree, function):
                importing.setdefault(function, set()).add(file)
        if file == "models/types.py":  # what was decided, not an option
            continue
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for node in (node for kind in classes for node in kind.body):
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                name = getattr(node.target, "id", "")
                is_option = ast.unparse(node.annotation) in ("bool", "str | None")
                if is_option and ("trust" in name or name == "function"):
                    assert "code_option(" in ast.unparse(node.value), f"{file}: {name}"
    assert importing == {
        # Of loss.path, both options `function`, poolings, kinds of models, and commands, which the command line names.
        "load_code": {
            *("losses/build.py", "evaluation/evaluator.py"),
            *("config/commands.py", "config/kinds.py", "config/code.py"),
        },
        "import_module": {"config/code.py", "config/kinds.py", "config/commands.py"},
    }
    assert {name.rpartition(".")[2] for name in WRITING for name, _ in marked(COMMANDS[name].option_class())} == {
        "trust_remote_code",
        "function",
        "pooling",
        "kind",
    }
