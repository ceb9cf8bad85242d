"""mteb through all ranks: the scores of mteb with sentence-transformers, its own files, and what goes wrong."""

import json
import sys
from pathlib import Path

import mteb
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from embedtrain.errors import ConfigError
from embedtrain.evaluate.mteb.tasks import resolve_tasks
from tests.evaluation.mteb_ranks import run, what_fails
from tests.evaluation.mteb_tasks import KINDS, Classification, Reranking, Retrieval, Sts
from tests.small import save_guide, small_model

pytestmark = pytest.mark.filterwarnings("ignore")  # mteb's and scikit-learn's
# What mteb writes beside scores.
NOT_SCORES = {"hf_subset", "languages", "mteb_version", "date"}


def scores(rows: list[dict]) -> dict:
    return {row["hf_subset"]: {k: v for k, v in row.items() if k not in NOT_SCORES} for row in rows}


def written(folder: Path) -> dict:
    """Scores by task and split out of mteb's files."""
    files = [json.loads(path.read_text()) for path in folder.glob("results/*/*/*Task.json")]
    return {file["task_name"]: {split: scores(rows) for split, rows in file["scores"].items()} for file in files}


def expected(directory: Path, kinds: list) -> dict:
    model = SentenceTransformer(str(directory), device="cpu")
    found = {}
    for kind in kinds:
        (result,) = mteb.evaluate(model, kind(), cache=None, co2_tracker=False, show_progress_bar=False).task_results
        found[result.task_name] = {split: scores(rows) for split, rows in result.scores.items()}
    return found


def assert_same(ours, theirs, where="") -> None:
    """Every number of the one is within 1e-6 of the other's; both hold the same names."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}/{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=1e-6, nan_ok=True), where
    else:
        assert ours == theirs, where


@pytest.mark.slow
def test_every_kind_scores_as_with_sentence_transformers(ranks, minilm_dir, tmp_path):
    theirs = expected(minilm_dir, KINDS)
    answers = ranks(2, run, minilm_dir, tmp_path, [kind.__name__ for kind in KINDS])
    assert all(answer == answers[0] for answer in answers)
    figures, failed = answers[0]
    assert failed == []
    assert_same(written(tmp_path), theirs)
    retrieval = theirs["MockRetrievalTask"]["test"]["default"]["ndcg_at_10"]
    assert 0.2 < retrieval < 0.9, "scores that say nothing"
    assert figures["MockRetrievalTask/default/test"] == {"ndcg_at_10": pytest.approx(retrieval, abs=1e-6)}
    assert figures["MockSTSTask"].keys() == {"cosine_spearman"}
    both = [figures[f"MockMultilingualClassificationTask/{name}/test"]["accuracy"] for name in ("eng", "fra")]
    assert figures["MockMultilingualClassificationTask"]["accuracy"] == pytest.approx(np.mean(both))


@pytest.fixture(scope="module")
def prompted(tmp_path_factory):
    """A small model with prompts for types of task, for queries and for the rest; similarity: dot."""
    directory = save_guide(small_model("bert"), tmp_path_factory.mktemp("prompted"))
    modules = json.loads((directory / "modules.json").read_text())
    (directory / "modules.json").write_text(json.dumps([m for m in modules if not m["type"].endswith("Normalize")]))
    # Letter by letter: of words this tokenizer knows few, and texts of <unk> alone have equal scores but for rounding.
    rules = json.loads((directory / "tokenizer.json").read_text())
    letters = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    rules["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [rules["pre_tokenizer"], letters]}
    (directory / "tokenizer.json").write_text(json.dumps(rules))
    path = directory / "config_sentence_transformers.json"
    prompts = {"query": "alpha ", "document": "", "STS": "beta beta ", "Reranking-query": "mu nu ", "rest": "pi "}
    said = {"prompts": prompts, "default_prompt_name": "rest", "similarity_fn_name": "dot"}
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    return directory


@pytest.mark.parametrize("world_size", [1, 3])
def test_prompts_and_similarity_are_the_models(ranks, prompted, tmp_path, world_size):
    kinds = [Sts, Classification, Retrieval, Reranking]
    ranks(world_size, run, prompted, tmp_path, [kind.__name__ for kind in kinds])
    assert_same(written(tmp_path), expected(prompted, kinds))


def test_failures(ranks, prompted, tmp_path):
    for rank, answer in enumerate(ranks(2, what_fails, prompted, tmp_path)):
        figures, failed, again, other, encoded, raised, infinite = answer
        assert failed == [
            "mteb task MockSTSTask: its data set NA cannot be had (ConnectionError: the Hub does not answer)"
        ]
        assert set(figures) == {"MockRetrievalTask", *(f"MockRetrievalTask/default/{s}" for s in ("test", "val"))}
        assert again == figures, "found in mteb's files"
        assert "MockSTSTask" in other, "what failed is run again"
        assert set(encoded) == {"encoding texts"}, "the retrieval task was encoded again"
        interrupted = "FailedElsewhere: rank 0 failed while running MockSTSTask: KeyboardInterrupt: "
        assert raised == (interrupted if rank else "KeyboardInterrupt: ")
        assert infinite.startswith("TrainingError: ") and "are not finite" in infinite


def test_names_of_tasks():
    names = [task.metadata.name for task in resolve_tasks(["STS12", "SciFact", "STS12"])]
    assert names == ["STS12", "SciFact"]
    whole = {task.metadata.name for task in resolve_tasks(["MTEB(eng, v2)"])}
    assert {"STSBenchmark", "ArguAna"} <= whole


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SciFct", "mteb: 'SciFct' is no task and no benchmark of mteb .*; did you mean SciFact or "),
        ("qqqqqq", "`mteb available-tasks` lists its tasks"),
        ("CIFAR10", "mteb: CIFAR10 is about image; models here read text"),
    ],
)
def test_names_that_cannot_be_run(name, words):
    with pytest.raises(ConfigError, match=words):
        resolve_tasks(["STS12", name])


def test_mteb_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "mteb", None)
    with pytest.raises(ConfigError, match=r"needs a package that is not installed: pip install 'embedtrain\[mteb\]'"):
        resolve_tasks(["STS12"])


def test_a_name_that_a_set_has():
    with pytest.raises(ConfigError, match="STS12 is the name of an evaluation set too"):
        resolve_tasks(["STS12"], reserved_names=["dev", "STS12"])
