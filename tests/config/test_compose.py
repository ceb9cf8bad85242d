"""The command line and YAML become a Recipe or an error of one sentence; YAML never runs code."""

import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import omegaconf._utils
import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf.base import Container

from embedtrain.commands.calibrate import compose as compose_calibrate
from embedtrain.commands.evaluate import compose as compose_evaluate
from embedtrain.commands.export import compose as compose_export
from embedtrain.commands.merge import compose as compose_merge
from embedtrain.commands.mine import compose as compose_mine
from embedtrain.commands.search import compose as compose_search
from embedtrain.config.compose import compose_recipe, compose_recipes, load_recipe, to_plain
from embedtrain.config.evaluation import EvaluationSet, SetKind
from embedtrain.config.hydra_files import choices, limited_files, limited_interpolations, own_hydra_state
from embedtrain.config.losses import (
    LOSSES,
    CombinedConfig,
    CoSENTConfig,
    InfoNCEConfig,
    MarginMSEConfig,
    MatryoshkaConfig,
    TripletConfig,
)
from embedtrain.config.optim import ScheduleKind
from embedtrain.config.recipe import DataFormat, Pooling, Precision, Strategy, TrainSource
from embedtrain.errors import ConfigError
from tests.conftest import ROOT
from tests.marks import slow_but

GOOD = ["name=a", "model.path=m", "data.train=[x.jsonl]", "train.steps=5"]


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    """Run in an empty directory, which Hydra must leave empty."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    yield
    assert list(folder.iterdir()) == []


def test_other_threads_may_use_omegaconf_meanwhile(tmp_path):
    """While this thread composes, another one reads its own file as before, and a third one waits to compose."""
    before = omegaconf._utils.get_yaml_loader, Container._resolve_node_interpolation
    (tmp_path / "own.yaml").write_text("number: 1\nagain: ${number}\n")
    entered = threading.Event()

    def compose() -> None:
        with limited_files(ROOT / "configs", None), limited_interpolations():
            entered.set()

    with ThreadPoolExecutor(2) as threads:
        with limited_files(ROOT / "configs", None), limited_interpolations():
            with pytest.raises(yaml.YAMLError, match="is outside of --config-dir"):
                OmegaConf.load(tmp_path / "own.yaml")
            assert threads.submit(OmegaConf.load, tmp_path / "own.yaml").result().again == 1
            waiting = threads.submit(compose)
            assert not entered.wait(0.1)
        waiting.result()
    assert (omegaconf._utils.get_yaml_loader, Container._resolve_node_interpolation) == before


def test_threads_compose_at_once_what_they_compose_alone():
    """Hydra has one configuration per process, and a recipe is stored with or without its loss."""
    commands = [
        ["recipe=minilm", "data.train=[x]"],
        ["recipe=minilm", "data.train=[x]", "loss=triplet"],
        ["recipe=bce_xlmr", "data.train=[x]", "loss=cosent"],
    ]
    alone = [compose_recipe(arguments) for arguments in commands]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(compose_recipe, commands * 2)) == alone * 2
    finally:
        sys.setswitchinterval(interval)


def test_recipes_are_stored_as_before_a_function_of_the_api():
    """The recipe is stored without its loss, within the block with it, and afterwards without it again."""
    arguments = ["recipe=bce_xlmr", "data.train=[x]"]
    compose_recipe([*arguments, "loss=triplet"])
    with own_hydra_state():
        within = compose_recipe(arguments)
    assert compose_recipe(arguments) == within
    assert within.loss == InfoNCEConfig(temperature=0.02)


def error_of(arguments: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        compose_recipes(arguments)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    return sentence


def user_recipe(folder: Path, name: str, text: str) -> list[str]:
    (folder / "recipe").mkdir(exist_ok=True)
    (folder / "recipe" / f"{name}.yaml").write_text(text)
    return ["--config-dir", str(folder), f"recipe={name}"]


def test_values_have_their_types():
    (recipe,) = compose_recipes(
        [*GOOD, "optim.lr=1e-4", "optim.schedule=cosine", "parallel.precision=fp32", "model.pooling=last", "seed=7"]
    )
    assert (recipe.name, recipe.seed, recipe.output_dir, recipe.train.steps) == ("a", 7, "runs/a", 5)
    assert recipe.optim.lr == 1e-4
    assert recipe.optim.schedule is ScheduleKind.cosine
    assert recipe.parallel.precision is Precision.fp32
    assert recipe.model.pooling == Pooling.last
    assert isinstance(recipe.loss, InfoNCEConfig)


@pytest.mark.parametrize("name", choices("recipe"))
def test_every_recipe_composes(name):
    (recipe,) = compose_recipes([f"recipe={name}", "data.train=[x]"])
    assert recipe.name == name
    first = (ROOT / "recipes" / f"{name}.yaml").read_text().splitlines()[0]
    assert first.startswith("#")
    assert f"recipe={name}" in first


# Losses with a required option.
REQUIRED = {
    "m3": ["model.kind=m3", "model.pooling=null"],
    "xtr": ["model.kind=late_interaction"],
    "combined": ["loss.losses=[{name: infonce}, {name: margin_mse, weight: 0.5}]"],
    "sentence_transformers": ["loss.class_name=CoSENTLoss"],
    "custom": ["loss.path=tests.losses.test_custom:LocalMean"],
}


@pytest.mark.parametrize("group", ["model", "parallel", "loss"])
def test_every_choice_composes(group):
    for name in choices(group):
        arguments = [a for a in GOOD if group != "model" or "model" not in a]
        compose_recipes([*arguments, f"{group}={name}", *REQUIRED.get(name, [])])


@pytest.mark.parametrize("name", slow_but(["infonce", "combined", "m3", "sentence_transformers", "custom"], LOSSES))
def test_every_loss_is_saved_and_loaded(tmp_path, name):
    """Resuming and exporting read the recipe.yaml of a run."""
    option = "loss.temperature=0.5" if name == "m3" else "loss.matryoshka.dims=[8,4]"
    (recipe,) = compose_recipes([*GOOD, f"loss={name}", option, *REQUIRED.get(name, [])])
    assert type(recipe.loss) is LOSSES[name]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(to_plain(recipe)))
    assert load_recipe(path) == recipe


def test_a_combination_of_losses(tmp_path):
    (recipe,) = compose_recipes([*GOOD, "loss=combined", *REQUIRED["combined"]])
    assert recipe.loss == CombinedConfig(losses=[InfoNCEConfig(), MarginMSEConfig(weight=0.5)])
    own = """# @package _global_
