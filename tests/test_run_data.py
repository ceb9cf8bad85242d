"""Whole runs on data of many kinds: several sources with losses of their own, cached, streamed, by workers, resumed."""

import json
import shutil
from pathlib import Path

import pytest

from embedtrain.checkpoint.step_directory import open_checkpoint, step_path
from embedtrain.distributed.world import World
from tests.runs import BASE, losses, metric_rows, options, rewind_run, run, run_without_base
from tests.small import batch, save_small, small_model, text


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A model, and sources in FlagEmbedding's layout, of scored pairs, and one without in-batch negatives."""
    folder = tmp_path_factory.mktemp("data")
    save_small(small_model("xlm-roberta"), folder / "model")
    save_small(small_model("xlm-roberta", dropout=0.1), folder / "dropout")
    rows = list(enumerate(batch(26).rows))
    lines = {
        "train": [
            {"query": r.query, "pos": [r.documents.texts[0]], "neg": list(r.documents.texts[1:])} for _, r in rows
        ],
        "pairs": [{"a": r.query, "b": r.documents.texts[0], "score": i % 6} for i, r in rows[:13]],
        "classes-no_in_batch_neg": [
            {"query": r.query, "pos": [r.documents.texts[0]], "neg": [text(i, 3), text(i + 9, 4)], "prompt": "alpha"}
            for i, r in rows[:11]
        ],
    }
    for name, content in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return folder


def given(workshop: Path, out: Path, *more: str, model: str = "model") -> tuple[str, ...]:
    sources = (
        f"data.train=[{{path: {workshop / 'train.jsonl'}, weight: 1.5, loss: {{temperature: 0.2}}}},"
        f"{{path: {workshop / 'pairs.jsonl'}, loss: cosent, score_scale: 5, query_prompt: 'beta '}},"
        f"{workshop / 'classes-no_in_batch_neg.jsonl'}]"
    )
    cache = f"data.cache_dir={workshop / 'cache'}"
    return (f"model.path={workshop / model}", sources, f"output_dir={out}", "loss.learn_temperature=true", cache, *more)


def by_source(directory: Path) -> dict[int, dict[str, float]]:
    return {row["step"]: {k: v for k, v in row.items() if k.startswith("loss/")} for row in metric_rows(directory)}


@pytest.mark.parametrize("sizes", [(3,), pytest.param((2, 3), marks=pytest.mark.slow)])
def test_sources_with_losses_of_their_own(ranks, workshop, tmp_path, sizes):
    """An epoch of 39, 13 and 11 rows in batches of one source each, the same at any number of ranks."""
    rows = {}
    for size in (1, *sizes):
        metrics = ranks(size, run, *given(workshop, tmp_path / str(size), "train.epochs=1"))[0]
        rows[size] = by_source(tmp_path / str(size))
        if size == 1:
            assert (
                "3 losses, one per batch: infonce (temperature=0.2, in_batch_negatives=True) for train; cosent for pa"
                in metrics
            )
            assert "classes-no_in_batch_neg: no in-batch negatives, as no_in_batch_neg in the path says" in metrics
            assert "an epoch: 63 rows in 8 batches of up to 10 rows, each of one source" in metrics
    names = [next(iter(row)) for row in rows[1].values()]
    assert all(len(row) == 1 for row in rows[1].values())
    assert [names.count(f"loss/{name}") for name in ("train", "pairs", "classes-no_in_batch_neg")] == [4, 2, 2]
    for size in sizes:
        assert list(rows[size]) == list(rows[1])
        for step, row in rows[1].items():
            assert rows[size][step] == pytest.approx(row, rel=1e-5), (size, step)


@pytest.fixture(scope="module")
def texts(workshop):
    (workshop / "texts.jsonl").write_text("".join(json.dumps({"text": text(i, 8)}) + "\n" for i in range(30)))
    return workshop / "texts.jsonl"


def test_texts_with_deleted_words_are_the_same_on_any_number_of_ranks(ranks, workshop, texts, tmp_path):
    sources = f"data.train=[{{path: {texts}, text_as_positive: true, delete_words: 0.6}},{workshop / 'train.jsonl'}]"
    common = (f"model.path={workshop / 'model'}", sources, "train.steps=8", "train.chunk_tokens=60")
    runs = {}
    for size in (1, 3):
        printed = ranks(size, run, *common, f"output_dir={tmp_path / str(size)}")[0]
        assert "column text = query and positive" in printed
        assert "texts: each word of a query is deleted with the probability 0.6 (delete_words)" in printed
        runs[size] = losses(tmp_path / str(size))
    assert len(runs[1]) == 8
    assert runs[3] == pytest.approx(runs[1], rel=1e-5)
    # Without deletion, a text without dropout is equal to its positive.
    equal = sources.replace("delete_words: 0.6", "delete_words: 0")
    printed = ranks(1, run, *common[:1], equal, "train.steps=1", f"output_dir={tmp_path / 'equal'}")[0]
    assert "texts: texts are their own positives, and the model has no dropout" in printed


