"""mteb through all ranks: the scores of mteb with sentence-transformers, its own files, and what goes wrong."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import mteb
import numpy as np
import pytest
import torch
from mteb.types import PromptType
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

from embedtrain.commands.evaluate.mteb_client import MtebSettings, ShardedModel, _key, benchmark_means, resolve_tasks
from embedtrain.config.evaluation import SUITES, parse_suites
from embedtrain.config.parsing import parse_sets
from embedtrain.data.types import TextRole
from embedtrain.errors import ConfigError
from tests.evaluate.mteb_ranks import run, run_and_fail
from tests.evaluate.mteb_tasks import KINDS, Classification, Reranking, Retrieval, Sts
from tests.late_interaction_models import multi_vector_model, save_backbone
from tests.small import save_guide, small_model

pytestmark = pytest.mark.filterwarnings("ignore")  # mteb's and scikit-learn's
# What mteb writes beside scores.
NOT_SCORES = {"hf_subset", "languages", "mteb_version", "date"}


def scores(rows: list[dict]) -> dict:
    return {row["hf_subset"]: {k: v for k, v in row.items() if k not in NOT_SCORES} for row in rows}


def read_results(folder: Path) -> dict:
    """Scores by task and split out of mteb's files."""
    files = [json.loads(path.read_text()) for path in folder.glob("results/*/*/*Task.json")]
    return {file["task_name"]: {split: scores(rows) for split, rows in file["scores"].items()} for file in files}


def expected(directory: Path, kinds: list, model_class: type = SentenceTransformer) -> dict:
    model = model_class(str(directory), device="cpu")
    results = {}
    for kind in kinds:
        (result,) = mteb.evaluate(model, kind(), cache=None, co2_tracker=False, show_progress_bar=False).task_results
        results[result.task_name] = {split: scores(rows) for split, rows in result.scores.items()}
    return results


