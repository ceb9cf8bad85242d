"""`embedtrain.mine` end to end: torchrun, SIGKILL and resume, errors, and training on the mined rows."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from sentence_transformers import CrossEncoder

from embedtrain.commands.mine.stats import print_suspects
from embedtrain.distributed.world import World
from embedtrain.errors import DataError
from embedtrain.mining.folder import MiningFolder
from embedtrain.tracking.pages import Page
from tests.commands import TORCHRUN, call, start
from tests.mine.models import save_cross_encoder
from tests.mine.runs import more_documents, read_jsonl, rows_alone, save_model, try_mining, write_jsonl
from tests.small import write_beir

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
    """Mine on `size` ranks; returns what rank 0 printed, and the error of all ranks, or ""."""

    def run(*arguments: str, size: int = 1) -> tuple[str, str]:
        answers = ranks(size, try_mining, workshop, arguments)
        assert len({bool(error) for _, error in answers}) == 1
        return answers[0]

    return run


@pytest.mark.slow
def test_mined_rows_are_trained_on(workshop):
    printed = call("mine", *OPTIONS, "output_dir=mined", ranks=2, cwd=workshop)
    assert "positive scores" in printed
    rows = read_jsonl(workshop / "mined" / "train.jsonl")
    assert [row["query"] for row in rows] == [row["query"] for row in ROWS]
    summary = json.loads((workshop / "mined" / "summary.json").read_text())
    stats = summary["sources"]["train"]
    assert stats["rows"] == len(ROWS)
    assert stats["negatives"] == sum(len(row["neg"]) for row in rows) > 60
    assert stats["rows_without_negatives"] == sum(not row["neg"] for row in rows)
    assert stats["negative_scores"]["max"] == pytest.approx(max(s for row in rows for s in row["neg_scores"]))
    assert stats["candidates_above_margin"] >= stats["candidates_above_positive"] > 0
    assert all(suspect["score"] > suspect["positive_score"] * 0.999 for suspect in summary["suspected_false_negatives"])
    printed = call(
        "embedtrain", "name=t", "model.path=model/guide", "data.train=[mined/train.jsonl]", "train.steps=2",
        "train.global_batch_size=8", "parallel.precision=fp32", "output_dir=run", cwd=workshop,
    )  # fmt: skip
    assert "0 to 4 negatives" in printed
    assert (workshop / "run" / "model" / "modules.json").is_file()


@pytest.mark.slow
def test_killed_at_any_moment_it_resumes_on_another_number_of_ranks(workshop, mined):
    """SIGKILL to all ranks, then to one, which the other notices; the files are those of an undisturbed run."""
    common = [*OPTIONS, "query_batch_size=3", "chunk_tokens=256"]
    assert mined(*common, "output_dir=whole")[1] == ""
    output_dir = workshop / "killed"
    blocks = output_dir / ".mining" / "blocks"
    conditions = [
        lambda: any((output_dir / ".mining" / "vectors").glob("*/*.safetensors")),
        lambda: len(list(blocks.glob("*[0-9]"))) >= 5,
    ]
    for number, is_time in enumerate(conditions):
        run = start([*TORCHRUN, "2", "-m", "embedtrain", "mine", *common, "output_dir=killed"], cwd=workshop)
        deadline = time.monotonic() + 120
        while not is_time() and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        processes = [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]
        rank_processes = [process for process in processes[:-1] if "mine" in process.cmdline()]
        for process in rank_processes[1:2] if number else processes:
            os.kill(process.pid, signal.SIGKILL)
        printed = run.communicate(timeout=60)[0]
        assert (output_dir / ".mining").is_dir(), "it finished before it could be killed"
    assert re.search(r"(ended|lost contact with .+) while mining train", printed), printed
    assert not (output_dir / "summary.json").exists()
    assert len(list(blocks.glob("*[0-9]"))) >= 5
    changed = re.compile(r"output_dir=killed .*: negatives was 4 and is now 3;")
    assert changed.search(mined(*common, "negatives=3", "output_dir=killed", size=2)[1])
    assert mined(*common, "output_dir=killed", size=3)[1] == ""
    assert contents(output_dir) == contents(workshop / "whole")
    assert "nothing to do" in mined(*common, "output_dir=killed")[0]
    assert contents(output_dir) == contents(workshop / "whole")
    assert changed.search(mined(*common, "negatives=3", "output_dir=killed")[1])


def stop_before_summary(world: World, folder: Path, arguments: list[str]) -> tuple[str, str]:
    """Fail when everything but the summary is written."""
    finish = MiningFolder.finish
    MiningFolder.finish = _stop  # type: ignore[method-assign]
    try:
        return try_mining(world, folder, arguments)
    finally:
        MiningFolder.finish = finish  # type: ignore[method-assign]


def _stop(*_: object) -> None:
    raise DataError("stopped")


def test_interrupted_end_is_written_again(ranks, workshop, mined):
    assert mined(*OPTIONS, "output_dir=undisturbed")[1] == ""
    ((_, error),) = ranks(1, stop_before_summary, workshop, [*OPTIONS, "output_dir=end"])
    assert error == "stopped"
    kept = shutil.copytree(workshop / "end" / ".mining", workshop / "kept")
    (workshop / "end" / "train.jsonl").write_text("cut sho")
    assert mined(*OPTIONS, "output_dir=end", "chunk_tokens=99", size=2)[1] == ""
    assert contents(workshop / "end") == contents(workshop / "undisturbed")
    shutil.move(kept, workshop / "end" / ".mining")
    assert "nothing to do" in mined(*OPTIONS, "output_dir=end")[0]
    assert contents(workshop / "end") == contents(workshop / "undisturbed")


def test_changed_inputs_are_rejected(workshop, mined):
    shutil.copytree(workshop / "model", workshop / "changing")
    write_jsonl(workshop / "changing.jsonl", ROWS[:9])
    options = ["model=changing/guide", "data=[changing.jsonl]", "precision=fp32", "output_dir=once"]
    assert mined(*options)[1] == ""
    write_jsonl(workshop / "changing.jsonl", ROWS[:10])
    assert re.search(r"output_dir=once .*data\.changing\.rows was", mined(*options)[1])
    write_jsonl(workshop / "changing.jsonl", ROWS[:9])
    assert "nothing to do" in mined(*options)[0]
    assert "corpus was []" in mined(*options, "corpus=pool.jsonl")[1]
    save_model(workshop / "changing", seed=1)
    assert "model.files.0/model.safetensors was" in mined(*options)[1]


def test_beir_folders_are_mined_from_their_corpus(workshop, mined):
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
    ("arguments", "words"),
    [
        (["teacher=nowhere/at/all"], r"teacher=nowhere/at/all: "),
        (["teacher=model/guide/../backbone"], r"teacher=model/guide/../backbone: .*sentence-transformers directory"),
        (
            ["teacher=classes"],
            r"teacher=classes: .*BertForSequenceClassification has 3 labels.*teacher_score_labels=\[1,0\]",
        ),
        (["teacher=classes", "teacher_score_labels=[3,0]"], r"teacher_score_labels=\[3,0\]: .*0 to 2"),
        (["model=nowhere/at/all"], r"model=nowhere/at/all: "),
        (["max_length=999"], r"max_length=999.*64"),
        (["teacher=cross", "teacher_max_length=999"], r"teacher_max_length=999.*64"),
        (["data=[judged]"], r"split=train.*write data=\[{path: judged, split: test}\]"),
        (["data=[no.jsonl]"], r"no\.jsonl: "),
        (["data=[bad.jsonl]"], r'bad\.jsonl:2: .*"pos"'),
        (["corpus=[bad-pool.jsonl]"], r'bad-pool\.jsonl:2: .*"text".*txt'),
        (["corpus=[gone.jsonl]"], r"gone\.jsonl: "),
        (["output_dir=precious"], r"precious/train\.jsonl exists"),
        (["model=broken"], r"model=broken: values of 1 weight are not finite"),
    ],
)
def test_errors_are_one_sentence(workshop, mistakes, mined, arguments, words):
    before = contents(workshop / "precious")
    _, error = mined(*OPTIONS, "output_dir=never", *arguments, size=2)
    assert re.search(words, error)
    assert "\n" not in error
    assert "model." not in error
    assert not (workshop / "never" / "summary.json").exists()
    assert contents(workshop / "precious") == before


@pytest.fixture(scope="module")
def mistakes(workshop):
    """Models, rows and directories that cannot be used."""
    save_cross_encoder(workshop / "classes", num_labels=3)
    save_cross_encoder(workshop / "cross")
    write_jsonl(workshop / "bad.jsonl", [ROWS[0], {"query": "a"}])
    write_jsonl(workshop / "bad-pool.jsonl", [{"text": "a"}, {"txt": "b"}])
    write_jsonl(workshop / "precious" / "train.jsonl", ROWS[:1])
    _break(shutil.copytree(workshop / "model" / "guide", workshop / "broken"))


@pytest.mark.usefixtures("mistakes")
def test_the_score_of_a_teacher_with_several_labels_is_a_difference_of_logits(workshop, mined):
    more = ["teacher=classes", "teacher_score_labels=[2,0]", "output_dir=labels", "relative_margin=null"]
    assert mined(*OPTIONS[:-1], *more)[1] == ""
    rows = read_jsonl(workshop / "labels" / "train.jsonl")[:5]
    pairs = [(row["query"], text) for row in rows for text in (*row["pos"], *row["neg"])]
    scores = [score for row in rows for score in (*row["pos_scores"], *row["neg_scores"])]
    teacher = CrossEncoder(str(workshop / "classes"), device="cpu", activation_fn=torch.nn.Identity())
    logits = teacher.predict(pairs, show_progress_bar=False)
    assert scores == pytest.approx((logits[:, 2] - logits[:, 0]).tolist(), abs=1e-4)


def test_corrected_data_is_not_another_command(workshop, mined):
    write_jsonl(workshop / "mended.jsonl", [{"text": "a"}, {"txt": "b"}])
    options = [*OPTIONS, "corpus=[mended.jsonl]", "output_dir=mended"]
    assert "mended.jsonl:2" in mined(*options)[1]
    write_jsonl(workshop / "mended.jsonl", [{"text": "a"}, {"text": "b"}])
    assert mined(*options)[1] == ""


def test_names_keep_that_rows_are_not_in_batch_negatives(workshop, mined):
    write_jsonl(workshop / "classes-no_in_batch_neg" / "train.jsonl", ROWS[:9])
    sources = "train.jsonl,{path: classes-no_in_batch_neg/train.jsonl},{path: pairs.jsonl,in_batch_negatives: false}"
    write_jsonl(workshop / "pairs.jsonl", ROWS[:4])
    _, error = mined(OPTIONS[0], f"data=[{sources}]", "output_dir=three", "precision=fp32")
    assert error == ""
    marked = "classes-no_in_batch_neg-train-no_in_batch_neg.jsonl"  # a name without slashes
    names = [marked, "pairs-no_in_batch_neg.jsonl", "summary.json", "train.jsonl"]
    assert sorted(contents(workshop / "three")) == names


def test_suspects_have_a_field_whether_they_were_written(workshop, mined):
    printed, error = mined(*OPTIONS, "relative_margin=null", "output_dir=trusting")
    assert error == ""
    assert "score above the positive and are written as negatives" in printed
    assert "margin" not in printed
    negatives = {row["query"]: row["neg"] for row in read_jsonl(workshop / "trusting" / "train.jsonl")}
    summary = json.loads((workshop / "trusting" / "summary.json").read_text())
    suspects = [*summary["suspected_false_negatives"], *summary["suspected_wrong_labels"]]
    assert [each["written"] for each in suspects] == [each["document"] in negatives[each["query"]] for each in suspects]
    triples = [line for line in printed.splitlines() if line.startswith(("  query", "  positive  ", "  candidate  "))]
    triples = [tuple(triples[i : i + 3]) for i in range(0, len(triples), 3)]
    assert len(set(triples)) == len(triples) > 2


def test_long_texts_of_suspects_are_shortened_to_a_line(capsys):
    suspect = {"query": "q " * 300, "positive": "p\n" * 300, "document": "d", "positive_score": 0.5, "score": 0.75}
    print_suspects(Page(), "suspects", [suspect])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line] == ["suspects", "query", "positive", "candidate"]
    assert max(map(len, lines)) < 130


def test_advice_for_rows_without_negatives(mined):
    printed, _ = mined(*OPTIONS, "relative_margin=0.5", "margin_reference=lowest", "output_dir=strict")
    advice = "write margin_reference=highest, rank_max=120 or relative_margin=0.25 or null"
    assert f"many rows got no negative: {advice}" in printed
    assert "many rows" not in mined(*OPTIONS, "relative_margin=null", "output_dir=loose")[0]
    everything = mined(*OPTIONS, "relative_margin=0.5", "rank_max=1000", "output_dir=all", "margin_reference=lowest")[0]
    assert "write margin_reference=highest or relative_margin=0.25 or null" in everything


def _break(directory: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    (path,) = directory.rglob("model.safetensors")
    tensors = load_file(path)
    name = next(name for name in tensors if "word_embeddings" in name)
    tensors[name][5] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})


def test_help():
    result = subprocess.run(
        [sys.executable, "-m", "embedtrain", "mine", "--help"], capture_output=True, text=True, check=True
    )
    assert "rank_max=100" in result.stdout
    assert "model=... " in result.stdout