defaults:
  - override /loss: combined
name: own
loss:
  losses:
    - {name: infonce, temperature: 0.05, directions: [query_document, query_query]}
    - {name: margin_mse, weight: 0.1}
"""
    (recipe,) = compose_recipes([*user_recipe(tmp_path, "own", own), *GOOD[1:]])
    assert [(part.name, part.weight) for part in recipe.loss.losses] == [("infonce", 1.0), ("margin_mse", 0.1)]


OWN_LOSS = """# @package _global_
defaults:
  - override /loss: cosent
name: own
loss: {temperature: 0.5, matryoshka: {dims: [4]}}
"""


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (["loss=infonce"], InfoNCEConfig()),
        (["loss=triplet", "loss.margin=0.1"], TripletConfig(margin=0.1)),
        (["loss=infonce", "loss.temperature=0.3"], InfoNCEConfig(temperature=0.3)),
        (["loss=cosent"], CoSENTConfig(temperature=0.5, matryoshka=MatryoshkaConfig(dims=[4]))),
        (["loss.temperature=0.7"], CoSENTConfig(temperature=0.7, matryoshka=MatryoshkaConfig(dims=[4]))),
        # All other forms in which Hydra reads a choice.
        *(
            ([form], CoSENTConfig(temperature=0.5, matryoshka=MatryoshkaConfig(dims=[4])))
            for form in (
                "loss='cosent'",
                'loss="cosent"',
                "+loss=cosent",
                "loss=[cosent]",
                "loss={name: cosent}",
                "loss.name=cosent",
            )
        ),
        *(
            ([form], TripletConfig())
            for form in ("loss='triplet'", "+loss=triplet", "loss=[triplet]", "loss.name=triplet")
        ),
        (["loss={name: triplet, margin: 0.1}"], TripletConfig(margin=0.1)),
        (["loss={temperature: 0.7}"], CoSENTConfig(temperature=0.7, matryoshka=MatryoshkaConfig(dims=[4]))),
        (["loss=infonce", "loss=cosent"], CoSENTConfig(temperature=0.5, matryoshka=MatryoshkaConfig(dims=[4]))),
        (["loss=cosent", "loss='triplet'"], TripletConfig()),
    ],
)
@pytest.mark.parametrize("inherits", [pytest.param(False, marks=pytest.mark.slow), True])
def test_another_loss_starts_from_its_defaults(tmp_path, chosen, expected, inherits):
    """The options of the recipe's own loss belong to that loss, in a file that it includes as well."""
    name, arguments = "own", user_recipe(tmp_path, "own", OWN_LOSS)
    if inherits:
        name, arguments = "heir", user_recipe(tmp_path, "heir", "# @package _global_\ndefaults: [own]\nname: heir\n")
    (recipe,) = compose_recipes([*arguments, *GOOD[1:], *chosen])
    assert (recipe.name, recipe.loss) == (name, expected)


