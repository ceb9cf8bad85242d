"""`python -m embedtrain pages`: what is written, what cannot be rendered, and what a killed run has left."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from embedtrain.commands.pages.rendering import Document, Workers
from embedtrain.config.columns import DataPath
from embedtrain.data.sources.part_reader import PartPiece
from embedtrain.data.sources.parts import SourcePart
from embedtrain.data.sources.reader import DocumentReader
from embedtrain.mining.pool import corpus_parts
from tests.commands import call
from tests.pages.faults import serve_faults
from tests.pages.pdfs import pdf, write_pdf


def pages(folder: Path, output: Path, *options: str, code: int = 0) -> str:
    return call("pages", f"pdfs={folder}", f"output_dir={output}", "workers=1", *options, code=code)


def rows_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "pages.jsonl").read_text(encoding="utf-8").splitlines()]


def sizes_of(output: Path) -> dict[str, tuple[int, int]]:
    return {row["_id"]: Image.open(output / row["image"]).size for row in rows_of(output)}


def files_of(output: Path) -> dict[str, bytes]:
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents as users have them: good ones, and each way of being bad."""
    folder = tmp_path_factory.mktemp("pdfs")
    write_pdf(folder / "a.pdf", "first", "second")
    write_pdf(folder / "reports" / "turned.PDF", "turned", rotate=90)
    write_pdf(folder / "owner.pdf", "printing is not allowed", password="")
    write_pdf(folder / "huge.pdf", "poster", size=(14_400, 14_400))
    write_pdf(folder / "name with a\nnewline ü.pdf", "text")
    write_pdf(folder / "damaged page.pdf", "one", "two", "three", broken_pages=[1])
    write_pdf(folder / "secret.pdf", "secret", password="word")
    write_pdf(folder / "no pages.pdf")
    (folder / "empty.pdf").write_bytes(b"")
    (folder / "cut off.pdf").write_bytes(pdf(["text"])[:60])
    (folder / "notes.txt").write_text("no PDF file")
    return folder


def test_pages_and_what_cannot_be_rendered(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "pages"
    error = pages(folder, output, code=1)
    assert "cut off.pdf: is not a PDF file that can be read" in error
    assert "(and 3 more); on_error=skip" in error
    printed = pages(folder, output, "on_error=skip")
    assert "5 documents or pages" in printed
    assert sizes_of(output) == {
        "a.pdf#1": (400, 200),
        "a.pdf#2": (400, 200),
        "damaged page.pdf#1": (400, 200),
        "damaged page.pdf#3": (400, 200),
        "huge.pdf#1": (2000, 2000),
        "name with a\nnewline ü.pdf#1": (400, 200),
        "owner.pdf#1": (400, 200),
        "reports/turned.PDF#1": (200, 400),
    }
    assert rows_of(output)[-1] == {
        "_id": "reports/turned.PDF#1",
        "image": "images/reports/turned.PDF/0001.png",
        "pdf": "reports/turned.PDF",
        "page": 1,
    }
    skipped = (output / "skipped.txt").read_text().splitlines()
    assert [line.removeprefix(f"{folder}/").split(":")[0] for line in skipped] == [
        *("cut off.pdf", "empty.pdf", "no pages.pdf", "secret.pdf", "damaged page.pdf, page 2"),
    ]
    assert [line for line in skipped if "encrypted" in line] == [line for line in skipped if "secret.pdf" in line]
    # Ink, and more of it where more is written: an encrypted text is readable, a turned one is not lost.
    for row in rows_of(output):
        dark = np.asarray(Image.open(output / row["image"]).convert("L")) < 100
        assert dark.any() or row["pdf"] == "huge.pdf", row["_id"]  # on a poster, 12 points are less than a pixel

    # Nothing is rendered twice; a file that has changed is, and its bad page is good now.
    before = {path: path.stat().st_mtime_ns for path in (output / "images").rglob("*.png")}
    write_pdf(folder / "damaged page.pdf", "one", "two")
    assert "8, of which 2 were rendered now" in " ".join(pages(folder, output, "on_error=skip").split())
    after = {path: path.stat().st_mtime_ns for path in (output / "images").rglob("*.png")}
    changed = {path.parent.name for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    assert changed == {"damaged page.pdf"}
    assert "dpi=144; write another directory" in pages(folder, output, "on_error=skip", "dpi=72", code=1)
    settings = output / ".pages" / "settings.json"
    settings.write_text(settings.read_text()[:20])
    assert "settings.json: is damaged" in pages(folder, output, "on_error=skip", code=1)


def test_a_run_that_was_killed_at_its_start_is_resumed(tmp_path: Path) -> None:
    write_pdf(tmp_path / "in" / "a.pdf", "text")
    (tmp_path / "pages" / ".pages").mkdir(parents=True)
    pages(tmp_path / "in", tmp_path / "pages")
    assert len(rows_of(tmp_path / "pages")) == 1


def test_the_rows_are_a_corpus_of_pictures(tmp_path: Path) -> None:
    write_pdf(tmp_path / "in" / "a.pdf", "first", "second")
    output = tmp_path / "pages"
    pages(tmp_path / "in", output, "dpi=72")
    (part,) = corpus_parts([DataPath(path=str(output / "pages.jsonl"))])
    reader = DocumentReader([part], part.name, group_column="pdf")
    documents = [document for _, document in reader.documents(PartPiece(part))]
    assert isinstance(part, SourcePart)
    assert [(document.id, document.group, document.text) for document in documents] == [  # type: ignore[union-attr]
        ("a.pdf#1", "a.pdf", ""),
        ("a.pdf#2", "a.pdf", ""),
    ]
    assert len({document.pictures for document in documents}) == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["pdfs={}/nothing"], "pdfs=.*/nothing: no such file or folder"),
        (["pdfs={}"], "pdfs=.*: holds no files that end with .pdf"),
        (["pdfs={}/a.pdf", "dpi=9"], "dpi=9: .*10 to 1200"),
        (["pdfs={}/a.pdf", "output_dir={}"], "output_dir=.*: holds other files; write a new directory"),
        (["output_dir={}/x"], "pdfs= ?is missing|pdfs=: is missing|pdfs.*is missing"),
    ],
)
def test_errors_before_a_page_is_rendered(options: list[str], message: str, tmp_path: Path) -> None:
    if not options[0].endswith("={}"):
        write_pdf(tmp_path / "a.pdf", "text")
    arguments = [option.format(tmp_path) for option in options]
    if not any(option.startswith("output_dir") for option in options):
        arguments.append(f"output_dir={tmp_path.parent / (tmp_path.name + '-out')}")
    assert re.search(message, call("pages", *arguments, code=1))


