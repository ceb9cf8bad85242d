"""The model card: metadata that the Hub accepts, results with what was measured, nothing of the author's machine."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard

from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.config.compose import compose_recipes, to_plain
from embedtrain.formats.model_card import model_card
from embedtrain.tracking.metrics import QueryMetrics, query_metrics_path, write_query_metrics

ROWS = [
    {"step": 0, "set": "dev", "dataset": {"kind": "retrieval", "queries": 300, "documents": 4800, "subset": True},
     "ndcg@10": 0.25, "mrr@10": 0.2},
    {"step": 8, "set": "dev", "dataset": {"kind": "retrieval", "queries": 300, "documents": 4800, "subset": True},
     "ndcg@10": 0.75, "mrr@10": 0.7},
    {"step": 8, "set": "sts", "dataset": {"kind": "sts", "pairs": 100, "subset": False}, "spearman": 0.5},
]  # fmt: skip


def card(tmp_path: Path, *options: str, rows=ROWS, **arguments) -> str:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "secret").mkdir(exist_ok=True)
    settings = RunDirectory(tmp_path).architecture / "config_sentence_transformers.json"
    if not settings.exists():
        settings.parent.mkdir()
        settings.write_text('{"similarity_fn_name": "dot"}')
    (recipe,) = compose_recipes(
        [
            "name=mine", "model.path=BAAI/bge-m3", "data.train=[owner/rows, /home/me/secret/my.jsonl, data/*.parquet]",
            f"evaluation.sets=[{{path: mteb/nfcorpus, name: dev, subset: 300}}, {tmp_path}/secret/sts.tsv]",
            "train.steps=8", f"output_dir={tmp_path}", "tracking.wandb_init={entity: company}", *options,
        ]
    )  # fmt: skip
    prompts = {"query": "query|: \n", "document": ""}
    return model_card(
        to_plain(recipe), tmp_path, step=8, dimension=4, max_length=16, prompts=prompts, **arguments
    )  # fmt: skip


def test_the_metadata_are_those_of_the_hub(tmp_path):
    text = card(tmp_path, "export.license=apache-2.0", "export.language=[en,zh]", name="me/mine")
    data = ModelCard(text).data
    assert (data.base_model, data.license, data.language) == ("BAAI/bge-m3", "apache-2.0", ["en", "zh"])
    assert data.datasets == ["owner/rows"], "files are no data sets of the Hub"
    results = {
        (r.dataset_name, r.metric_type): (r.task_type, r.dataset_type, r.metric_value) for r in data.eval_results
    }
    assert results == {
        ("dev (subset)", "ndcg@10"): ("information-retrieval", "mteb/nfcorpus", 0.75),
        ("dev (subset)", "mrr@10"): ("information-retrieval", "mteb/nfcorpus", 0.7),
        ("sts", "spearman"): ("semantic-similarity", "sts", 0.5),
    }
    assert 'SentenceTransformer("me/mine")' in text
    assert "The model compares vectors by inner product (`dot`)." in text


def test_a_late_interaction_model_is_used_with_two_libraries(tmp_path):
    settings = {"model_type": "ColBERT", "prompts": {"query": "", "document": "text: "}}
    folder = RunDirectory(tmp_path).architecture
    folder.mkdir()
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    text = card(tmp_path, "model.kind=late_interaction", name="me/mine")
    assert 'MultiVectorEncoder("me/mine")' in text
    assert 'models.ColBERT("me/mine")' in text
    assert 'is_query=False, prompt_name="document"' in text
    assert "is_query=True)" in text
    assert ModelCard(text).data.pipeline_tag == "feature-extraction"
    (folder / "config_sentence_transformers.json").write_text('{"model_type": "MultiVectorEncoder"}')
    assert "models.ColBERT" not in card(tmp_path, "model.kind=late_interaction")


def test_results_say_what_was_measured(tmp_path):
    lines = card(tmp_path).splitlines()
    (dev,) = (line for line in lines if line.startswith("| dev"))
    assert dev == (
        "| dev | retrieval (subset) | 300 queries, 4,800 documents | 0.7500 | 0.7000 |  | 0.2500 (ndcg@10) | +0.5000 |"
    )
    assert "| sts | sts | 100 pairs |  |  | 0.5000 |  |  |" in lines
    computed = [{**row, "dataset": {**row["dataset"], "precision": "bf16"}} for row in ROWS]
    text = card(tmp_path, rows=computed)
    assert "300 queries, 4,800 documents, bf16" in text and "\nThe model computed in bf16; " in text
    assert "computed in" not in "\n".join(lines)
    assert "| query | `` 'query\\|: \\n' `` |" in lines
    later = [dict(row, step=4) if row["step"] == 0 else row for row in ROWS]
    assert "before training" not in card(tmp_path, rows=later), "a later step is not the start"
    older = [{key: value for key, value in row.items() if key != "dataset"} for row in ROWS]
    assert "| dev |  |  | 0.7500 |" in card(tmp_path, rows=older)


@pytest.mark.parametrize(
    ("gains", "shown"),
    [
        ([0.5, 0.4, 0.6], "+0.5000 (+0.4000 to +0.6000)"),
        ([0.9, -0.6, 0.0], "+0.1000 (−0.6000 to +0.9000), no clear change"),
        (None, "+0.5000"),
    ],
    ids=["clear", "noise", "unknown"],
)
def test_a_change_has_its_interval(tmp_path, gains, shown):
    (tmp_path / "recipe.yaml").write_text("name: mine\n")
    rows = ROWS
    if gains is not None:
        rows = [{**row, "ndcg@10": 0.25 + (row["step"] > 0) * sum(gains) / 3} for row in ROWS[:2]]
        for step, values in (0, [0.25] * 3), (8, [0.25 + gain for gain in gains]):
            measured = QueryMetrics(["a", "b", "c"], ["ndcg@10"], np.array(values)[:, None])
            path = query_metrics_path(tmp_path, step, "dev")
            path.parent.mkdir(parents=True)
            write_query_metrics(path, measured)
    text = card(tmp_path, rows=rows)
    assert f"| 0.2500 (ndcg@10) | {shown} |" in text
    assert ("95% confidence interval" in text) == (gains is not None)
    assert ("without an interval" in text) == (gains is None)


def test_nothing_of_the_machine_is_published(tmp_path):
    text = card(tmp_path, "model.query_prompt='a/b: '")
    recipe = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    for private in ("/home/me", str(tmp_path), "secret", "company", "null"):
        assert private not in text, private
    assert [source["path"] for source in recipe["data"]["train"]] == ["owner/rows", "my.jsonl", "*.parquet"]
    assert recipe["model"]["query_prompt"] == "a/b: ", "a text with a slash is no path"


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/me/runs/mine/model", "mine/model"),
        ("runs/mine/model", "mine/model"),
        ("../model", "model"),
        ("/model", "model"),
        ("/home/me/model", "model"),
    ],
)
def test_a_local_base_model_has_the_last_two_parts_of_its_path(tmp_path, path, shown):
    text = card(tmp_path, f"model.path={path}")
    assert f"tokens, fine-tuned from a local model, `{shown}`, with embedtrain" in text
    assert "/home/me" not in text
    assert "fine-tuned from `BAAI/bge-m3` with embedtrain" in card(tmp_path)
