"""Mining as a user types it: torchrun, SIGKILL at any moment, one-sentence errors, and training on what comes out."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.mine.work import MiningFolder
from tests.evaluation.mining.mined import more_documents, read_jsonl, rows_alone, save_model, try_mining, write_jsonl
from tests.evaluation.mining.models import save_cross_encoder
from tests.small import write_beir
from tests.test_commands import TORCHRUN, call, start

ROWS = rows_alone(120)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    save_model(folder / "model")
    write_jsonl(folder / "train.jsonl", ROWS)
    write_beir(folder / "judged", 5)
    write_jsonl(folder / "pool.jsonl", [{"text": text} for text in more_documents(60)])
    return folder


OPTIONS = [
    "model=model/guide", "data=[train.jsonl]", "corpus=[pool.jsonl]", "precision=fp32",
    "negatives=4", "rank_max=30", "relative_margin=0.001",
]  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def mined(ranks, workshop):
    """Mining on so many ranks, in their processes: what rank 0 printed, and the sentence all ended with."""

    def run(*arguments: str, size: int = 1) -> tuple[str, str]:
        answers = ranks(size, try_mining, workshop, arguments)
        assert len({bool(error) for _, error in answers}) == 1
        return answers[0]

    return run


@pytest.mark.slow
def test_mined_rows_are_trained_on(workshop):
    told = call("embedtrain.mine", *OPTIONS, "output_dir=mined", ranks=2, cwd=workshop)
    assert "positive scores" in told
    rows = read_jsonl(workshop / "mined" / "train.jsonl")
    assert [row["query"] for row in rows] == [row["query"] for row in ROWS]
    summary = json.loads((workshop / "mined" / "summary.json").read_text())
    figures = summary["sources"]["train"]
    assert figures["rows"] == len(ROWS)
    assert figures["negatives"] == sum(len(row["neg"]) for row in rows) > 60
    assert figures["rows_without_negatives"] == sum(not row["neg"] for row in rows)
    assert figures["negative_scores"]["max"] == pytest.approx(max(s for row in rows for s in row["neg_scores"]))
    assert figures["candidates_above_margin"] >= figures["candidates_above_positive"] > 0
    assert all(one["score"] > one["positive_score"] * 0.999 for one in summary["suspected_false_negatives"])
    told = call(
        "embedtrain", "name=t", "model.path=model/guide", "data.train=[mined/train.jsonl]", "train.steps=2",
        "train.global_batch_size=8", "parallel.precision=fp32", "output_dir=run", cwd=workshop,
    )  # fmt: skip
    assert "0 to 4 negatives a row" in told
    assert (workshop / "run" / "model" / "modules.json").is_file()


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_on_another_number_of_ranks(workshop, mined):
    """SIGKILL to all ranks, then to one, whom the other misses; the files are those of an undisturbed run."""
    common = [*OPTIONS, "query_batch_size=3", "chunk_tokens=256"]
    assert mined(*common, "output_dir=whole")[1] == ""
    to = workshop / "killed"
    blocks = to / ".mining" / "blocks"
    wanted = [
        lambda: any((to / ".mining" / "vectors").glob("*/*.safetensors")),
        lambda: len(list(blocks.glob("*[0-9]"))) >= 5,
    ]
    for number, is_time in enumerate(wanted):
        run = start([*TORCHRUN, "2", "-m", "embedtrain.mine", *common, "output_dir=killed"], cwd=workshop)
        deadline = time.monotonic() + 120
        while not is_time() and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        everyone = [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]
        its_ranks = [process for process in everyone[:-1] if "embedtrain.mine" in process.cmdline()]
        for process in its_ranks[1:2] if number else everyone:
            os.kill(process.pid, signal.SIGKILL)
        told = run.communicate(timeout=60)[0]
        assert (to / ".mining").is_dir(), "it was over before it could be killed"
    assert "lost contact with another rank while mining train" in told
    assert not (to / "summary.json").exists()
    assert len(list(blocks.glob("*[0-9]"))) >= 5
    other = "output_dir=killed holds the beginning of mined rows of another command: negatives was 4, and is 3 now"
    assert other in mined(*common, "negatives=3", "output_dir=killed", size=2)[1]
    assert mined(*common, "output_dir=killed", size=3)[1] == ""
    assert contents(to) == contents(workshop / "whole")
    assert "nothing was done" in mined(*common, "output_dir=killed")[0]
    assert contents(to) == contents(workshop / "whole")
    told = "output_dir=killed holds mined rows of another command: negatives was 4, and is 3 now"
    assert told in mined(*common, "negatives=3", "output_dir=killed")[1]


def stopped_at_the_end(world: World, folder: Path, arguments: list[str]) -> tuple[str, str]:
    """All is written but the summary, and the rank's process would end here."""
    finish = MiningFolder.finish
    MiningFolder.finish = _stop  # type: ignore[method-assign]
    try:
        return try_mining(world, folder, arguments)
    finally:
        MiningFolder.finish = finish  # type: ignore[method-assign]


