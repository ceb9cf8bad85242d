"""Faults in runs whose rows have pictures: killed at any step, and files that are no longer what was prepared."""

import json
import os
import shutil
import signal

import pytest

from tests.faults.hooks import SignalWhen
from tests.faults.runs import finish, rows, start
from tests.image_text.models import row_value
from tests.small import text
from tests.vision_language.models import save_vision_model

OPTIONS = (
    "model.path=qwen3_vl", "model.pooling=last", "data.train=[pages.jsonl]", "evaluation.sets=[pages-dev.jsonl]",
    "checkpoint.best_metric=null", "evaluation.every=6", "data.cache_dir=pages-cache", "export.check=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def pages(folder):
    """Queries of texts; documents of a picture, a text, or both. A batch of eight may have any of them."""

    def item(number):
        words = text(number, 2 + number % 7)
        return (words, row_value(folder, number), row_value(folder, number) | {"text": words})[number % 3]

    save_vision_model("qwen3_vl", folder)
    for name, numbers in (("pages.jsonl", range(30)), ("pages-dev.jsonl", range(30, 40))):
        lines = [{"query": text(i, 2 + i % 5), "pos": [item(i)]} for i in numbers]
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    finish(folder, "pages", *OPTIONS)
    return folder


def numbers(folder, out):
    """Loss and figures of each step."""
    return [
        [row["step"], *(row[key] for key in sorted(row) if key == "loss" or "@" in key)] for row in rows(folder / out)
    ]


@pytest.mark.slow
def test_killed_at_any_step_and_resumed_on_another_number_of_ranks(pages):
    expected = numbers(pages, "pages")
    assert len(expected) == 12 + 2
    for step, size in ((2, 3), (5, 1), (10, 3)):
        out = f"pages-killed-{step}"
        killed = start(pages, out, *OPTIONS, hook=SignalWhen(1, "training", step))
        assert killed.wait() == [1, -signal.SIGKILL], killed.text
        assert len(killed.errors) == 1
        finish(pages, out, *OPTIONS, size=size)
        found = numbers(pages, out)
        assert [row[0] for row in found] == [row[0] for row in expected]
        for row, other in zip(found, expected, strict=True):
            assert row == pytest.approx(other, rel=1e-4)


@pytest.mark.slow
def test_a_picture_that_is_damaged_after_it_was_prepared(pages):
    """Only the rank that decodes it can know. All ranks end with one sentence, and the file can be put back."""
    out = pages / "pages-damaged"
    shutil.copytree(pages / "pages", out)
    shutil.rmtree(out / "model")
    for checkpoint in (out / "checkpoints").iterdir():
        if checkpoint.name != "step-00000009":
            shutil.rmtree(checkpoint)
    files = [pages / f"picture_{number}.png" for number in range(30) if number % 3]
    intact = {file: (file.read_bytes(), file.stat()) for file in files}
    for file, (content, status) in intact.items():
        file.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    run = start(pages, out.name, *OPTIONS)
    assert run.wait() == [1, 1], run.text
    (error,) = run.errors
    assert "picture_" in error and "it has changed since the data was prepared" in error
    for file, (content, _) in intact.items():
        file.write_bytes(content)
    finish(pages, out.name, *OPTIONS)
    assert numbers(pages, out.name) == numbers(pages, "pages")