def test_dropout_of_the_recipe_is_not_exported(ranks, workshop, texts, tmp_path):
    """A text is its own positive: with dropout of the recipe, in a model that has none."""
    sources = f"data.train=[{{path: {texts}, text_as_positive: true}}]"
    common = (f"model.path={workshop / 'model'}", sources, "train.steps=4", "checkpoint.every=2", "checkpoint.keep=9")
    common = (*common, "model.dropout=0.3")
    printed = ranks(1, run, *common, f"output_dir={tmp_path / 'run'}")[0]
    assert "no dropout" not in printed
    expected = losses(tmp_path / "run")
    for folder in ("run/model", "run/architecture"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["hidden_dropout_prob"] == config["attention_probs_dropout_prob"] == 0.0
    again = rewind_run(tmp_path / "run", tmp_path / "again", 2)
    ranks(1, run, *common, f"output_dir={again}")
    assert losses(again) == expected
    ranks(1, run, *common[:-1], "model.dropout=0", f"output_dir={tmp_path / 'without'}")
    assert losses(tmp_path / "without")[1] != pytest.approx(expected[1], rel=1e-3)


@pytest.mark.slow
def test_a_resumed_run_of_several_sources_continues_exactly(ranks, workshop, tmp_path):
    common = ("train.steps=9", "checkpoint.every=2", "checkpoint.keep=9", "train.gradient_accumulation_steps=2")
    ranks(2, run, *given(workshop, tmp_path / "run", *common, model="dropout"))
    expected = losses(tmp_path / "run")
    for step in (6, 8, 9):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:08d}")
    ranks(2, run, *given(workshop, tmp_path / "run", *common, model="dropout"))
    assert losses(tmp_path / "run") == expected
    assert len(expected) == 9


def test_logged_losses_are_means_since_the_last_row_also_after_a_resume(ranks, workshop, tmp_path):
    """Rows of two sources in every batch; a run that resumes between two rows logs what the whole run logs."""
    folders = [workshop / "mixed" / name for name in ("web", "news")]
    for index, folder in enumerate(folders):
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_text("".join(rows_of_source(index)))
    sources = f"data.train=[{', '.join(str(folder / 'train.jsonl') for folder in folders)}]"
    common = [f"model.path={workshop / 'model'}", sources, "train.steps=8", "checkpoint.every=2", "checkpoint.keep=9"]
    ranks(2, run, *common, f"output_dir={tmp_path / 'each'}")
    each = metric_rows(tmp_path / "each")
    names = ["loss", "loss/web/train", "loss/news/train", "accuracy"]
    # 13 rows of web, 7 of news: batches of ten with 6 or 7 of the first.
    for row in each:
        web, news = (row[name] for name in names[1:3])
        assert any(row["loss"] == pytest.approx((n * web + (10 - n) * news) / 10, rel=1e-5) for n in (6, 7))
        assert web != pytest.approx(news, rel=1e-3)

    common.append("train.log_every=4")
    ranks(2, run, *common, f"output_dir={tmp_path / 'whole'}")
    whole = metric_rows(tmp_path / "whole")
    assert [row["step"] for row in whole] == [4, 8]
    for row in whole:
        steps = [other for other in each if row["step"] - 4 < other["step"] <= row["step"]]
        for name in names:
            assert row[name] == pytest.approx(sum(other[name] for other in steps) / 4, rel=1e-12), name
        assert row["grad_norm"] == steps[-1]["grad_norm"]
    for size, exact in ((2, True), (1, False)):
        resumed = rewind_run(tmp_path / "whole", tmp_path / f"resumed-{size}", 6)
        ranks(size, run, *common, f"output_dir={resumed}")
        for row, expected in zip(metric_rows(resumed), whole, strict=True):
            values = {name: expected[name] for name in names}
            assert {name: row[name] for name in names} == (values if exact else pytest.approx(values, rel=1e-5))


def rows_of_source(index: int) -> list[str]:
    rows = batch(20).rows[13 * index : 13 + 7 * index]
    return [json.dumps({"query": row.query, "pos": [row.documents.texts[0]]}) + "\n" for row in rows]