def test_a_page_that_crashes_or_hangs_is_named_and_the_others_are_rendered() -> None:
    names = ["good", "crashes", "good", "hangs", "good", "crashes", "good"]
    tasks = [("render", Document(name, Path(name)), number, ()) for number, name in enumerate(names)]
    with Workers(2, serve_faults, timeout=0.5) as workers:
        answers = {number: answer for _, number, answer in workers.run(iter(tasks))}
    crash = "crashes the process that renders it"
    expected = {"crashes": crash, "hangs": "is not rendered after 0.5 s"}
    assert answers == {number: expected.get(name, ("render", number)) for number, name in enumerate(names)}
    full = [("render", Document("full", Path("full")), 1, ())]
    with pytest.raises(OSError, match="No space left"), Workers(1, serve_faults) as workers:
        list(workers.run(iter(full)))


def run_killed(arguments: list[str], ready: Callable[[], bool]) -> None:
    """Start the command, and kill it as soon as it is `ready`."""
    command = [sys.executable, "-m", "embedtrain", "pages", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not ready() and process.poll() is None:
            time.sleep(0.005)
        assert process.poll() is None, "the command has ended before it was killed"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_hundred_documents_killed_and_resumed(tmp_path: Path) -> None:
    """The result is that of a run that was not killed, byte for byte, and pages on disk are kept."""
    folder, output, whole = tmp_path / "in", tmp_path / "pages", tmp_path / "whole"
    for number in range(98):
        texts = [f"page {page} of {number}" for page in range(1 + number % 5)]
        write_pdf(folder / f"{number:03}.pdf", *texts, size=(200 + number, 300), rotate=90 * (number % 4))
    write_pdf(folder / "long.pdf", *[f"page {number}" for number in range(1000)])
    write_pdf(folder / "secret.pdf", "secret", password="word")
    arguments = [f"pdfs={folder}", f"output_dir={output}", "on_error=skip", "workers=2"]

    def rendered() -> list[Path]:
        return list((output / "images").rglob("[0-9]*.png"))

    for num_pages in (3, 400, 900):
        run_killed(arguments, lambda num_pages=num_pages: len(rendered()) >= num_pages)  # type: ignore[misc]
    kept = {path: path.stat().st_mtime_ns for path in rendered()}
    call("pages", *arguments)
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in kept.items())
    call("pages", f"pdfs={folder}", f"output_dir={whole}", "on_error=skip", "workers=2")
    state = str(Path(".pages") / "documents.jsonl")
    resumed, plain = files_of(output), files_of(whole)
    assert set(resumed) == set(plain)
    assert [name for name in plain if resumed[name] != plain[name] and name != state] == []
    assert len(rows_of(output)) == sum(1 + number % 5 for number in range(98)) + 1000