def _stop(*_: object) -> None:
    raise DataError("stopped")


def test_the_end_is_written_again_where_it_was_cut_short(ranks, workshop, mined):
    assert mined(*OPTIONS, "output_dir=undisturbed")[1] == ""
    ((_, error),) = ranks(1, stopped_at_the_end, workshop, [*OPTIONS, "output_dir=end"])
    assert error == "stopped"
    kept = shutil.copytree(workshop / "end" / ".mining", workshop / "kept")
    (workshop / "end" / "train.jsonl").write_text("cut sho")
    assert mined(*OPTIONS, "output_dir=end", "chunk_tokens=99", "teacher_batch_size=2", size=2)[1] == ""
    assert contents(workshop / "end") == contents(workshop / "undisturbed")
    shutil.move(kept, workshop / "end" / ".mining")
    assert "nothing was done" in mined(*OPTIONS, "output_dir=end")[0]
    assert contents(workshop / "end") == contents(workshop / "undisturbed")


def test_other_means_are_refused(workshop, mined):
    shutil.copytree(workshop / "model", workshop / "changing")
    write_jsonl(workshop / "changing.jsonl", ROWS[:9])
    options = ["model=changing/guide", "data=[changing.jsonl]", "precision=fp32", "output_dir=once"]
    assert mined(*options)[1] == ""
    write_jsonl(workshop / "changing.jsonl", ROWS[:10])
    assert "output_dir=once holds mined rows of another command: data.changing.rows was" in mined(*options)[1]
    write_jsonl(workshop / "changing.jsonl", ROWS[:9])
    assert "nothing was done" in mined(*options)[0]
    assert "another command: corpus was []" in mined(*options, "corpus=pool.jsonl")[1]
    save_model(workshop / "changing", seed=1)
    assert "another command: model.files.0/model.safetensors was" in mined(*options)[1]


def test_beir_folders_are_mined_out_of_their_corpus(workshop, mined):
    write_beir(workshop / "set", 30)
    (workshop / "set" / "qrels" / "test.tsv").rename(workshop / "set" / "qrels" / "train.tsv")
    with (workshop / "set" / "corpus.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"_id": "alone", "title": "alpha beta", "text": "gamma delta"}))
        file.write("\n" + json.dumps({"_id": "empty", "title": "", "text": " "}) + "\n")
    wide = ["relative_margin=null", "rank_max=99", "negatives=99"]
    assert mined(OPTIONS[0], "data=[set]", "output_dir=of-set", *wide, "precision=fp32", size=2)[1] == ""
    corpus = {row["_id"]: f"{row['title']} {row['text']}".strip() for row in read_jsonl(workshop / "set/corpus.jsonl")}
    rows = read_jsonl(workshop / "of-set" / "set.jsonl")
    assert len(rows) == 30
    assert all("alpha beta gamma delta" in row["neg"] for row in rows)
    for row in rows:
        assert "" not in row["neg"]
        assert [corpus[name] for name in row["pos_id"]] == row["pos"]
        assert [corpus[name] for name in row["neg_id"]] == row["neg"]
        assert not set(row["pos"]) & set(row["neg"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["teacher=nowhere/at/all"], "teacher=nowhere/at/all: there is no such directory"),
        (["teacher=model/guide/../backbone"], "a teacher is a sentence-transformers directory that says how it pools"),
        (["teacher=classes"], "teacher=classes: it is a BertForSequenceClassification of 3 classes"),
        (["model=nowhere/at/all"], "model=nowhere/at/all: there is no such directory"),
        (["max_length=999"], "max_length=999 is more than the 64 tokens that this"),
        (["teacher=cross", "teacher_max_length=999"], "teacher_max_length=999 is more than"),
        (["data=[judged]"], "split=train, only of test; write data=[{path: judged, split: test}]"),
        (["data=[no.jsonl]"], "no.jsonl: no such file or folder"),
        (["data=[bad.jsonl]"], 'bad.jsonl:2: no "pos" in this row'),
        (["corpus=[bad-pool.jsonl]"], 'bad-pool.jsonl:2: a document needs a "text", and this one has: txt'),
        (["corpus=[gone.jsonl]"], "gone.jsonl: no such file or folder"),
        (["output_dir=precious"], "precious/train.jsonl is there already, and was not mined"),
        (["model=broken"], "vectors on rank 0 are not finite"),
    ],
)
def test_a_mistake_is_one_sentence(workshop, mined, arguments, sentence):
    save_cross_encoder(workshop / "classes", num_labels=3)
    save_cross_encoder(workshop / "cross")
    write_jsonl(workshop / "bad.jsonl", [ROWS[0], {"query": "a"}])
    write_jsonl(workshop / "bad-pool.jsonl", [{"text": "a"}, {"txt": "b"}])
    write_jsonl(workshop / "precious" / "train.jsonl", ROWS[:1])
    if not (workshop / "broken").exists():
        _break(shutil.copytree(workshop / "model" / "guide", workshop / "broken"))
    before = contents(workshop / "precious")
    _, error = mined(*OPTIONS, "output_dir=never", *arguments, size=2)
    assert sentence in error
    assert "\n" not in error
    assert "model." not in error
    assert not (workshop / "never" / "summary.json").exists()
    assert contents(workshop / "precious") == before


