"""The pipelines of recipes/pipelines/ run from their first stage to their export, with small random models."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

from embedtrain.commands.plan import compose_pipeline_plan, plan_pipeline
from embedtrain.config.command_line import to_overrides
from embedtrain.distributed.world import World
from embedtrain.pipeline.compose import compose_pipeline
from embedtrain.pipeline.run import run_pipeline
from tests.conftest import ROOT
from tests.mine.models import save_cross_encoder
from tests.small import save_guide, save_small, small_model, text, write_beir

PUBLISHED = {
    "arctic_embed_2": {"FacebookAI/xlm-roberta-base": "xlm-roberta", "intfloat/multilingual-e5-base": "xlm-roberta"},
    "colbert_zero": {"answerdotai/ModernBERT-base": "modernbert"},
    "denseon": {
        "answerdotai/ModernBERT-base": "modernbert",
        "Alibaba-NLP/gte-modernbert-base": "modernbert",
        "Alibaba-NLP/gte-reranker-modernbert-base": "cross-encoder",
    },
    "embeddinggemma": {"google/gemma-3-270m": "gemma3_text", "Qwen/Qwen3-Embedding-4B": "qwen3"},
    "f2llm_v2": {"Qwen/Qwen3-4B": "qwen3", "Qwen/Qwen3-0.6B": "qwen3"},
    "jina_embeddings_v5": {"EuroBERT/EuroBERT-210m": "eurobert", "Qwen/Qwen3-Embedding-4B": "qwen3"},
    "kalm_v2": {"Qwen/Qwen2-0.5B": "qwen2", "Qwen/Qwen3-Embedding-8B": "qwen3"},
    "lateon": {"answerdotai/ModernBERT-base": "modernbert", "Alibaba-NLP/gte-modernbert-base": "modernbert"},
    "llama_embed_nemotron": {"meta-llama/Llama-3.1-8B": "llama"},
    "mdenseon": {"jhu-clsp/mmBERT-base": "modernbert", "Snowflake/snowflake-arctic-embed-l-v2.0": "xlm-roberta"},
    "mlateon": {"jhu-clsp/mmBERT-base": "modernbert", "Snowflake/snowflake-arctic-embed-l-v2.0": "xlm-roberta"},
    "nemotron_3_embed_1b": {"meta-llama/Llama-3.2-1B": "llama", "nvidia/llama-embed-nemotron-8b": "llama"},
    "pplx_embed": {"Qwen/Qwen3-0.6B-Base": "qwen3"},
    "qwen3_embedding": {"Qwen/Qwen3-0.6B-Base": "qwen3"},
}
# Directories of sentence-transformers; the others have no pooling.
WITH_POOLING = (
    *("intfloat/multilingual-e5-base", "Qwen/Qwen3-Embedding-4B", "Qwen/Qwen3-Embedding-8B"),
    *("Alibaba-NLP/gte-modernbert-base", "nvidia/llama-embed-nemotron-8b"),
    "Snowflake/snowflake-arctic-embed-l-v2.0",
)
DATA = {
    "arctic_embed_2": ("weak", "labelled"),
    "colbert_zero": ("weak", "labelled", "scored"),
    "denseon": ("weak", "labelled"),
    "embeddinggemma": ("weak", "a", "b", "c"),
    "f2llm_v2": ("general", "retrieval", "clustering", "classification"),
    "jina_embeddings_v5": ("general", "long", "retrieval", "similarity", "clustering", "classification"),
    "kalm_v2": ("weak", "labelled"),
    "lateon": ("weak", "labelled"),
    "llama_embed_nemotron": (".",),
    "mdenseon": ("weak", "labelled"),
    "mlateon": ("weak", "labelled"),
    "nemotron_3_embed_1b": ("train",),
    "pplx_embed": ("pairs", "documents", "triplets"),
    "qwen3_embedding": ("synthetic", "labelled"),
}
LATE_INTERACTION = ("colbert_zero", "lateon", "mlateon")
TRAINING = {
    "train.epochs": None, "train.steps": 4, "train.global_batch_size": 8, "train.chunk_tokens": 400, "optim.warmup": 1,
    "checkpoint.every": 1,
}  # fmt: skip
# Sizes besides those of all trainings.
SIZES: dict[str, dict[str, object]] = {
    "arctic_embed_2": {
        "shared.dims": [32, 16], "evaluation.truncate_dims": [16], "stages.weak.optim.decay": 0.5,
        "stages.tuned.optim.decay": 1, "stages.weak.model.max_length": 48, "stages.tuned.model.max_length": 48,
    },
    "colbert_zero": {},
    "denseon": {
        "shared.where": "rank <= 20 and score > -10", "stages.mined.rank_max": 20, "stages.mined.negatives": 10,
        "stages.annotated.pool": 20,
    },
    "embeddinggemma": {
        "shared.dims": [32, 16], "stages.teacher.dims": 32, "stages.weak.model.heads": [{"out": 64}, {"out": 32}],
    },
    "f2llm_v2": {
        "shared.loss.matryoshka.dims": [32, 16], "shared.small_dims": [32, 16], "stages.teacher.dims": 32,
        "stages.pruned.keep": 1,
    },
    "jina_embeddings_v5": {"shared.dims": [32, 16], "shared.lora": {"rank": 2, "alpha": 2}},
    "kalm_v2": {"shared.dims": [32, 16, 8], "shared.weights": [1, 0.3, 0.2]},
    "lateon": {
        "stages.mined.rank_max": 20, "stages.mined.negatives": 10, "stages.mined.relative_margin": None,
        "stages.weak.optim.schedule_steps": 5,
    },
    "llama_embed_nemotron": {"stages.member.repeat": 2},
    "mdenseon": {
        "stages.mined.rank_max": 20,
        "stages.mined.relative_margin": None,  # random models score all texts alike
        "stages.tuned.loss.losses": [
            {"name": "infonce", "matryoshka": {"dims": [32, 16]}},
            {"name": "distill_scores", "teacher_temperature": 0.02},
        ],
    },
    "mlateon": {
        "stages.mined.rank_max": 20, "stages.mined.relative_margin": None, "stages.weak.optim.schedule_steps": 5,
    },
    "nemotron_3_embed_1b": {},
    "pplx_embed": {},
    "qwen3_embedding": {"stages.good.min_score": 0},
}  # fmt: skip


def write_inputs(name: str, folder: Path) -> None:
    """The models and the data that a recipe names, below the folder."""
    for path, architecture in PUBLISHED[name].items():
        if architecture == "cross-encoder":
            save_cross_encoder(folder / path)
            continue
        model = small_model(architecture)
        model.config["max_position_embeddings"] = 8194
        if path in WITH_POOLING:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            save_guide(model, folder / "saved" / path).rename(folder / path)
        else:
            save_small(model, folder / path)
    for source in DATA[name]:
        (folder / "data" / source).mkdir(parents=True, exist_ok=True)
        for part in range(2):
            lines = []
            for number in range(part * 12, part * 12 + 12):
                query = text(number, 3)
                negatives = [text(500 + 30 * number + i, 5) for i in range(24)]
                row: dict[str, Any] = {"query": query, "pos": [f"{query} {text(number + 50, 2)}"], "neg": negatives}
                if source == "scored":
                    row |= {"pos_scores": [1.0], "neg_scores": [i / 48 for i in range(24)]}
                if source == "documents":
                    row = {"query": query, "pos": [{"chunks": [text(number, 5), *row["pos"]], "chunk": 1}]}
                lines.append(json.dumps(row))
            (folder / "data" / source / f"rows-{part}.jsonl").write_text("\n".join(lines))
    write_beir(folder / "data" / "dev", 12)


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "recipes" / "pipelines" / f"{name}.yaml").read_text())


def shrunk(name: str) -> list[str]:
    """Overrides of sizes and steps."""
    overrides = dict(SIZES[name])
    for stage, options in read(name)["stages"].items():
        if options["do"] == "train":
            overrides |= {f"stages.{stage}.{option}": value for option, value in TRAINING.items()}
    return to_overrides(overrides)


def run_recipe(world: World, folder: Path, arguments: list[str]) -> None:
    with contextlib.chdir(folder):
        pipeline = compose_pipeline(arguments)
        assert pipeline is not None
        run_pipeline(pipeline)


# Filters and mining; the others are planned by the slow tests.
_ALWAYS_PLANNED = ("arctic_embed_2",)


def names() -> list[str]:
    # The last two in tests/pages/test_pipeline.py and tests/synthesize/test_pipeline.py.
    tested_elsewhere = ("quickstart", "visual_documents", "synthetic")
    paths = (ROOT / "recipes" / "pipelines").glob("*.yaml")
    return sorted(path.stem for path in paths if path.stem not in tested_elsewhere)


def test_every_published_pipeline_has_a_run():
    assert names() == sorted(PUBLISHED)


@pytest.mark.parametrize(
    "name",
    [name if name in _ALWAYS_PLANNED else pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED],
)
def test_a_published_pipeline_is_planned(name, tmp_path, monkeypatch):
    """Without its evaluations, which take as long to compose as the trainings."""
    write_inputs(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = [f"recipe=pipelines/{name}", *to_overrides(SIZES[name] | {"evaluation.after": []}), "gpus=8"]
    planned = compose_pipeline_plan(arguments)
    assert planned is not None
    trainings = [stage.training for stage in plan_pipeline(*planned) if stage.stage.command.name == "train"]
    assert len(trainings) >= (1 if name == "nemotron_3_embed_1b" else 2)
    assert all(training is not None and training.best.fits for training in trainings)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_pipeline_runs_to_its_end(ranks, name, tmp_path):
    """On two ranks, as it is but for the sizes of models and batches and the number of steps."""
    write_inputs(name, tmp_path)
    ranks(2, run_recipe, tmp_path, [f"recipe=pipelines/{name}", *shrunk(name)], timeout=500)
    root = tmp_path / "runs" / name
    ended = [stage["stage"] for stage in json.loads((root / "lineage.json").read_text())["stages"]]
    assert ended == list(yaml.safe_load((root / "pipeline.yaml").read_text())["stages"])
    last = [stage for stage in ended if (root / "stages" / stage / "model").is_dir()][-1]
    model, texts = str(root / "stages" / last / "model"), ["alpha beta", "gamma"]
    if name in LATE_INTERACTION:
        vectors = np.concatenate(MultiVectorEncoder(model, device="cpu").encode_document(texts))
    else:
        vectors = SentenceTransformer(model, device="cpu").encode(texts)
    assert np.isfinite(vectors).all()
    if name != "nemotron_3_embed_1b":  # whose vectors are learned without normalisation
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