def test_a_run_without_a_loss_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="~loss: a run has a loss"):
        compose_recipes([*user_recipe(tmp_path, "own", OWN_LOSS), *GOOD[1:], "~loss"])


def test_jobs_with_several_losses(tmp_path):
    text = "# @package _global_\nname: own\nloss: {temperature: 0.5}\n"
    arguments = [*user_recipe(tmp_path, "own", text), *GOOD[1:], "-m", "loss=infonce,cosent"]
    recipes = compose_recipes([*arguments, "output_dir=runs/${loss.name}"])
    assert [recipe.loss for recipe in recipes] == [InfoNCEConfig(temperature=0.5), CoSENTConfig()]
    built_in = compose_recipes(["recipe=minilm", GOOD[2], "-m", "loss=infonce,cosent", "output_dir=runs/${loss.name}"])
    own, other = (recipe.loss for recipe in built_in)
    assert own != InfoNCEConfig()
    assert other == CoSENTConfig()


def test_a_loss_that_the_recipe_needs_on_the_command_line(tmp_path):
    """Its options do not fit the default loss, so that the command line has to choose it."""
    text = "# @package _global_\nname: own\nloss: {distance: euclidean}\n"
    (recipe,) = compose_recipes([*user_recipe(tmp_path, "own", text), *GOOD[1:], "loss=triplet"])
    assert recipe.loss == TripletConfig(distance="euclidean")


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ("[{name: infonc}]", ["loss.losses[0].name=infonc", "did you mean infonce?"]),
        ("[{name: infonce, temprature: 1}]", ["loss.losses[0]", "temprature", "did you mean temperature?"]),
        ("[{name: infonce, temperature: warm}]", ["loss.losses[0]", "temperature", "warm"]),
        ("[{temperature: 1}]", ["loss.losses[0]", "`name`"]),
        ("[infonce]", ["loss.losses[0]", "'infonce'", "`name`"]),
    ],
)
def test_a_wrong_combination_is_named(losses, words):
    sentence = error_of([*GOOD, "loss=combined", f"loss.losses={losses}"])
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["loss=combined", "loss.losses={name: infonce}"], ["loss.losses", "loss.losses=[{name: infonce}"]),
        (["loss=[infonce,triplet]"], ["for several write loss=combined"]),
        (
            ["loss=sentence_transformers", "loss.class_name=CoSENTLoss", "loss.arguments.scale=20"],
            ["loss.arguments is a mapping: write loss.arguments={scale: ...}"],
        ),
    ],
)
def test_a_wrong_loss_is_named(arguments, words):
    sentence = error_of([*GOOD, *arguments])
    assert all(word in sentence for word in words), sentence