def assert_same(ours, reference, where="") -> None:
    """Every number of the one is within 1e-6 of the other's; both hold the same names."""
    if isinstance(reference, dict):
        assert ours.keys() == reference.keys(), where
        for key in reference:
            assert_same(ours[key], reference[key], f"{where}/{key}")
    elif isinstance(reference, list):
        assert len(ours) == len(reference), where
        for i, (a, b) in enumerate(zip(ours, reference, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    elif isinstance(reference, float):
        assert ours == pytest.approx(reference, abs=1e-6, nan_ok=True), where
    else:
        assert ours == reference, where


@pytest.mark.slow
def test_every_kind_scores_as_with_sentence_transformers(ranks, minilm_dir, tmp_path):
    reference = expected(minilm_dir, KINDS)
    answers = ranks(2, run, minilm_dir, tmp_path, [kind.__name__ for kind in KINDS])
    assert all(answer == answers[0] for answer in answers)
    metrics, failures = answers[0]
    assert failures == []
    assert_same(read_results(tmp_path), reference)
    retrieval = reference["MockRetrievalTask"]["test"]["default"]["ndcg_at_10"]
    assert 0.2 < retrieval < 0.9, "scores that say nothing"
    assert metrics["MockRetrievalTask/default/test"] == {"ndcg_at_10": pytest.approx(retrieval, abs=1e-6)}
    assert metrics["MockSTSTask"].keys() == {"cosine_spearman"}
    both = [metrics[f"MockMultilingualClassificationTask/{name}/test"]["accuracy"] for name in ("eng", "fra")]
    assert metrics["MockMultilingualClassificationTask"]["accuracy"] == pytest.approx(np.mean(both))


def split_into_letters(directory: Path) -> None:
    """Of words the tokenizer knows few, and texts of <unk> alone have equal scores but for rounding."""
    rules = json.loads((directory / "tokenizer.json").read_text())
    letters = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    rules["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [rules["pre_tokenizer"], letters]}
    (directory / "tokenizer.json").write_text(json.dumps(rules))


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    """A small model with prompts for types of task, for queries and for the rest; similarity: dot."""
    directory = save_guide(small_model("bert"), tmp_path_factory.mktemp("prompted"))
    modules = json.loads((directory / "modules.json").read_text())
    (directory / "modules.json").write_text(json.dumps([m for m in modules if not m["type"].endswith("Normalize")]))
    split_into_letters(directory)
    path = directory / "config_sentence_transformers.json"
    prompts = {"query": "alpha ", "document": "", "STS": "beta beta ", "Reranking-query": "mu nu ", "rest": "pi "}
    settings = {"prompts": prompts, "default_prompt_name": "rest", "similarity_fn_name": "dot"}
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 3])
def test_prompts_and_similarity_of_the_model_are_used(ranks, prompted, tmp_path, world_size):
    kinds = [Sts, Classification, Retrieval, Reranking]
    ranks(world_size, run, prompted, tmp_path, [kind.__name__ for kind in kinds])
    assert_same(read_results(tmp_path), expected(prompted, kinds))


def test_failed_tasks_are_reported_and_others_still_run(ranks, prompted, tmp_path):
    for rank, answer in enumerate(ranks(2, run_and_fail, prompted, tmp_path)):
        metrics, failures, again, other, encoded, raised, infinite = answer
        (failure,) = failures
        assert failure.startswith("mteb task MockSTSTask: ")
        assert "(ConnectionError: the Hub does not answer)" in failure
        assert set(metrics) == {"MockRetrievalTask", *(f"MockRetrievalTask/default/{s}" for s in ("test", "val"))}
        assert again == metrics, "results were not reused"
        assert "MockSTSTask" in other, "a failed task is run again"
        assert set(encoded) == {"encoding texts"}, "the retrieval task was encoded again"
        interrupted = "FailedElsewhere: rank 0 failed while running MockSTSTask: KeyboardInterrupt: "
        assert raised == (interrupted if rank else "KeyboardInterrupt: ")
        assert infinite.startswith("TrainingError: ") and "are not finite" in infinite


def test_names_of_tasks_and_benchmarks():
    names = [task.metadata.name for task in resolve_tasks(["STS12", "SciFact", "STS12"])]
    assert names == ["STS12", "SciFact"]
    benchmark = {task.metadata.name for task in resolve_tasks(["MTEB(eng, v2)"])}
    assert {"STSBenchmark", "ArguAna"} <= benchmark


def test_the_figure_of_a_benchmark_is_the_mean_of_its_tasks():
    scores = scores_of(resolve_tasks(["ViDoRe(v2)"]))
    names = ["STS12", "ViDoRe(v2)", "ViDoRe(v1)"]
    means = benchmark_means(names, scores | scores_of(resolve_tasks(["STS12"])))
    assert means == {"ViDoRe(v2)": {"ndcg_at_5": pytest.approx(0.15)}}
    assert not benchmark_means(names, dict(list(scores.items())[1:])), "a task has no figure"


def scores_of(tasks: list) -> dict:
    """0, 0.1, 0.2, ... by the key of the task."""
    return {_key(task): (task.metadata.main_score, number / 10) for number, task in enumerate(tasks)}


def test_benchmarks_of_several_types_have_two_means():
    """Those of mteb's leaderboard. A task that two benchmarks have with other languages is another task."""
    benchmark = mteb.get_benchmark("MTEB(eng, v2)")
    scores = scores_of(list(benchmark.tasks))
    results = [
        SimpleNamespace(get_score=lambda score=score: score, task=task)
        for task, (_, score) in zip(benchmark.tasks, scores.values(), strict=True)
    ]
    expected = {}
    for aggregation in benchmark.aggregations:
        expected |= aggregation.aggregate(results)
    other = {(name, ("other",), splits): (metric, -1.0) for (name, _, splits), (metric, _) in scores.items()}
    means = benchmark_means(["MTEB"], scores | other, ["mteb_en", "rteb"])
    both = means.pop("mteb_en")
    assert both == pytest.approx({"mean_task": expected["Mean(Task)"], "mean_task_type": expected["Mean(TaskType)"]})
    assert len(means) == 7
    assert means["mteb_en/Retrieval"] == {"ndcg_at_10": pytest.approx(expected["Retrieval"])}
    assert means["mteb_en/STS"] == {"cosine_spearman": pytest.approx(expected["STS"])}
    assert means["mteb_en/Reranking"] == {"main_score": pytest.approx(expected["Reranking"])}, "of two metrics"


@pytest.mark.parametrize("suite", SUITES)
def test_suites_have_the_public_tasks_of_benchmarks(suite):
    benchmark, tasks = mteb.get_benchmark(SUITES[suite].benchmark), resolve_tasks([], suites=[suite])
    private = [task.metadata.name for task in benchmark.tasks if task.metadata.is_public is False]
    assert len(tasks) == len(benchmark.tasks) - len(private)
    assert not {task.metadata.name for task in tasks} & set(private)
    if suite in ("rteb", "vidore"):
        assert private
    means = benchmark_means([], scores_of(tasks), [suite])
    mixed = suite in ("mteb_en", "mmteb_multi")
    assert means[suite].keys() == ({"mean_task", "mean_task_type"} if mixed else {"ndcg_at_10"})
    numbers = [int(word) for word in SUITES[suite].quoted.split() if word.isdigit()]
    subsets = sum(len(task.hf_subsets) for task in tasks)
    kinds = len({task.metadata.type for task in tasks})
    assert set(numbers) <= {len(tasks), kinds, subsets}, "what its description says"


def test_names_of_suites():
    assert parse_suites("rteb") == parse_suites(["rteb", "rteb"]) == ["rteb"]
    assert parse_suites(None) == []
    for value in ("beir", ["rteb", "NanoBEIR"], 3):
        with pytest.raises(ConfigError, match=r"suite=.*nanobeir, rteb, bright, mteb_en, mmteb_multi, vidore"):
            parse_suites(value)
    with pytest.raises(ConfigError, match="suite=rteb: is also the name of an evaluation set"):
        resolve_tasks([], ["rteb"], ["rteb"])


def test_sets_of_nanobeir_are_those_of_mteb(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    sets = parse_sets(["dev", {"path": "nanobeir", "query_prompt": "q: ", "metrics": ["ndcg@10"]}], "sets")
    assert [each.path for each in sets[1:]] == [
        task.metadata.dataset["path"] for task in mteb.get_benchmark("NanoBEIR").tasks
    ]
    assert {each.split for each in sets[1:]} == {"train"}
    assert {each.query_prompt for each in sets[1:]} == {"q: "}
    with pytest.raises(ConfigError, match="nanobeir: name=x: "):
        parse_sets([{"path": "nanobeir", "name": "x"}], "sets")
    (tmp_path / "nanobeir").mkdir()
    assert [each.path for each in parse_sets("nanobeir", "sets")] == ["nanobeir"], "a folder of this name is itself"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SciFct", "mteb: 'SciFct' .*did you mean SciFact or "),
        ("qqqqqq", "`mteb available-tasks`"),
        ("ESC50", "mteb: ESC50 .*audio"),
    ],
)
def test_unusable_names_are_rejected(name, words):
    with pytest.raises(ConfigError, match=words):
        resolve_tasks(["STS12", name])


