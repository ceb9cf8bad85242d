"""`make demo-reranker`: its commands fit together, and the reranker improves both first stages."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

DEMO = "demo-reranker"


def make(folder: Path, model: Path, *arguments: str) -> str:
    """The output of the target in a copy of the project's data, with the environment of the tests."""
    if not (folder / "recipes").exists():
        shutil.copytree(ROOT / "recipes", folder / "recipes")
    program = folder / "bin" / "embedtrain"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m embedtrain.cli.console "$@"\n')
    program.chmod(0o755)
    options = [f"BIN={program.parent}", f"MINILM={model}", "RANKS=2"]
    command = ["make", "-f", str(ROOT / "Makefile"), "-o", ".venv", *options, *arguments, DEMO]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def test_the_commands_compose_and_fit_together(minilm_dir, tmp_path):
    """What the commands write is where the next one reads it."""
    from embedtrain.commands.evaluate import compose as compose_evaluate
    from embedtrain.commands.mine import compose as compose_mine
    from embedtrain.config.compose import compose_recipes
    from tests.docs.commands import commands

    shell = make(tmp_path, minilm_dir, "-n")
    rank_batch, train, evaluate = (list(command.arguments) for command in commands(shell))
    mined, (recipe,), evaluated = compose_mine(rank_batch), compose_recipes(train), compose_evaluate(evaluate)
    (source,) = recipe.data.train
    assert source.path == f"{mined.output_dir}/{Path(mined.data[0].path).name.removesuffix('.gz')}"
    assert (tmp_path / mined.data[0].path).is_file()
    assert evaluated.reranker is not None
    assert evaluated.reranker.path == f"runs/{recipe.name}/model"
    assert recipe.model.path == mined.model == evaluated.model == str(minilm_dir)


@pytest.mark.slow
def test_the_reranker_improves_both(minilm_dir, tmp_path):
    """BM25 and the embedding model."""
    output = make(tmp_path, minilm_dir)
    rows = map(json.loads, (tmp_path / "runs/quickstart_reranker-evaluation/metrics.jsonl").read_text().splitlines())
    ndcg = {row["set"]: row["ndcg@10"] for row in rows}
    assert ndcg["dev-en+bm25+reranker"] > ndcg["dev-en+bm25"] + 0.01
    assert ndcg["dev-en+reranker"] > ndcg["dev-en"] + 0.01
    gains = re.findall(
        r"^(\S+): the reranker is (?:better|worse|not clearly different), ndcg@10 \S+ \(95% interval",
        output,
        re.MULTILINE,
    )
    assert sorted(gains) == ["dev-en", "dev-en+bm25"]