def test_another_loss_than_that_of_a_shipped_recipe():
    (recipe,) = compose_recipes(["recipe=bce_xlmr", "loss=cosent", "data.train=[x]"])
    assert recipe.loss == CoSENTConfig()
    (recipe,) = compose_recipes(["recipe=bce_xlmr", "loss=infonce", "data.train=[x]"])
    assert recipe.loss == InfoNCEConfig(temperature=0.02)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("parallell.strategy=ddp", ["parallell.strategy=ddp", "write parallel.strategy=ddp"]),
        ("modell.pth=m", ["unknown option modell", "did you mean model?"]),
        ("optim.lrr=1", ["optim.lrr", "did you mean lr?"]),
        ("loss.temprature=1", ["loss.temprature", "did you mean temperature?"]),
        ("+optim.weight_decy=1", ["optim.weight_decy", "did you mean weight_decay?"]),
        ("++nam=1", ["unknown option nam", "did you mean name?"]),
        ("optim.lr=high", ["optim.lr", "high"]),
        ("train.steps=1.5", ["train.steps", "1.5"]),
        ("parallel.precision=fp8", ["parallel.precision", "fp8", "bf16", "fp32"]),
        ("parallel.strategy=zero3", ["zero3", "auto", "ddp", "fsdp", "hsdp"]),
        ("recipe=bce_xlm", ["did you mean bce_xlmr?", "--config-dir"]),
        ("model=minlm", ["did you mean minilm?"]),
        ("loss=infnce", ["did you mean infonce?"]),
        ("data.train=x.jsonl", ["data.train=[x.jsonl]"]),
        ("data.train=null", ["data.train"]),
        ("data.train.path=x", ["data.train.path=x: data.train is a list"]),
        ("data.train=[3]", ["data.train[0]=3", "path"]),
        ("data.train=[x,{name: y}]", ["data.train[1]", "path"]),
        ("data.train=[{path: x, wieght: 2}]", ["data.train[0]", "did you mean weight?"]),
        ("data.train=[{path: x, weight: much}]", ["data.train[0]", "much"]),
        ("data.train=[{path: null}]", ["data.train[0]"]),
        ("data.train=[{path: x, format: parquet}]", ["data.train[0]", "flagembedding"]),
        ("evaluation.sets=[{path: x, kind: rerank}]", ["evaluation.sets[0]", "retrieval"]),
        ("model.path=${oc.env:NOT_SET_ANYWHERE}", ["model.path", "NOT_SET_ANYWHERE"]),
        ("optim.lr", ["option=value"]),
        ("two words", ["option=value"]),
        ("--bogus", ["--bogus"]),
        ("loss._target_=os.system", ["_target_"]),
        ("+loss._target_=os.system", ["_target_"]),
    ],
)
def test_a_mistake_is_named_with_option_and_value(argument, words):
    sentence = error_of([*GOOD, argument])
    for word in words:
        assert word in sentence


REFERENCES = [
    # In a recipe, on the command line, and what the message names.
    ("name: ${missing}", "name=${missing}", ("name", "${missing}", "does not exist")),
    ("optim: {lr: '${train.lr}'}", "optim.lr=${train.lr}", ("optim.lr", "${train.lr}", "did you mean optim.lr?")),
    ("train: {steps: '${missing}'}", "train.steps=${missing}", ("train.steps", "${missing}", "does not exist")),
    ("name: ${name}", "name=${name}", ("name", "refers to itself")),
    ("name: '${oc.env:SECRET}'", "name=${oc.env:SECRET}", ("name", "SECRET is not read")),
    ("name: '${nosuch:1}'", "name='${nosuch:1}'", ("name", "${nosuch:...}", "no such function")),
    ("name: '${x'", "name='${x'", ("name", "${x is no reference", r"\${")),
    ("data: {train: ['${x.y}']}", "data.train=['${x.y}']", ("data.train[0]", "${x.y}", "does not exist")),
]


@pytest.mark.parametrize(("in_file", "argument", "words"), REFERENCES)
@pytest.mark.parametrize(
    "asked",
    [[], ["-m"], *(pytest.param(words, marks=pytest.mark.slow) for words in (["--cfg", "job"], ["loss=cosent"]))],
    ids=" ".join,
)
def test_a_reference_that_leads_nowhere_is_named(tmp_path, in_file, argument, words, asked):
    if asked == ["--cfg", "job"] and words[0] not in ("name", "train.steps"):
        pytest.skip("it prints values as they are written")
    base = ["model.path=m", *(["data.train=[x]"] if "data" not in argument else [])]
    arguments = [*user_recipe(tmp_path, "mine", f"# @package _global_\n{in_file}\n"), *base, *asked]
    for error in (error_of(arguments), error_of([*base, *asked, argument])):
        assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("model=3", ("model=3", "minilm")),
        ("model=[a]", ("model=a", "no such model", "minilm")),
        ("name=a=b", ("name=a=b", "from = on")),
        ("data.train=[{path: a, b}]", ("data.train=[{path: a, b}]", "from [{path: a, b} on")),
    ],
)
def test_what_hydra_cannot_read_is_answered_in_our_words(argument, words):
    error = error_of([*GOOD, argument])
    assert all(word in error for word in words), error
    for theirs in ("Exception", "<EOF>", "mismatched", "viable", "Error parsing", "Config group"):
        assert theirs not in error


