"""A revision pins a model of the Hub in every role, and a run records the commit: two snapshots, offline."""

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from embedtrain.commands.inspect import compose as compose_inspect
from embedtrain.commands.mine import MineOptions
from embedtrain.commands.mine import compose as compose_mine
from embedtrain.config.compose import compose_recipes
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, ModelError
from embedtrain.formats.hub import split_revision
from embedtrain.formats.source import open_model_source
from embedtrain.formats.transformers import load_tokenizer
from embedtrain.mining.teacher import open_teacher
from embedtrain.training.guides import load_guides
from embedtrain.training.train import train
from tests.mine.models import save_cross_encoder
from tests.safety.payloads import edit
from tests.small import model_options, parallel, save_guide, small_model, write_rows

OLD, NEW = "a" * 40, "b" * 40


def publish(cache: Path, repository: str, commit: str, directory: Path) -> None:
    """A snapshot in huggingface_hub's cache; the newest is `main`."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    shutil.copytree(directory, folder / "snapshots" / commit)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "refs" / f"v-{commit[0]}").write_text(commit)


@contextmanager
def cached(cache: Path) -> Iterator[None]:
    before, constants.HF_HUB_CACHE = constants.HF_HUB_CACHE, str(cache)
    try:
        yield
    finally:
        constants.HF_HUB_CACHE = before


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """Models of two commits with different prompts and maximal lengths."""
    root = tmp_path_factory.mktemp("published")
    directory, cross = save_guide(small_model("bert"), root), save_cross_encoder(root / "cross")
    for commit, prompt, length in ((OLD, "old: ", 12), (NEW, "new: ", 24)):
        edit(directory / "config_sentence_transformers.json", prompts={"query": prompt, "document": ""})
        edit(directory / "tokenizer_config.json", model_max_length=length)
        edit(directory / "sentence_bert_config.json", max_seq_length=length)
        edit(cross / "config.json", hidden_dropout_prob=length / 100)
        publish(root / "cache", "org/model", commit, directory)
        publish(root / "cache", "org/cross", commit, cross)
    write_rows(root / "train.jsonl", 8)
    return root


@pytest.fixture
def hub(published) -> Iterator[Path]:
    with cached(published / "cache"):
        yield published


@pytest.mark.parametrize(
    ("revision", "prompt", "commit"),
    [(None, "new: ", NEW), (OLD, "old: ", OLD), ("v-a", "old: ", OLD), (NEW, "new: ", NEW)],
)
def test_model(hub, revision, prompt, commit):
    source = open_model_source(model_options(path="org/model", revision=revision))
    assert source.prompts["query"] == prompt
    assert source.commit == commit


def test_missing_revision(hub):
    with pytest.raises(ModelError) as caught:
        open_model_source(model_options(path="org/model", revision="c" * 40))
    assert str(caught.value).startswith(f"model.path=org/model at model.revision={'c' * 40} is neither a directory nor")
    assert "set model.path to a local directory" in str(caught.value)
    assert "local_files_only" not in str(caught.value)


def test_tokenizer(hub):
    source = open_model_source(model_options(path="org/model"))
    assert load_tokenizer(source).model_max_length == 24
    assert load_tokenizer(source, "org/model").model_max_length == 24
    assert load_tokenizer(source, "org/model", OLD).model_max_length == 12
    with pytest.raises(ConfigError, match=r"^model\.tokenizer_revision=main "):
        load_tokenizer(source, str(hub / "guide"), "main")


def test_teacher(hub):
    for revision, prompt, dropout in ((OLD, "old: ", 0.12), (None, "new: ", 0.24)):
        bi = open_teacher(MineOptions(model="m", teacher="org/model", teacher_revision=revision))
        assert bi.source.prompts["query"] == prompt
        cross = open_teacher(MineOptions(model="m", teacher="org/cross", teacher_revision=revision))
        assert cross.source.kind.scores_pairs
        assert cross.source.config.hidden_dropout_prob == dropout
    with pytest.raises(ConfigError, match=r"teacher_revision=main .* teacher="):
        open_teacher(MineOptions(model="m", teacher=str(hub / "guide"), teacher_revision="main"))


def test_a_directory_has_no_revision(hub):
    with pytest.raises(ConfigError, match=rf"model\.revision={OLD} .* model\.path={hub / 'guide'}"):
        open_model_source(model_options(path=str(hub / "guide"), revision=OLD))
    assert open_model_source(model_options(path=str(hub / "guide"))).commit is None


def test_options_of_commands():
    recipe, _ = compose_inspect(["data=x.jsonl", "model=org/model", f"revision={OLD}"])
    assert recipe.model.revision == OLD
    (pinned,) = compose_recipes(["name=t", "model.path=m", "data.train=[{path: o/n, revision: v1}]", "train.steps=1"])
    assert pinned.data.train[0].revision == "v1"
    rank_batch = compose_mine(
        ["model=m", "data=[{path: o/n, revision: v1}]", "output_dir=out", "teacher=t", "teacher_revision=v2"]
    )
    assert (rank_batch.data[0].revision, rank_batch.teacher_revision) == ("v1", "v2")


def test_revision_after_an_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert split_revision(f"org/model@{OLD}") == ("org/model", OLD)
    assert split_revision("model@refs/pr/1") == ("model", "refs/pr/1")
    for path in ("org/model", "./model@x", "/models/a@b", "a/b/c@d", "s3://bucket/a@b", "@x", "model@"):
        assert split_revision(path) == (path, None)
    (tmp_path / "model@x").mkdir()
    assert split_revision("model@x") == ("model@x", None)


def guides_of_two_commits(world: World, cache: Path) -> list[str]:
    with cached(cache):
        guides, _ = load_guides([f"org/model@{OLD}", "org/model"], parallel(), world, chunk_tokens=64)
    return [guide.texts.text_format.query_prompt for guide in guides.values()]


def test_guides_of_two_commits(ranks, published):
    assert ranks(1, guides_of_two_commits, published / "cache") == [["old: ", "new: "]]


def trained(world: World, root: Path, name: str, *more: str) -> None:
    (recipe,) = compose_recipes([
        "name=t", "model.path=org/model", f"data.train=[{root / 'train.jsonl'}]", "train.steps=1",
        "train.global_batch_size=4", "parallel.precision=fp32", f"output_dir={root / name}", *more,
    ])  # fmt: skip
    with cached(root / "cache"), redirect_stdout(io.StringIO()):
        train(recipe, world)


def test_run_records_the_commit(ranks, published):
    for name, options, commit in (("newest", [], NEW), ("pinned", [f"model.revision={OLD}"], OLD)):
        ranks(1, trained, published, name, *options)
        recipe = yaml.safe_load((published / name / "recipe.yaml").read_text())
        assert recipe["versions"]["model_commit"] == commit
        assert recipe["model"]["revision"] == (OLD if options else None)


def test_a_guide_of_another_commit_is_rejected_when_a_run_resumes(ranks, published):
    """The message names the commit of the run, with which it resumes."""
    main = published / "cache" / "models--org--model" / "refs" / "main"
    options = [f"model.revision={NEW}", "loss.guide=org/model"]
    ranks(1, trained, published, "guided", *options)
    main.write_text(OLD)
    try:
        with pytest.raises(AssertionError, match=rf"org/model \(digest {NEW}.* {OLD}\): write org/model@{NEW}"):
            ranks(1, trained, published, "guided", *options, "train.steps=2")
        ranks(1, trained, published, "guided", *options, f"loss.guide=org/model@{NEW}", "train.steps=2")
    finally:
        main.write_text(NEW)