def test_a_mended_mistake_is_no_other_command(workshop, mined):
    write_jsonl(workshop / "mended.jsonl", [{"text": "a"}, {"txt": "b"}])
    options = [*OPTIONS, "corpus=[mended.jsonl]", "output_dir=mended"]
    assert "mended.jsonl:2" in mined(*options)[1]
    write_jsonl(workshop / "mended.jsonl", [{"text": "a"}, {"text": "b"}])
    assert mined(*options)[1] == ""


def test_rows_that_are_no_negatives_of_each_other_stay_so(workshop, mined):
    write_jsonl(workshop / "classes-no_in_batch_neg" / "train.jsonl", ROWS[:9])
    sources = "train.jsonl,{path: classes-no_in_batch_neg/train.jsonl},{path: pairs.jsonl,in_batch_negatives: false}"
    write_jsonl(workshop / "pairs.jsonl", ROWS[:4])
    _, error = mined(OPTIONS[0], f"data=[{sources}]", "output_dir=three", "precision=fp32")
    assert error == ""
    names = ["pairs-no_in_batch_neg.jsonl", "summary.json", "train-2-no_in_batch_neg.jsonl", "train.jsonl"]
    assert sorted(contents(workshop / "three")) == names


def test_suspects_say_whether_they_were_written(workshop, mined):
    told, error = mined(*OPTIONS, "relative_margin=null", "output_dir=trusting")
    assert error == ""
    assert "score above the positive and are written as negatives" in told
    assert "margin" not in told
    negatives = {row["query"]: row["neg"] for row in read_jsonl(workshop / "trusting" / "train.jsonl")}
    summary = json.loads((workshop / "trusting" / "summary.json").read_text())
    suspects = [*summary["suspected_false_negatives"], *summary["suspected_wrong_labels"]]
    assert [one["written"] for one in suspects] == [one["document"] in negatives[one["query"]] for one in suspects]
    triples = [line for line in told.splitlines() if line.startswith(("  query", "  positive  ", "  candidate  "))]
    triples = [tuple(triples[place : place + 3]) for place in range(0, len(triples), 3)]
    assert len(set(triples)) == len(triples) > 2


def test_rows_without_negatives_are_told_what_to_write(mined):
    told, _ = mined(*OPTIONS, "relative_margin=0.5", "margin_reference=lowest", "output_dir=strict")
    advice = "write margin_reference=highest, rank_max=120 or relative_margin=0.25 or null"
    assert f"many rows got no negative: {advice}" in told
    assert "many rows" not in mined(*OPTIONS, "relative_margin=null", "output_dir=loose")[0]


def _break(directory: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    (path,) = directory.rglob("model.safetensors")
    tensors = load_file(path)
    name = next(name for name in tensors if "word_embeddings" in name)
    tensors[name][5] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})


def test_help_says_what_it_does():
    done = subprocess.run(
        [sys.executable, "-m", "embedtrain.mine", "--help"], capture_output=True, text=True, check=True
    )
    assert "rank_max: 100" in done.stdout
    assert "MineOptions" in done.stdout