@pytest.mark.parametrize(("line", "word"), [("model: 3", "model=3"), ("model: ${missing}", "model=${missing}")])
def test_a_value_of_a_whole_group_is_named(tmp_path, line, word):
    error = error_of([*user_recipe(tmp_path, "mine", f"# @package _global_\n{line}\n"), "data.train=[x]"])
    assert word in error
    assert "group of options" in error


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("loss: CoSENTLoss", ["loss=CoSENTLoss", "loss=cosent"]),
        ("loss: {name: CoSENTLoss}", ["loss.name=CoSENTLoss", "loss=cosent"]),
        ("loss: MultipleNegativesRankingLoss", ["loss=infonce", "loss.temperature=0.05"]),
        ("loss: cosent", ["loss=cosent", "loss: {name: cosent}"]),
    ],
)
def test_a_recipe_with_a_loss_of_another_library_names_ours(tmp_path, line, words):
    error = error_of(
        [*user_recipe(tmp_path, "mine", f"# @package _global_\n{line}\n"), "model.path=m", "data.train=[x]"]
    )
    assert all(word in error for word in words), error


def test_steps_of_the_command_line_replace_epochs_of_a_recipe(tmp_path):
    def lengths(text, *arguments):
        own = user_recipe(tmp_path, "mine", f"# @package _global_\n{text}\n")
        (recipe,) = compose_recipes([*own, "model.path=m", "data.train=[x]", *arguments])
        return recipe.train.steps, recipe.train.epochs

    assert lengths("train: {epochs: 2}", "train.steps=7") == (7, None)
    assert lengths("train: {steps: 7}", "train.epochs=2") == (None, 2.0)
    assert lengths("train: {steps: 7}", "train.steps=null", "train.epochs=2") == (None, 2.0)
    assert lengths("train: {epochs: 2}", "train.steps=null") == (None, 2.0)
    with pytest.raises(ConfigError, match=r"train\.steps=7 and train\.epochs=2\.0: .*train\.epochs=null"):
        lengths("train: {steps: 7, epochs: 2}")
    with pytest.raises(ConfigError, match=r"train\.steps=7 and train\.epochs=2\.0"):
        lengths("", "train.steps=7", "train.epochs=2")


def test_a_run_without_a_recipe_has_the_name_of_its_model_and_one_epoch():
    (recipe,) = compose_recipes(["model.path=models/all-MiniLM-L6-v2", "data.train=[x.jsonl]"])
    assert (recipe.name, recipe.output_dir) == ("all-MiniLM-L6-v2", "runs/all-MiniLM-L6-v2")
    assert (recipe.train.epochs, recipe.train.steps) == (1.0, None)
    for path, name in (
        ("runs/faq/model", "faq-model"),
        ("out/checkpoint-500", "out-checkpoint-500"),
        ("/model", "model"),
    ):
        (recipe,) = compose_recipes([f"model.path={path}", "data.train=[x.jsonl]"])
        assert recipe.output_dir == f"runs/{name}"  # and not that of every model that a run exported
    (named,) = compose_recipes(["model.path=m", "data.train=[x.jsonl]", "name=mine", "train.steps=5"])
    assert (named.name, named.train.epochs, named.train.steps) == ("mine", None, 5)


def test_a_missing_config_dir_is_named():
    assert "/no/such/folder" in error_of([*GOOD, "--config-dir", "/no/such/folder"])


def test_sources_and_sets_as_strings_and_mappings():
    (recipe,) = compose_recipes(
        [
            *GOOD,
            "data.train=[a.jsonl,{path: b.jsonl, weight: 2, format: columns, columns: [q, d], negatives: null}]",
            "evaluation.sets=[dev,{path: sts.tsv, kind: sts, name: s}]",
        ]
    )
    first, second = recipe.data.train
    assert first == TrainSource(path="a.jsonl")
    assert (second.weight, second.format, second.columns, second.negatives) == (
        2.0,
        DataFormat.columns,
        ["q", "d"],
        None,
    )
    assert recipe.evaluation.sets == [
        EvaluationSet(path="dev"),
        EvaluationSet(path="sts.tsv", kind=SetKind.sts, name="s"),
    ]


