"""recipes/pipelines/synthetic: from documents to an exported model, every stage as it is, with a small model."""

import contextlib
import json
import re

import pytest
from sentence_transformers import SentenceTransformer

from embedtrain.distributed.world import World
from embedtrain.pipeline.compose import compose_pipeline
from embedtrain.pipeline.run import run_pipeline
from tests.small import save_guide, small_model, text, write_beir
from tests.synthesize.scripted import read_rows, write_corpus
from tests.synthesize.stub_server import Stub

STAGES = ["written", "kept", "mined", "tuned", "measured", "exported"]
SIZES = [
    "stages.written.checks.languages=false", "stages.written.checks.near_duplicate=null",
    "stages.written.checks.max_copied_words=null", "stages.kept.keep_rank=20", "stages.mined.relative_margin=null",
    "stages.mined.negatives=2", "stages.tuned.data.train=[{path: '${out:mined.data}', negatives: 1}]",
    "stages.tuned.train.global_batch_size=8", "stages.tuned.train.chunk_tokens=400", "stages.tuned.checkpoint.every=2",
    "stages.tuned.parallel.precision=fp32",
]  # fmt: skip


def answer(body) -> str:
    """Queries of the first words of the document."""
    prompt = body["messages"][-1]["content"]
    words = re.findall(r"Document:\n(.*)", prompt)[0].split()
    count = body["response_format"]["json_schema"]["schema"]["properties"]["queries"]["minItems"]
    return json.dumps({"queries": [" ".join(words[number : number + 3]) for number in range(count)]})


def run_recipe(world: World, folder, arguments) -> None:
    with contextlib.chdir(folder):
        run_pipeline(compose_pipeline(arguments))


@pytest.mark.slow
def test_from_documents_to_an_export(ranks, tmp_path):
    write_corpus(tmp_path / "documents.jsonl", [text(number, 8) for number in range(20)])
    write_beir(tmp_path / "dev", 6)
    model = save_guide(small_model("xlm-roberta"), tmp_path / "model")
    with Stub(answer) as stub:
        writer = [f"stages.written.writer.{name}" for name in ("backend=api", f"url={stub.url}", "model=stub")]
        arguments = ["recipe=pipelines/synthetic", f"shared.model={model}", *writer, *SIZES]
        ranks(2, run_recipe, tmp_path, arguments)
        num_requests = len(stub.bodies)
        root = tmp_path / "runs/synthetic"
        written = {path: path.stat().st_mtime_ns for path in root.glob("stages/*/*") if path.is_file()}
        ranks(1, run_recipe, tmp_path, arguments)
        assert len(stub.bodies) == num_requests
    assert written == {path: path.stat().st_mtime_ns for path in written}, "a stage that had ended ran again"
    assert [stage["stage"] for stage in json.loads((root / "lineage.json").read_text())["stages"]] == STAGES
    (mined,) = (root / "stages/mined").glob("*.jsonl")
    rows = read_rows(mined)
    assert rows
    assert all(row["synthetic"] and row["synthetic_model"] == "stub" and row["neg"] for row in rows)
    exported = root / "stages/exported/model"
    assert f"{len(rows)} queries of the training data: {len(rows)} by `stub`" in (exported / "README.md").read_text()
    assert SentenceTransformer(str(exported), device="cpu").encode(["alpha"]).shape == (1, 32)
