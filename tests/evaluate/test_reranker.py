"""A reranker in `evaluate` and `search`: after BM25, a bi-encoder and a run file, on one rank and on several."""

import contextlib
import io
import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import CrossEncoder
from transformers import AutoModelForSequenceClassification

from embedtrain.commands.evaluate import compose, require_paths
from embedtrain.commands.evaluate import compose as compose_evaluate
from embedtrain.commands.evaluate import run as main
from embedtrain.commands.evaluate.stages import describe_gains
from embedtrain.errors import ModelError
from embedtrain.tracking.metrics import QueryMetrics
from tests.commands import call
from tests.evaluation.tiny import save_tiny_cross_encoder
from tests.models.test_cross_encoder import save_reranker
from tests.models.test_hub import cached, publish
from tests.safety.payloads import edit
from tests.small import save_guide, small_model, text, write_beir


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker")
    save_guide(small_model("bert"), folder)
    save_tiny_cross_encoder(folder / "cross")
    write_beir(folder / "dev", 20)
    rows = [{"query": text(i, 3), "positive": [text(i, 5)], "negative": [text(i + 1, 4), text(i, 2)]} for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def evaluated(world, folder, output, *arguments):
    """Metrics by set; `world` is the one that the command joins."""
    sets = f"sets=[{folder / 'dev'},{folder / 'rows.jsonl'}]"
    options = [sets, f"reranker={folder / 'cross'}", "rerank_depth=7", f"output_dir={output}", *arguments]
    return main(compose_evaluate([option.replace("@", f"{folder}/") for option in options]))


def rows_of(output):
    return {row["set"]: row for row in map(json.loads, (output / "metrics.jsonl").read_text().splitlines())}


def test_every_stage_has_its_row_on_any_number_of_ranks(ranks, workshop, tmp_path):
    results = []
    for size in (1, 2):
        results += ranks(size, evaluated, workshop, tmp_path / str(size), "model=@guide", "save_runs=true")
    assert all(result == results[0] for result in results)
    assert list(results[0]) == ["dev", "rows", "mean", "dev+reranker", "rows+reranker", "mean+reranker"]
    rows = rows_of(tmp_path / "1")
    assert rows["dev"]["model"] == rows["dev+reranker"]["model"] == str(workshop / "guide")
    assert rows["dev+reranker"]["reranker"] == str(workshop / "cross")
    assert "reranker" not in rows["dev"]
    # The same documents from the run file of the first stage, without the bi-encoder.
    run = tmp_path / "1" / "runs" / "dev.run"
    sets = f"sets=[{{path: {workshop / 'dev'}, candidates: {run}, kind: reranking}}]"
    (from_run,) = ranks(1, evaluated, workshop, tmp_path / "run", sets)
    assert list(from_run) == ["dev+run", "dev+run+reranker"]
    assert from_run["dev+run+reranker"] == results[0]["dev+reranker"]
    assert from_run["dev+run"]["ndcg@10"] == results[0]["dev"]["ndcg@10"]
    written = (tmp_path / "1" / "runs" / "dev+reranker.run").read_text().splitlines()
    query, _, document, _, score, _ = written[0].split()
    texts = [json.loads(line)["text"] for line in (workshop / "dev" / "corpus.jsonl").read_text().splitlines()]
    queries = [json.loads(line)["text"] for line in (workshop / "dev" / "queries.jsonl").read_text().splitlines()]
    cross = CrossEncoder(str(workshop / "cross"), device="cpu", activation_fn=torch.nn.Identity())
    expected = cross.predict([(queries[int(query[1:])], texts[int(document[1:])])])[0]
    assert float(score) == pytest.approx(expected, abs=1e-5)


def evaluated_from_hub(world, folder, output, *arguments):
    with cached(folder / "cache"):
        return evaluated(world, folder, output, *arguments)


@pytest.mark.parametrize("kind", ["bge", "ms-marco"])
def test_directories_without_files_of_sentence_transformers(ranks, workshop, tmp_path, kind):
    """bge-reranker: XLM-R by its Hub id; ms-marco-MiniLM: BERT with token types and the activation's former key."""
    directory, activation = tmp_path / kind, "torch.nn.modules.linear.Identity"
    if kind == "bge":
        save_reranker("xlm-roberta", directory)
        publish(workshop / "cache", "org/reranker", "c" * 40, directory)
    else:
        save_tiny_cross_encoder(directory)
        edit(directory / "config.json", sbert_ce_default_activation_function=activation)
    path = "org/reranker" if kind == "bge" else directory
    assert not (directory / "modules.json").exists()
    more = ("model=@guide", "sets=[@dev]", f"reranker={path}", "save_runs=true")
    (result,) = ranks(1, evaluated_from_hub, workshop, tmp_path / "out", *more)
    assert list(result) == ["dev", "dev+reranker"]
    written = (tmp_path / "out" / "runs" / "dev+reranker.run").read_text().splitlines()
    texts, queries = (
        {row["_id"]: row["text"] for row in map(json.loads, (workshop / "dev" / name).read_text().splitlines())}
        for name in ("corpus.jsonl", "queries.jsonl")
    )
    lines = [line.split() for line in written]
    cross = CrossEncoder(str(directory), device="cpu")
    assert isinstance(cross.activation_fn, torch.nn.Sigmoid if kind == "bge" else torch.nn.Identity)
    expected = cross.predict([(queries[q], texts[d]) for q, _, d, *_ in lines], activation_fn=torch.nn.Identity())
    assert [float(line[4]) for line in lines] == pytest.approx(expected.tolist(), abs=1e-4)


def test_bm25_and_the_model_one_after_the_other(ranks, workshop, tmp_path):
    pytest.importorskip("bm25s")
    (both,) = ranks(1, evaluated, workshop, tmp_path, "model=@guide", "first_stage=[bm25,model]", "sets=[@dev]")
    assert list(both) == ["dev", "dev+bm25", "dev+bm25+reranker", "dev+reranker"]
    assert rows_of(tmp_path)["dev+bm25"]["model"] == "bm25"
    (alone,) = ranks(1, evaluated, workshop, tmp_path / "alone", "sets=[@dev]")
    assert alone == {name: both[name] for name in ("dev+bm25", "dev+bm25+reranker")}


def printed(world, *arguments):
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
        metrics = evaluated(world, *arguments)
    return metrics, output.getvalue() + errors.getvalue()


def test_the_gain_has_an_interval_over_queries(ranks, workshop, tmp_path):
    ((metrics, output),) = ranks(1, printed, workshop, tmp_path, "model=@guide", "first_stage=[bm25,model]")
    gains = dict(re.findall(r"^(dev\S*): .* ndcg@10 (\S+) \(95% interval .*, 20 queries\)$", output, re.MULTILINE))
    assert {name: float(gain) for name, gain in gains.items()} == {
        name: pytest.approx(metrics[f"{name}+reranker"]["ndcg@10"] - metrics[name]["ndcg@10"], abs=1e-4)
        for name in ("dev", "dev+bm25")
    }


def test_the_queries_of_a_gain_are_paired_by_id():
    before = QueryMetrics(["a", "b", "c"], ["mrr@10", "ndcg@10"], np.array([[1, 0.0], [1, 0.5], [1, 0.2]]))
    after = QueryMetrics(["c", "a", "b"], ["ndcg@10"], np.array([[0.3], [0.1], [0.6]]))
    other = QueryMetrics(["a"], ["map"], np.array([[1.0]]))
    (line,) = describe_gains({"s": before, "s+reranker": after, "t": other, "u+reranker": other})
    assert "the reranker is better, ndcg@10 +0.1000 (95% interval +0.1000 to +0.1000, 3 queries)" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reranker=@guide"], "reranker=.*guide: "),
        (["reranker=null", "model=@cross"], "cross.* is a reranker .*reranker"),
        (["reranker={path: @cross, max_length: 999}"], r"reranker\.max_length=999"),
        (["reranker={path: @cross, pair_template: none}"], r"reranker\.pair_template=none"),
        (["reranker={path: @cross, score_tokens: [yes, no]}"], r"reranker\.score_tokens=\['yes', 'no'\]"),
        (["first_stage=[model]"], r"first_stage=\[model\]: "),
        (["first_stage=[bm25]", "sets=[@rows.jsonl]"], r"first_stage=\[bm25\]: .*no set is searched"),
        (["first_stage=[bm52]"], r"first_stage=\[bm52\]: "),
        (["rerank_depth=0"], "rerank_depth=0: "),
        (["mteb=[SciFact]"], r"mteb=\[SciFact\]: "),
        (["pooling=cls"], "pooling=cls: "),
        (["function=my_metrics:support"], "function=my_metrics:support: "),
        (["function=support", "model=@guide"], "function=support: "),
        (["reranker=null", "model=@guide", "rerank_depth=9"], "rerank_depth=9: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_errors_name_the_option(ranks, workshop, tmp_path, arguments, message):
    if "reranker=null" in arguments and "rerank_depth=9" not in arguments:
        arguments = [*arguments, "rerank_depth=100"]
    with pytest.raises(AssertionError, match=f"(Config|Model)Error: .*{message}"):
        ranks(1, evaluated, workshop, tmp_path, *arguments)


def test_a_reranker_of_two_labels_ranks_by_the_difference_of_their_logits(ranks, workshop, tmp_path):
    cross, two = workshop / "cross", shutil.copytree(workshop / "cross", tmp_path / "two")
    model = AutoModelForSequenceClassification.from_pretrained(cross)
    weights = model.state_dict()
    for name in ("classifier.weight", "classifier.bias"):
        other = torch.randn_like(weights[name])
        weights[name] = torch.cat([other, other + weights[name]])
    model.config.num_labels = 2
    AutoModelForSequenceClassification.from_config(model.config).save_pretrained(two)
    save_file(weights, two / "model.safetensors", metadata={"format": "pt"})
    common = ("model=@guide", "sets=[@dev]")
    (expected,) = ranks(1, evaluated, workshop, tmp_path / "one", *common)
    labels = f"reranker={{path: {two}, score_labels: [1, 0]}}"
    (result,) = ranks(1, evaluated, workshop, tmp_path / "out", *common, labels)
    assert result == expected
    with pytest.raises(AssertionError, match=r"has 2 labels.* set reranker\.score_labels=\[1,0\]"):
        ranks(1, evaluated, workshop, tmp_path / "no", *common, f"reranker={two}")


def test_the_directory_of_a_run_is_no_model(workshop, tmp_path):
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").touch()
    with pytest.raises(ModelError, match=f"reranker={tmp_path}/run: .*reranker={tmp_path}/run/model"):
        require_paths(
            compose([f"model={workshop / 'guide'}", f"reranker={tmp_path / 'run'}", f"sets=[{workshop / 'dev'}]"])
        )


def test_search_orders_the_first_documents_again(workshop):
    common = ["search", "model=guide", "corpus=dev", "query=alpha beta", "top_k=3"]
    printed = call(*common, "reranker=cross", "rerank_depth=20", cwd=workshop)
    documents = [json.loads(line) for line in (workshop / "dev" / "corpus.jsonl").read_text().splitlines()]
    cross = CrossEncoder(str(workshop / "cross"), device="cpu", activation_fn=torch.nn.Identity())
    scores = cross.predict([("alpha beta", document["text"]) for document in documents])
    ranked = sorted(zip(scores.tolist(), (document["_id"] for document in documents), strict=True), reverse=True)
    shown = [line.split()[:2] for line in printed.splitlines() if line.strip()[:1] in "-0123456789" and line.strip()]
    assert shown == [[f"{score:.3f}", document] for score, document in ranked[:3]]
    assert "rerank_depth=2: " in call(*common, "reranker=cross", "rerank_depth=2", cwd=workshop, code=1)