USER = """# @package _global_
defaults:
  - override /parallel: hsdp
name: mine
model: {path: m}
data: {train: [x, {path: y, weight: 0.5}]}
train: {epochs: 2}
"""


def test_a_recipe_in_the_config_dir(tmp_path):
    (recipe,) = compose_recipes([*user_recipe(tmp_path, "mine", USER), "optim.lr=1e-3"])
    assert (recipe.name, recipe.train.epochs, recipe.optim.lr) == ("mine", 2.0, 1e-3)
    assert recipe.parallel.strategy is Strategy.hsdp
    assert [source.weight for source in recipe.data.train] == [1.0, 0.5]


def test_a_recipe_without_its_package_line_is_rejected(tmp_path):
    forgotten = USER.replace("# @package _global_\n", "")
    for text in (forgotten, forgotten.replace("defaults:\n  - override /parallel: hsdp\n", "")):
        assert "# @package _global_" in error_of(user_recipe(tmp_path, "mine", text))


def test_broken_yaml_names_file_and_line(tmp_path):
    sentence = error_of(user_recipe(tmp_path, "mine", USER + "optim: [\n"))
    assert f"{tmp_path / 'recipe' / 'mine.yaml'}" in sentence
    assert "mine.yaml:9: " in sentence


def test_a_typo_in_a_recipe_in_the_config_dir(tmp_path):
    assert "did you mean train?" in error_of(user_recipe(tmp_path, "mine", USER + "trian: {steps: 3}\n"))


EVIL = [
    "hydra: {callbacks: {a: {_target_: pathlib.Path.touch, self: MARKER}}}\n",
    "hydra: {launcher: {_target_: pathlib.Path.touch, self: MARKER}}\n",
    "hydra: {sweeper: {_target_: pathlib.Path.touch, self: MARKER}}\n",
    "hydra: {job_logging: {version: 1, formatters: {a: {(): pathlib.Path.touch, self: MARKER}}, root: {}}}\n",
    "hydra: {hydra_logging: {version: 1, formatters: {a: {(): pathlib.Path.touch, self: MARKER}}, root: {}}}\n",
    "loss: {_target_: pathlib.Path.touch, self: MARKER}\n",
    "evaluation: {sets: [{_target_: pathlib.Path.touch, self: MARKER, path: x}]}\n",
    "output_dir: !!python/object/apply:os.system ['touch MARKER']\n",
]


@pytest.mark.parametrize("evil", EVIL)
@pytest.mark.parametrize("multirun", [[], ["-m"]])
def test_yaml_never_runs_code(tmp_path, evil, multirun):
    marker = tmp_path / "marker"
    error_of([*multirun, *user_recipe(tmp_path, "mine", USER + evil.replace("MARKER", str(marker)))])
    assert not marker.exists()


def test_the_command_line_never_runs_code(tmp_path):
    marker = tmp_path / "marker"
    sentence = error_of([*GOOD, f"+hydra.callbacks.a={{_target_: pathlib.Path.touch, self: {marker}}}"])
    assert "never runs code" in sentence
    assert not marker.exists()


def test_a_model_configuration_is_only_data():
    """A `_target_` in a free-form mapping is only a string."""
    (recipe,) = compose_recipes(
        ["name=a", "model.config={model_type: bert, _target_: os.system}", "model.pooling=cls", *GOOD[2:]]
    )
    assert recipe.model.config == {"model_type": "bert", "_target_": "os.system"}


def test_multirun(monkeypatch):
    sweep = [*GOOD, "optim.lr=1e-5,2e-5"]
    recipes = compose_recipes(["-m", *sweep, "output_dir='runs/${name}-${optim.lr}'"])
    assert [(r.optim.lr, r.output_dir) for r in recipes] == [(1e-5, "runs/a-1e-05"), (2e-5, "runs/a-2e-05")]
    assert "share one output_dir" in error_of(["-m", *sweep])
    for option in ("optim.lr=interval(1e-6,1e-4)", "hydra/sweeper=optuna"):
        message = error_of(["-m", *GOOD, option])
        assert option in message and "W&B sweep" in message
    monkeypatch.setenv("WORLD_SIZE", "2")
    for flag in ("-m", "--multirun"):
        assert "multirun (-m) on several ranks" in error_of([flag, *sweep, "output_dir='runs/${optim.lr}'"])


