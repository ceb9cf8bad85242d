"""Recipes and run directories of an attacker: YAML runs no code, and reads no secrets from the environment."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from embedtrain.commands.evaluate import compose as compose_evaluate
from embedtrain.commands.mine import compose as compose_mine
from embedtrain.commands.submit.options import compose_submit
from embedtrain.config.compose import compose_recipes, load_recipe, to_plain
from embedtrain.config.hydra_files import load_yaml
from embedtrain.config.parsing import parse_sources
from embedtrain.config.recipe import Recipe
from embedtrain.errors import ConfigError
from embedtrain.utils.files import write_checksums
from tests.safety.payloads import MARKER, attempt, code, deep, edit, plant_module, plant_pickle
from tests.small import save_guide, small_model, write_rows

SECRET = "hush-7361"
BASE = ["name=t", "model.path=m", "data.train=[rows.jsonl]", "train.steps=1"]
# Contents of a recipe.yaml, and words of the sentence.
RECIPES = {
    "target": ("_target_: os.system\nname: x\n", "unknown option _target_"),
    "target within": ("model: {_target_: os.system, path: x}\n", "unknown option model._target_"),
    "target in a source": ("data: {train: [{path: x, _target_: os.system}]}\n", "unknown option _target_"),
    "target in a loss": ("loss: {name: infonce, _target_: os.system}\n", "unknown option loss._target_"),
    "a class": ("name: !!python/name:os.system\n", "python/name"),
    "a call": ("name: !!python/object/apply:evil.Mod []\n", "python/object/apply"),
    "a module": ("name: !!python/module:evil\n", "python/module"),
    "an own tag": ("name: !evil x\n", "!evil"),
    "deep": (f"name: {deep('[', ']', 5000)}\n", "recursion"),
    "long number": (f"seed: {'9' * 5000}\n", "recipe.yaml:1: a number of 5,000 characters"),
    "binary": ("\0", "cannot be read as a recipe"),
    "no mapping": ("- 1\n", "it is not a mapping"),
    "odd loss": ("loss: {name: [1]}\n", "there is no such loss"),
    "loss of the library": (
        "loss: {name: sentence_transformers, class_name: CoSENTLoss, arguments: {similarity_fct: os.system}}\n",
        "",
    ),
}


@pytest.fixture(autouse=True)
def _secret(monkeypatch):
    monkeypatch.setenv("EMBEDTRAIN_HOME", SECRET)
    monkeypatch.setenv("HF_TOKEN", SECRET)


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """The path of a recipe in the working directory, which has a module that writes the marker."""
    plant_module(tmp_path, tmp_path / MARKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "recipe.yaml"
    assert not (tmp_path / MARKER).exists()


@pytest.mark.parametrize("name", RECIPES)
def test_a_saved_recipe(saved, name):
    text, words = RECIPES[name]
    saved.write_text(text)
    if not words:  # the loss is checked where it is used
        assert load_recipe(saved).loss.name == "sentence_transformers"
        return
    with pytest.raises(ConfigError) as caught:
        load_recipe(saved)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_saved_recipe_does_not_read_the_environment(saved):
    saved.write_text(
        "name: ${oc.env:EMBEDTRAIN_HOME}\n"
        "model: {path: '${oc.env:HF_TOKEN}', config: {a: '${oc.decode:[1]}'}}\n"
        "data: {train: [{path: '${oc.env:HF_TOKEN}', query_prompt: '${name}'}]}\n"
        "evaluation: {sets: [{path: '${oc.env:HF_TOKEN}'}]}\n"
    )
    recipe = load_recipe(saved)
    assert SECRET not in str(to_plain(recipe))
    assert recipe.name == "${oc.env:EMBEDTRAIN_HOME}"
    assert recipe.model.config == {"a": "${oc.decode:[1]}"}
    assert recipe.data.train[0].query_prompt == "${name}"


@pytest.mark.parametrize("text", ["cost ${x} of it", "\\${name}", "\\\\${a.b}\\", "a $ {b}", "???\n"])
def test_texts_like_interpolations_are_kept(saved, text):
    recipe = Recipe(name="t")
    recipe.model.query_prompt = text
    recipe.data.train = parse_sources([{"path": "x", "query_prompt": text}], "data.train", recipe.loss)
    saved.write_text(yaml.safe_dump(to_plain(recipe)))
    assert load_recipe(saved) == recipe


VARIABLES = ["DATABASE_URL", "SLURM_JWT"]


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:NAME}",
        "${oc.env:NAME,none}",
        "x-${oc.env:NAME}-y",
        "${oc.env:${model.query_prompt}}",
        "${oc.decode:'${oc.env:NAME}'}",
        "${oc.create:'${oc.env:NAME}'}",
        "${oc.select:model.document_prompt,x}",
    ],
)
def test_a_recipe_reads_no_credentials(monkeypatch, tmp_path, value):
    (tmp_path / "recipe").mkdir()
    for name in VARIABLES:
        monkeypatch.setenv(name, SECRET)
        value_of = value.replace("NAME", name)
        options = {"query_prompt": name, "document_prompt": f"${{oc.env:{name}}}"} if "model." in value else {}
        recipe = {"output_dir": value_of, "model": options}
        (tmp_path / "recipe" / "mine.yaml").write_text("# @package _global_\n" + yaml.safe_dump(recipe))
        for arguments in (["--config-dir", str(tmp_path), "recipe=mine", *BASE], [*BASE, f'output_dir="{value_of}"']):
            if options and "recipe=mine" not in arguments:
                continue
            with pytest.raises(ConfigError) as caught:
                compose_recipes(arguments)
            assert f"{name} is not read from the environment" in str(caught.value)
            assert f"EMBEDTRAIN_{name}" in str(caught.value)
            assert SECRET not in str(caught.value)


def test_a_recipe_reads_paths_from_the_environment(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    output_dir = "output_dir='${oc.env:EMBEDTRAIN_HOME}/${oc.env:SLURM_JOB_ID}/${oc.env:EMBEDTRAIN_NONE,runs}'"
    (recipe,) = compose_recipes([*BASE, output_dir])
    assert recipe.output_dir == f"{SECRET}/17/runs"


def nested(template: str) -> str:
    """A mapping in which each of forty values repeats the one before it twice."""
    lines = [f"    x{i}: {template.replace('NAME', f'model.config.x{i - 1}')}" for i in range(1, 41)]
    return "\n".join(["model:", "  config:", "    x0: hello", *lines, ""])


ALIASES = "".join(f"    x{i}: &x{i} [*x{i - 1}, *x{i - 1}]\n" for i in range(1, 41))
# Lines of a recipe, and words of the sentence.
EXPANDING = {
    "aliases": (f"model:\n  config:\n    x0: &x0 [1]\n{ALIASES}", "mine.yaml:15: aliases expand"),
    "an alias of itself": ("model: {config: &a {x: *a}}\n", "mine.yaml:2: a value contains an alias of itself"),
    "texts": (nested("${NAME}${NAME}"), "interpolations ${...} insert more than 30,000"),
    "nodes": (nested("{a: '${NAME}', b: '${NAME}'}"), "interpolations ${...} insert more than 30,000"),
    "created": (nested("'${oc.create:{a: ${NAME}, b: ${NAME}}}'"), "interpolations ${...} insert more than 30,000"),
    "long texts": (f"name: {'x' * 2**19}\noutput_dir: {'${name}' * 1000}\n", "insert more than 30,000"),
    "many interpolations": (f"output_dir: {'${name}' * 10**5}\n", "mine.yaml:2: texts with ${...}"),
    "a long number": (f"seed: {'1:' * 2000}1\n", "mine.yaml:2: a number of 4,001 characters"),
    "a large file": (f"name: {'x' * 2**22}\n", "mine.yaml: is larger than 4 MiB"),
    "a file outside": ("defaults: [/../hosts@model.config, _self_]\n", "hosts.yaml is outside of --config-dir"),
    "a link outside": ("defaults: [linked, _self_]\n", "hosts.yaml is outside of --config-dir"),
}


@pytest.mark.parametrize("name", EXPANDING)
def test_a_recipe_that_expands_without_end_or_leaves_its_folder(tmp_path, monkeypatch, name):
    monkeypatch.setattr("embedtrain.config.hydra_files.MAX_INSERTED_VALUES", 500)
    lines, words = EXPANDING[name]
    words = words.replace("30,000", "500")
    folder = tmp_path / "conf"
    (folder / "recipe").mkdir(parents=True)
    (tmp_path / "hosts.yaml").write_text(f"token: {SECRET}\n")
    (folder / "recipe" / "linked.yaml").symlink_to(tmp_path / "hosts.yaml")
    (folder / "recipe" / "mine.yaml").write_text(f"# @package _global_\n{lines}")
    base = BASE[1:] if lines.startswith("name") else BASE
    with pytest.raises(ConfigError) as caught:
        compose_recipes(["--config-dir", str(folder), "recipe=mine", *base])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_an_ordinary_alias_and_a_thousand_sources(tmp_path):
    (tmp_path / "recipe").mkdir()
    lines = "model: {query_prompt: &prompt 'query: ', document_prompt: *prompt}\n"
    (tmp_path / "recipe" / "mine.yaml").write_text(f"# @package _global_\n{lines}")
    (recipe,) = compose_recipes(["--config-dir", str(tmp_path), "recipe=mine", *BASE])
    assert recipe.model.document_prompt == "query: "
    saved = tmp_path / "recipe.yaml"
    saved.write_text(yaml.safe_dump({"data": {"train": [{"path": f"{i}.jsonl", "weight": 2} for i in range(1000)]}}))
    assert len(load_yaml(saved)["data"]["train"]) == 1000


@pytest.mark.parametrize("text", [f"x0: &x0 [1]\n{ALIASES.replace('    ', '')}", "seed: " + "1:" * 2000 + "1\n"])
def test_yaml_files_of_other_commands(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    accelerate = [*BASE, f"parallel.accelerate_config={path}"]
    cluster = ["recipe=minilm", "data.train=[rows.jsonl]", f"slurm.cluster={path}"]
    readers = [lambda: load_recipe(path), lambda: compose_recipes(accelerate), lambda: compose_submit(cluster)]
    for read in readers[: None if "&" in text else 2]:  # the options of a cluster are texts
        with pytest.raises(ConfigError, match=r"recipe.yaml:\d+: "):
            read()
    path.unlink()
    os.mkfifo(path)
    for read in readers:
        with pytest.raises(ConfigError, match="not a regular file"):
            read()


@pytest.mark.parametrize(
    "value", ["seed=range(1,1000000000)", "seed=shuffle(range(1,1000000000))", "optim.lr=range(0.0,1.0,1e-300)"]
)
def test_a_multirun_without_end(value):
    with pytest.raises(ConfigError, match="more than 1,000 jobs") as caught:
        compose_recipes(["-m", *BASE, value, "output_dir='runs/${seed}'"])
    assert value in str(caught.value)
    with pytest.raises(ConfigError, match="more than 1,000 jobs"):
        compose_recipes(["-m", *BASE, "seed=range(100)", "train.steps=range(1,100)"])


@pytest.mark.parametrize(
    "lines",
    [
        "hydra: {searchpath: [pkg://evil]}",
        "hydra: {callbacks: {x: {_target_: evil.Mod}}}",
        "hydra: {job_logging: {version: 1, handlers: {x: {(): evil.Mod}}, root: {handlers: [x]}}}",
        "hydra: {launcher: {_target_: evil.Mod}}",
        "hydra: {sweeper: {_target_: evil.Mod}}",
        "model: {_target_: evil.Mod}",
        "name: !!python/object/apply:evil.Mod []",
        "output_dir: ${evil:x}",
    ],
)
def test_a_recipe_of_a_foreign_config_dir(saved, lines):
    folder = saved.parent / "conf"
    (folder / "recipe").mkdir(parents=True)
    (folder / "recipe" / "mine.yaml").write_text(f"# @package _global_\n{lines}\n")
    (folder / "primary.yaml").write_text(f"defaults: [recipe_schema, _self_]\n{lines}\n")
    for chosen in (["recipe=mine"], ["--config-name", "primary"]):
        with pytest.raises(ConfigError) as caught:
            compose_recipes(["--config-dir", str(folder), *chosen, *BASE])
        assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory) -> Path:
    """A folder with a run of one step."""
    folder = tmp_path_factory.mktemp("run")
    save_guide(small_model("bert"), folder)
    write_rows(folder / "train.jsonl", 8)
    (outcome,) = ranks(1, attempt, "train", folder, TRAIN)
    assert outcome.kind == "", outcome.message
    return folder


TRAIN = [
    "name=t", "model.path=guide", "data.train=[train.jsonl]", "train.steps=1", "train.global_batch_size=4",
    "parallel.precision=fp32", "output_dir=run",
]  # fmt: skip


def rewritten(run: Path, **model: object) -> None:
    """The same run, its recipe saying something else of the model."""
    path = run / "run" / "recipe.yaml"
    content = yaml.safe_load(path.read_text())
    content["model"] |= model
    path.write_text(yaml.safe_dump(content))


def with_code(run: Path) -> None:
    """The run's architecture asking for code that lies beside it."""
    edit(
        run / "run" / "architecture" / "config.json",
        model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"},
    )  # fmt: skip
    plant_module(run / "run" / "architecture", run / MARKER)
    write_checksums(run / "run" / "architecture")


