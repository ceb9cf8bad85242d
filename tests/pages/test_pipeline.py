"""recipes/pipelines/visual_documents: from a folder of PDF files to an exported model, every stage as it is."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from embedtrain.config.recipe import Precision
from embedtrain.data.images.files import PICTURES, header_of
from embedtrain.data.types import TextRole
from embedtrain.distributed.world import World
from embedtrain.inference.encode import SentenceEncoder
from embedtrain.inference.loading.command_model import load_encoder_model
from tests.late_vision_models import ENGINE, late_oracle, save_late_model
from tests.pages.pdfs import write_pdf
from tests.small import model_options, text
from tests.vision_language.models import save_vision_model

STAGES = ["pages", "parts", "mined", "tuned", "pooled", "exported"]
SIZES = [
    "stages.parts.dev=4", "stages.mined.relative_margin=null", "stages.mined.negatives=2",
    "stages.tuned.train.epochs=1", "stages.tuned.train.global_batch_size=8", "stages.tuned.train.chunk_tokens=400",
    "stages.tuned.checkpoint.every=2", "stages.tuned.parallel.precision=fp32",
]  # fmt: skip
# A model of one vector in the place of late interaction.
DENSE = [
    "stages.tuned.model.kind=dense", "stages.tuned.model.pooling=last", "stages.tuned.model.similarity=null",
    "stages.pooled.index.token_pooling=1",
]  # fmt: skip


def write_inputs(folder: Path) -> None:
    """Eight files of four pages in two folders, one that is no PDF file, and questions about half of the pages."""
    rows = []
    for number in range(8):
        name = f"{2024 + number % 2}/report-{number}.pdf"
        pages = [text(100 * number + page, 5) for page in range(4)]
        write_pdf(folder / "reports" / name, *pages, size=(300, 200))
        rows += [
            {"query": " ".join(pages[page].split()[:3]), "positive_document_ids": [f"{name}#{page + 1}"]}
            for page in (0, 2)
        ]
    (folder / "reports/broken.pdf").write_bytes(b"%PDF-1.4\nnothing else")
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_recipe(folder: Path, ranks: int, *more: str) -> str:
    """What the command prints: `pages` starts processes, which those of `ranks` may not."""
    arguments = ["recipe=pipelines/visual_documents", "shared.pdfs=reports", "shared.questions=questions.jsonl"]
    command = [sys.executable, "-m", "embedtrain", "train", "--nproc-per-node", str(ranks), *arguments, *SIZES, *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def encoded_page(world: World, directory: Path, page: Path) -> torch.Tensor:
    model = load_encoder_model(model_options("late_interaction", path=str(directory)), Precision.fp32, world)
    data = page.read_bytes()
    PICTURES.add_bytes(header_of(data), data)
    encoder = SentenceEncoder.from_model(model, world, chunk_tokens=400)
    return encoder.encode([str(header_of(data).picture)], role=TextRole.document).values


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def source_of(pages: Path) -> dict[bytes, str]:
    """The PDF file of each page, by the bytes of its picture."""
    return {(pages / row["image"]).read_bytes(): row["pdf"] for row in read(pages / "pages.jsonl")}


def require_result(root: Path) -> None:
    """Every stage has ended; all pages are searched, and no negative is of a file that has an answer."""
    stages, ended = root / "stages", json.loads((root / "lineage.json").read_text())["stages"]
    assert (
        [stage["stage"] for stage in ended]
        == list(yaml.safe_load((root / "pipeline.yaml").read_text())["stages"])
        == STAGES
    )
    assert len(read(stages / "pages/pages/pages.jsonl")) == len(read(stages / "parts/dev/corpus.jsonl")) == 32
    assert "broken.pdf" in (stages / "pages/pages/skipped.txt").read_text()
    source = source_of(stages / "pages/pages")
    rows = read(stages / "mined/parts.jsonl")
    assert len(rows) == 12
    for row in rows:
        answers, others = (
            [source[(stages / "mined" / item["image"]).read_bytes()] for item in row[key]] for key in ("pos", "neg")
        )
        assert len(others) == 2
        assert not set(answers) & set(others)
    steps = {row["step"] for row in read(stages / "tuned/metrics.jsonl") if row.get("set") == "dev"}
    assert 0 in steps, "the model that is trained further is measured as well"
    assert len(steps) > 1


@pytest.mark.slow
def test_late_interaction(ranks, tmp_path):
    """The export is opened by the class that it is of, with the vectors that are searched; the same command resumes."""
    write_inputs(tmp_path)
    model = save_late_model(ENGINE, "qwen2_vl", tmp_path / "models")
    more = [f"shared.model={model}", "stages.tuned.model.lora.rank=2"]
    run_recipe(tmp_path, 2, *more)
    root = tmp_path / "runs/visual_documents"
    require_result(root)
    exported = root / "stages/exported/model"
    page = root / "stages/pages/pages/images/2024/report-0.pdf/0001.png"
    (ours,) = ranks(1, encoded_page, exported, page)
    with Image.open(page) as image:
        theirs = late_oracle(ENGINE, exported).vectors("document", image.convert("RGB"))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    written = {path: path.stat().st_mtime_ns for path in root.glob("stages/*/*") if path.is_file()}
    run_recipe(tmp_path, 1, *more)
    assert written == {path: path.stat().st_mtime_ns for path in written}, "a stage that had ended ran again"


@pytest.mark.slow
def test_one_vector(tmp_path):
    write_inputs(tmp_path)
    more = [f"shared.model={save_vision_model('qwen3_vl', tmp_path / 'models')}", "stages.tuned.model.lora.rank=2"]
    run_recipe(tmp_path, 2, *more, *DENSE, "stages.mined.pooling=last")
    require_result(tmp_path / "runs/visual_documents")