def test_mteb_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "mteb", None)
    with pytest.raises(ConfigError, match=r"mteb=\['STS12'\].*pip install '\.\[mteb\]'"):
        resolve_tasks(["STS12"])


def test_name_of_a_set_is_rejected():
    with pytest.raises(ConfigError, match="mteb: STS12 "):
        resolve_tasks(["STS12"], reserved_names=["dev", "STS12"])


def test_queries_of_pairs_are_encoded_as_queries():
    """A model of two towers has one for them: tasks with pairs name what the first texts are."""
    commands = []

    def answer(command):
        commands.append(command)
        return torch.zeros(len(command.texts), 2)

    model = ShardedModel(SimpleNamespace(run=answer), MtebSettings({}, "", "cosine"), None)
    for prompt_type in (PromptType.query, PromptType.document, None):
        model.encode([{"text": ["a", "b"]}], task_metadata=Sts.metadata, prompt_type=prompt_type)
    assert [command.role for command in commands] == [TextRole.query, TextRole.document, TextRole.document]


@pytest.mark.slow
def test_late_interaction_models_search_and_nothing_else(ranks, tmp_path):
    backbone = save_backbone(tmp_path / "backbone", "bert")
    split_into_letters(backbone)
    expansion = {"strategy": "fixed", "length": 12, "attend": False}
    model = multi_vector_model(backbone, prompts={"query": "q ", "document": "d "}, query_expansion=expansion)
    model.save_pretrained(str(tmp_path / "model"))
    metrics, failures = ranks(2, run, tmp_path / "model", tmp_path / "out", ["Retrieval", "Reranking", "Sts"])[0]
    reference = expected(tmp_path / "model", [Retrieval, Reranking], MultiVectorEncoder)
    assert_same(read_results(tmp_path / "out"), reference)
    assert len(metrics) > 2
    (failure,) = failures
    assert "MockSTSTask" in failure
    assert "one vector per text" in failure