def test_a_saved_recipe_is_loaded(tmp_path):
    (recipe,) = compose_recipes(
        [
            "name=a",
            "model.config={model_type: bert, hidden_size: 32}",
            "model.pooling=mean",
            "data.train=[x,{path: y, weight: 3}]",
            "evaluation.sets=[dev]",
            "train.epochs=0.5",
            "loss.temperature=0.05",
            "optim.schedule=constant",
        ]
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(to_plain(recipe) | {"versions": {"torch": "2"}}))
    assert load_recipe(path) == recipe


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "missing"),
        ("- a\n", "not a mapping"),
        ("name: [\n", "cannot be read"),
        ("nmae: x\n", "did you mean name?"),
        ("name: !!python/object/apply:os.getcwd []\n", "cannot be read"),
        ("optim: {lr: high}\n", "high"),
    ],
)
def test_an_invalid_recipe_file_is_named(tmp_path, content, words):
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_options_of_commands():
    options = compose_evaluate(["model=m", "sets=[a,{path: b, name: c}]", "precision=bf16"])
    assert [entry.path for entry in options.sets] == ["a", "b"]
    assert options.precision is Precision.bf16
    assert compose_evaluate(["model=m", 'mteb=["MTEB(eng, v2)",STS12]']).mteb == ["MTEB(eng, v2)", "STS12"]
    assert compose_export(["run=r", "step=12"]).step == "12"
    assert compose_search(["model=m", "corpus=c"]).top_k == 5
    for compose, arguments, words in [
        (compose_evaluate, ["sets=[a]"], "model="),
        (compose_evaluate, ["model=m"], "sets="),
        (compose_evaluate, ["model=m", "mteb=STS12"], "mteb=STS12: must be a list, such as mteb=[STS12]"),
        (compose_evaluate, ["model=m", "sets=[a,{path: b, subset: 0}]"], "sets[1].subset=0"),
        (compose_evaluate, ["model=m", "sets=[a]", "run_detph=20"], "did you mean run_depth?"),
        (compose_export, [], "run="),
        (compose_search, ["model=m"], "corpus="),
        (compose_search, ["model=m", "corpus=c", "top_k=0"], "top_k=0"),
        (compose_search, ["model=m", "corpus=c", "chunk_tokens=0"], "chunk_tokens=0"),
        (compose_search, ["model=m", "corpus=c", "index.place=disk"], "index.place=disk"),
        (compose_search, ["--config-dir", "d", "model=m", "corpus=c"], "--config-dir d: "),
        (compose_search, ["-m", "model=m", "corpus=c", "top_k=1,2"], "multirun (-m) is for training"),
        (compose_search, ["model=m", "corpus=c", "kind=sprase"], "kind=sprase: expected one of dense, "),
        (compose_evaluate, ["model=m", "sets=[a]", "kind=bi_encoder"], "write kind=dense"),
        (compose_evaluate, ["model=m", "sets=[a]", "pooling=clss"], "pooling=clss: expected one of cls, mean, "),
        (compose_evaluate, ["model=m", "sets=[a]", "pooling=avg"], "write pooling=mean"),
        (compose_evaluate, ["model=m", "sets=[a]", "function=f"], "function=f: must be module:name"),
        # What an option is for comes before its limits.
        (compose_evaluate, ["model=m", "sets=[a]", "rerank_depth=0"], "rerank_depth=0: has no effect without a rerank"),
        (compose_search, ["model=m", "corpus=c", "rerank_depth=0"], "rerank_depth=0: has no effect without a reranker"),
        (compose_merge, ["models=[a,b]", "output_dir=o", "density=2"], "density=2.0: has no effect without method=tie"),
        (compose_mine, ["model=m", "data=[x]", "teacher_max_length=2"], "has no effect without a teacher"),
        (compose_calibrate, ["model=m", "data=x", "head=mean", "dims=0"], "dims=0: is for head=pca"),
        # A recipe sets it, for dense models.
        (
            compose_recipe,
            ["recipe=quickstart", "model.kind=sparse"],
            "pooling=mean: is for model.kind=dense, not",
        ),
        (
            compose_recipe,
            ["recipe=quickstart", "model.kind=m3"],
            "pooling=mean: is for model.kind=dense or sparse",
        ),
        (compose_recipe, [*GOOD, "model.kind=sparse", "model.pooling=foo"], "expected one of [max, sum]"),
        (compose_recipe, [*GOOD, "model.pooling=clss"], "model.pooling=clss: expected one of cls, mean, "),
    ]:
        with pytest.raises(ConfigError) as caught:
            compose(arguments)
        assert words in str(caught.value)