@pytest.mark.slow
def test_a_loss_that_no_step_has_reached_is_resumed(ranks, workshop, tmp_path):
    """Each source has a temperature of its own, and the first checkpoint comes before the second source does."""
    source = workshop / "train.jsonl"
    first = f"{{path: {source}, loss: {{temperature: 0.1}}, max_rows: 10}}"
    sources = f"data.train=[{first},{{path: {source}, loss: {{temperature: 0.2}}}}]"
    for layout in ("sharded", "full"):
        common = [f"model.path={workshop / 'model'}", sources, "loss.learn_temperature=true", "train.steps=3"]
        common += ["checkpoint.every=1", "checkpoint.keep=9", f"checkpoint.layout={layout}"]
        out = tmp_path / layout
        ranks(2, run, *common, f"output_dir={out}")
        expected = losses(out)
        for step in (2, 3):
            shutil.rmtree(out / "checkpoints" / f"step-{step:08d}")
        ranks(2, run, *common, f"output_dir={out}")
        assert losses(out) == expected


def test_an_epoch_of_accumulated_batches_ends_with_what_is_left(ranks, workshop, tmp_path):
    """26 rows are 3 batches: a step of two, and one of the last."""
    common = [f"model.path={workshop / 'model'}", f"data.train=[{workshop / 'train.jsonl'}]", "train.epochs=1"]
    ranks(2, run, *common, "train.gradient_accumulation_steps=2", f"output_dir={tmp_path}")
    assert len(losses(tmp_path)) == 2
    assert open_checkpoint(step_path(tmp_path / "checkpoints", 2)).manifest.state["samples"] == 26


def test_workers_and_the_cache_change_nothing(ranks, workshop, tmp_path):
    """No thread, two of them, files elsewhere: one run."""
    plain = [f"data.train=[{workshop / 'train.jsonl'}]", f"model.path={workshop / 'model'}", "train.steps=6"]
    cache = f"data.cache_dir={workshop / 'cache'}"
    ranks(2, run, *plain, cache, f"output_dir={tmp_path / 'tokens'}")
    expected = losses(tmp_path / "tokens")
    for name, more in {"no-thread": "data.workers=0", "two": "data.workers=2"}.items():
        ranks(2, run, *plain, cache, f"output_dir={tmp_path / name}", more)
        assert losses(tmp_path / name) == expected
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.copy(workshop / "train.jsonl", moved)
    shutil.rmtree(tmp_path / "tokens" / "model")
    elsewhere = [f"data.train=[{moved / 'train.jsonl'}]", *plain[1:]]
    metrics = ranks(2, run, *elsewhere, cache, f"output_dir={tmp_path / 'tokens'}")[0]
    assert "is the end of this run" in metrics
    changed = (moved / "train.jsonl").read_text().replace("alpha", "beta", 1)
    (moved / "train.jsonl").write_text(changed)
    with pytest.raises(AssertionError, match=r"data\.train\.train"):
        ranks(2, run, *elsewhere, cache, f"output_dir={tmp_path / 'tokens'}")


def elsewhere(world: World, workshop: str, out: str) -> str:
    """A run whose second rank finds another file under the same path, as on a node with an older copy."""
    if world.rank == 1:
        folder = Path(out) / "node"
        folder.mkdir(parents=True)
        (folder / "train.jsonl").write_text((Path(workshop) / "train.jsonl").read_text().replace("alpha", "beta"))
        workshop = str(folder)
    model = f"model.path={Path(workshop) / 'model'}" if world.rank == 0 else f"model.path={Path(out).parent / 'model'}"
    return run(world, model, f"data.train=[{Path(workshop) / 'train.jsonl'}]", "train.steps=1", f"output_dir={out}/run")


def test_files_that_differ_between_nodes(ranks, workshop, tmp_path):
    shutil.copytree(workshop / "model", tmp_path / "model")
    with pytest.raises(AssertionError) as failure:
        ranks(2, elsewhere, str(workshop), str(tmp_path / "out"))
    assert str(failure.value).count("DataError: data.train: train has other rows on rank 1 than on rank 0") == 2


@pytest.mark.quick("infonce")
@pytest.mark.parametrize("loss", ["infonce", "siglip"])
def test_rows_without_any_negative_are_reported_before_the_first_step(ranks, run_inputs, tmp_path, loss):
    (tmp_path / "equal.jsonl").write_text('{"query": "alpha", "pos": ["beta"]}\n' * 12)
    few = f"data.train=[{tmp_path / 'equal.jsonl'}]", "evaluation.sets=[]", "train.steps=2", f"loss={loss}"
    arguments = [value for value in BASE if not value.startswith("loss.")]
    for path, expected in ((tmp_path / "run", 1), (tmp_path / "other", 0)):
        several = (few[0] if expected else f"data.train=[{run_inputs / 'train.jsonl'}]", *few[1:])
        outputs = ranks(2, run_without_base, *arguments, *options(run_inputs, path), *several)
        warning = "step 1: no query of this batch has a negative"
        assert ["\n".join(texts).count(warning) for texts in outputs] == [expected, 0]
        assert "step 2: no query" not in str(outputs)  # once