@pytest.fixture
def copied(run, tmp_path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_a_run_cannot_allow_its_own_code(ranks, copied):
    with_code(copied)
    rewritten(copied, trust_remote_code=True)
    (outcome,) = ranks(1, attempt, "export", copied, ["run=run", "output_dir=out"])
    assert not outcome.ran
    assert outcome.kind == "ConfigError"
    assert "recipe.yaml has model.trust_remote_code: true" in outcome.message
    rewritten(copied, trust_remote_code=False)
    (outcome,) = ranks(1, attempt, "export", copied, ["run=run", "output_dir=out"])
    assert not outcome.ran
    assert outcome.kind == "ModelError"
    assert "auto_map" in outcome.message
    (outcome,) = ranks(1, attempt, "export", copied, ["run=run", "output_dir=out", "trust_remote_code=true"])
    assert outcome.ran  # on the user's own word


def test_a_run_cannot_name_a_base_model_whose_code_runs(ranks, copied):
    """The user trusts the Python in the run, and the base model of its adapters only if he names it."""
    adapters = [*TRAIN[:-1], "model.lora.rank=2", "export.check=false", "output_dir=run2"]
    (outcome,) = ranks(1, attempt, "train", copied, adapters)
    assert outcome.kind == "", outcome.message
    theirs = shutil.copytree(copied / "guide", copied / "theirs")
    edit(theirs / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"})
    plant_module(theirs, copied / MARKER)
    recipe = copied / "run2" / "recipe.yaml"
    content = yaml.safe_load(recipe.read_text())
    content["model"] |= {"path": str(theirs), "trust_remote_code": True}
    recipe.write_text(yaml.safe_dump(content))
    export = ["run=run2", "output_dir=out", "check=false", "trust_remote_code=true"]
    (outcome,) = ranks(1, attempt, "export", copied, export)
    assert not outcome.ran
    assert outcome.kind == "ModelError"
    assert f"base={theirs}" in outcome.message
    (outcome,) = ranks(1, attempt, "export", copied, [*export, f"base={theirs}"])
    assert outcome.ran  # on the user's own word


def test_a_run_with_unpickling_settings(ranks, copied):
    architecture = copied / "run" / "architecture"
    edit(architecture / "sentence_bert_config.json", model_args={"weights_only": False, "use_safetensors": False})
    plant_pickle(architecture / "pytorch_model.bin", copied / MARKER, {"a": torch.ones(2)})
    write_checksums(architecture)
    (outcome,) = ranks(1, attempt, "export", copied, ["run=run", "output_dir=out"])
    assert not outcome.ran
    assert outcome.kind == "ModelError"
    assert "use_safetensors" in outcome.message


def test_a_run_with_a_link_out_of_its_directory(ranks, copied):
    (copied / "secret").write_text(SECRET)
    (copied / "run" / "architecture" / "1_Pooling" / "notes.txt").symlink_to(copied / "secret")
    (outcome,) = ranks(1, attempt, "export", copied, ["run=run", "output_dir=out"])
    assert outcome.kind == "ModelError"
    assert "notes.txt is a link to" in outcome.message
    assert not (copied / "out").exists()


def test_a_resumed_run_exports_nothing_that_was_planted(ranks, copied):
    """Training resumes in a folder that an attacker prepared: files that are not its own are ignored."""
    run_dir = copied / "run"
    with_code(copied)
    plant_pickle(run_dir / "architecture" / "pytorch_model.bin", copied / MARKER)
    for step in (run_dir / "checkpoints").glob("step-*"):
        plant_pickle(step / "optimizer.pt", copied / MARKER)
    (run_dir / "architecture" / "sitecustomize.py").write_text(code(copied / MARKER))
    rewritten(copied, trust_remote_code=True)
    (outcome,) = ranks(1, attempt, "train", copied, [*TRAIN[:3], "train.steps=2", *TRAIN[4:]])
    assert not outcome.ran
    assert outcome.kind == "", outcome.message
    assert not list((run_dir / "model").rglob("*.py"))
    assert not list((run_dir / "model").rglob("*.bin"))


def test_a_planted_vocabulary(ranks, copied):
    """A run with a vocabulary of its own reads it again when it resumes."""
    scratch = [
        "name=t", "model.config={model_type: bert, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}",
        "model.pooling=mean", "model.vocab_size=400", "model.max_length=16", *TRAIN[2:-1], "output_dir=scratch",
    ]  # fmt: skip
    (outcome,) = ranks(1, attempt, "train", copied, scratch)
    assert outcome.kind == "", outcome.message
    tokenizer = copied / "scratch" / "tokenizer"
    edit(tokenizer / "tokenizer_config.json", tokenizer_class="AutoConfig")
    edit(tokenizer / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Config"})
    plant_module(tokenizer, copied / MARKER)
    write_checksums(tokenizer)
    (outcome,) = ranks(1, attempt, "train", copied, scratch)
    assert not outcome.ran
    assert "[y/N]" not in outcome.printed
    assert outcome.kind == "ModelError"
    assert "tokenizer_class=AutoConfig" in outcome.message


@pytest.mark.parametrize(
    ("compose", "arguments", "option"),
    [
        (compose_recipes, [*BASE, f"model.path=https://me:{SECRET}@host/m"], "model.path"),
        (
            compose_recipes,
            [*BASE, f"data.train=[a,{{path: 'ftp://me:{SECRET}@host/rows.jsonl'}}]"],
            "data.train[1].path",
        ),
        (compose_recipes, [*BASE, f"evaluation.sets=['https://{SECRET}@host/dev']"], "evaluation.sets[0]"),
        (
            compose_recipes,
            [*BASE, f"tracking.wandb_init={{notes: 'http://me:{SECRET}@w'}}"],
            "tracking.wandb_init.notes",
        ),
        (compose_evaluate, [f"model=https://me:{SECRET}@host/m", "sets=[dev]"], "model"),
        (compose_mine, ["model=m", "data=[d]", f"corpus=['s3://me:{SECRET}@host/c']", "output_dir=o"], "corpus[0]"),
    ],
)
def test_urls_with_passwords_are_rejected(compose, arguments, option):
    """They would be written to recipe.yaml, the model card, logs and wandb; the message does not show them either."""
    with pytest.raises(ConfigError) as caught:
        compose(arguments)
    assert str(caught.value).startswith(f"{option}=") and "***@" in str(caught.value)
    assert SECRET not in str(caught.value)