def test_help_lists_recipes_and_imports_no_torch():
    """A mistyped option is reported before torch is imported, which takes seconds."""
    program = (
        "import sys\n"
        "from embedtrain.config.compose import compose_recipes\n"
        "try:\n    compose_recipes(['--help'])\nexcept SystemExit as error:\n    assert not error.code\n"
        "heavy = [m for m in ('torch', 'transformers', 'datasets') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=False, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    for name in choices("recipe"):
        assert re.search(rf"\b{name}\b", answer.stdout)


@pytest.mark.parametrize(
    "setting", ["hydra.mode=MULTIRUN", "+hydra.callbacks.a={}", "hydra/launcher=other", "hydra.searchpath=[pkg://evil]"]
)
def test_settings_of_hydra_are_rejected(setting):
    assert setting in error_of([*GOOD, setting])


def test_overrides_in_any_position():
    recipes = compose_recipes([*GOOD[:2], "-m", *GOOD[2:], "seed=1,2", "output_dir='runs/${seed}'"])
    assert [recipe.seed for recipe in recipes] == [1, 2]


OF_KINDS = {
    "dense": ["normalize=false", "include_prompt=true", "append_eos=true", "heads=[{out: 8}]"],
    "cross_encoder": ["pair_template=qwen3", "score_head=tokens", "score_tokens=[a,b]", "score_labels=[1,0]"],
    "late_interaction": ["query_length=8", "skiplist_words=[a]"],
    "m3": ["hybrid_weights=[1,1,1]"],
    "sparse": ["activation=relu", "queries=static"],
}


# Options of each kind, in recipes of that kind and of another one.
@pytest.mark.parametrize(
    ("owner", "kind"),
    [
        pytest.param(owner, kind, marks=() if owner == kind or kind == other else pytest.mark.slow)
        for owner, other in zip(OF_KINDS, [*OF_KINDS][1:] + [*OF_KINDS][:1], strict=True)
        for kind in OF_KINDS
    ],
)
def test_a_kind_has_its_own_options(owner, kind):
    """Those of another kind are unknown; null unsets what a recipe sets for that kind."""
    loss = {"m3": "m3", "cross_encoder": "softmax"}.get(kind, "infonce")
    names = [option.partition("=")[0] for option in OF_KINDS[owner]]
    unset = [f"model.{name}=null" for name in names if name not in ("heads", "score_head")]
    recipe = compose_recipe([*GOOD, f"model.kind={kind}", f"loss={loss}", *unset])
    assert recipe.model.kind == kind and all(hasattr(recipe.model, name) == (kind == owner) for name in names)
    if kind != owner:
        for name, option in zip(names, OF_KINDS[owner], strict=True):
            with pytest.raises(ConfigError, match=rf"model\.{name}=.*model\.kind={owner}.*not {kind}"):
                compose_recipe([*GOOD, f"model.kind={kind}", f"loss={loss}", f"model.{option}"])


@pytest.mark.parametrize("value", [True, False, "selective", None])
def test_activation_checkpointing_is_a_flag_or_a_word(value, tmp_path):
    """Recipes of earlier versions have true or false."""
    recipe = compose_recipe([*GOOD, f"parallel.activation_checkpointing={json.dumps(value)}"])
    found = recipe.parallel.activation_checkpointing
    assert (type(found), found) == (type(value), value)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(to_plain(recipe)))
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_activation_checkpointing_of_another_type():
    with pytest.raises(ConfigError, match=r"parallel\.activation_checkpointing=3\b"):
        compose_recipe([*GOOD, "parallel.activation_checkpointing=3"])
