"""Filtered rows are those of the plain definition, on any number of ranks, also after an interruption."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from embedtrain.commands.filter import compose as compose_filter
from embedtrain.commands.filter import run as main
from embedtrain.config.recipe import OnError, TrainSource
from embedtrain.data.cache.row_store import read_sources
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError, DataError, FailedElsewhere
from embedtrain.inference.encode import EncodedShard
from embedtrain.inference.index import ShardedIndex, first_added_order
from embedtrain.losses.encoded import Part
from embedtrain.mining.consistency import partition
from embedtrain.mining.folder import MiningFolder
from tests.mine.models import save_cross_encoder
from tests.mine.reference import documents_of
from tests.mine.runs import more_documents, positive, query, read_jsonl, save_model, words, write_jsonl

SAME = "alpha beta gamma"
ROWS = [
    *({"query": query(i), "pos": [positive(i), positive(i + 40)][: 1 + i % 2]} for i in range(24)),
    # Positives that do not fit, and another positive of an earlier query.
    *({"query": query(i), "pos": [words(3 * i, 5 * i + 1, i)], "neg": [positive(i + 1)]} for i in range(24, 34)),
    {"query": query(3), "pos": [positive(60)]},
    {"query": SAME, "pos": [positive(5), SAME], "pos_id": ["d1", "d2"], "neg": [words(3, 3)], "neg_id": ["d1"]},
]  # fmt: skip
CORPUS = [*more_documents(50), SAME, positive(5)]
KEEP_RANK = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filter")
    save_model(folder / "model")
    save_cross_encoder(folder / "cross")
    write_jsonl(folder / "rows.jsonl", ROWS)
    write_jsonl(folder / "corpus.jsonl", [{"_id": str(i), "text": text} for i, text in enumerate(CORPUS)])
    return folder


@pytest.fixture(scope="module")
def similarities(folder) -> dict[tuple[str, str], float]:
    model = SentenceTransformer(str(folder / "model" / "guide"), device="cpu")
    documents = documents_of([ROWS], CORPUS)
    queries = list(dict.fromkeys(row["query"] for row in ROWS))
    encoded = (model.encode(texts, batch_size=1).astype(np.float64) for texts in (queries, documents))
    scores = np.matmul(*(vectors if number == 0 else vectors.T for number, vectors in enumerate(encoded)))
    return {(query, text): scores[i, j] for i, query in enumerate(queries) for j, text in enumerate(documents)}


def reference_ranks(similarities: dict[tuple[str, str], float], part: dict[str, int] | None = None) -> list[list[int]]:
    """The rank of each positive of each row, text by text."""
    documents, ranks = documents_of([ROWS], CORPUS), []
    for row in ROWS:
        same_query = [other for other in ROWS if other["query"] == row["query"]]
        answers = {text for other in same_query for text in other["pos"]} | {row["query"]}
        ids = {name for other in same_query for name in other.get("pos_id", ())}
        named = {
            text
            for other in ROWS
            for kind in ("pos", "neg")
            for text, name in zip(other.get(kind, ()), other.get(f"{kind}_id", ()), strict=False)
            if name in ids
        } if ids else set()  # fmt: skip
        others = [text for text in documents if text not in answers | named]
        ranks.append([
            1 + sum(
                similarities[row["query"], text] > similarities[row["query"], positive] + 1e-9
                for text in others if part is None or part[text] == part[positive]
            )
            for positive in row["pos"]
        ])  # fmt: skip
    return ranks


def run_filter(_world: World, arguments: Sequence[str]) -> None:
    main(compose_filter(list(arguments)))


def arguments(folder: Path, to: str, *more: str) -> list[str]:
    common = [f"model={folder}/model/guide", f"data=[{folder}/rows.jsonl]", f"corpus={folder}/corpus.jsonl"]
    return [*common, f"output_dir={folder}/{to}", "precision=fp32", "query_batch_size=7", *more]


def outputs(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*.js*")}


def check_rows(directory: Path, ranks: list[list[int]]) -> None:
    """The files hold each row with its near positives, and with the others and their ranks."""
    kept, rejected = read_jsonl(directory / "rows.jsonl"), read_jsonl(directory / "rejected" / "rows.jsonl")
    expected_kept, expected_rejected = [], []
    for row, row_ranks in zip(ROWS, ranks, strict=True):
        for keep, into in (True, expected_kept), (False, expected_rejected):
            chosen = [i for i, rank in enumerate(row_ranks) if bool(rank <= KEEP_RANK) is keep]
            if chosen:
                into.append(
                    (row["query"], [row["pos"][i] for i in chosen], row.get("neg", []), [row_ranks[i] for i in chosen])
                )
    assert [(row["query"], row["pos"], row["neg"]) for row in kept] == [row[:3] for row in expected_kept]
    assert [(row["query"], row["pos"], row["neg"], row["ranks"]) for row in rejected] == expected_rejected
    assert len(expected_kept) > 10 < len(expected_rejected) + 5


def test_rows_equal_those_of_the_definition(ranks, folder, similarities):
    for size in (1, 3):
        ranks(size, run_filter, arguments(folder, f"on-{size}", f"keep_rank={KEEP_RANK}"))
    check_rows(folder / "on-3", reference_ranks(similarities))
    assert outputs(folder / "on-1") == outputs(folder / "on-3")
    with_ids = read_jsonl(folder / "on-1" / "rows.jsonl")[-1]
    assert with_ids["pos_id"] == ["d1", "d2"][-len(with_ids["pos"]) :]


def failed(_world: World, arguments: Sequence[str]) -> str:
    with pytest.raises((DataError, FailedElsewhere)) as error:
        run_filter(_world, arguments)
    return str(error.value)


def test_a_source_of_which_nothing_is_kept_is_named(ranks, folder):
    messages = ranks(2, failed, arguments(folder, "nothing", "keep_rank=1", "min_score=2"))
    for message in messages:
        assert re.search(rf"none of the {len(ROWS)} rows of rows \(keep_rank=1, .*min_score=2, .*leave", message)
    assert not list((folder / "nothing").glob("*.jsonl"))


def test_ranks_within_parts_of_the_documents(ranks, folder, similarities):
    options = [f"keep_rank={KEEP_RANK}", "pool=30", "seed=5"]
    ranks(2, run_filter, arguments(folder, "parts", *options))
    documents = documents_of([ROWS], CORPUS)
    parts = partition(len(documents), 30, 5)
    assert np.bincount(parts).max() <= 30
    check_rows(folder / "parts", reference_ranks(similarities, dict(zip(documents, parts.tolist(), strict=True))))


def test_scores_of_a_teacher(ranks, folder):
    options = ["keep_rank=null", f"teacher={folder}/cross", "min_score=-0.7"]
    ranks(2, run_filter, arguments(folder, "scored", *options))
    rejected = read_jsonl(folder / "scored" / "rejected" / "rows.jsonl")
    assert rejected
    assert all(score < -0.7 for row in rejected for score in row["scores"])
    num_positives = sum(len(row["pos"]) for row in (*rejected, *read_jsonl(folder / "scored" / "rows.jsonl")))
    assert num_positives == sum(len(row["pos"]) for row in ROWS)


def test_annotated_rows_are_read_with_a_condition(ranks, folder):
    """As the rows that the same limits keep."""
    options = ["min_score=0.3", f"keep_rank={KEEP_RANK}"]
    ranks(2, run_filter, arguments(folder, "limited", *options))
    ranks(2, run_filter, arguments(folder, "annotated", "annotate=true"))
    annotated = read_jsonl(folder / "annotated" / "rows.jsonl")
    assert [(row["query"], row["pos"]) for row in annotated] == [(row["query"], row["pos"]) for row in ROWS]
    assert not (folder / "annotated" / "rejected").exists()
    where = f"rank <= {KEEP_RANK} and score >= 0.3"
    read_rows = []
    for directory, condition in (("limited", None), ("annotated", where)):
        (store,) = read_sources(
            [TrainSource(path=str(folder / directory / "rows.jsonl"), where=condition)], OnError.stop
        )
        read_rows.append([(row.query, row.positives.texts, row.negatives.texts, row.positives.ids) for row in store])
    assert read_rows[0] == read_rows[1]
    assert 0 < len(read_rows[0]) < len(ROWS)
    rest = [row["rank"] for row in annotated if not any(rank <= KEEP_RANK for rank in row["rank"])]
    assert rest


def stop_after_two_blocks(world: World, arguments: Sequence[str]) -> str:
    write_block, written = MiningFolder.write_block, []

    def stop(folder: MiningFolder, name: str, write: Any) -> None:
        if len(written) == 2:
            raise DataError("stopped")
        written.append(name)
        write_block(folder, name, write)

    MiningFolder.write_block = stop  # type: ignore[method-assign]
    try:
        main(compose_filter(list(arguments)))
    except DataError as error:
        return str(error)
    finally:
        MiningFolder.write_block = write_block  # type: ignore[method-assign]
    return ""


def test_an_interrupted_filter_resumes(ranks, folder):
    options = [f"keep_rank={KEEP_RANK}", "pool=40"]
    ranks(1, run_filter, arguments(folder, "undisturbed", *options))
    assert ranks(2, stop_after_two_blocks, arguments(folder, "stopped", *options)) == ["stopped", "stopped"]
    assert len(list((folder / "stopped" / ".filtering" / "blocks").iterdir())) == 2
    ranks(3, run_filter, arguments(folder, "stopped", *options))
    assert outputs(folder / "stopped") == outputs(folder / "undisturbed")
    with pytest.raises(DataError, match=r"keep_rank was 3 .* 4"):
        main(compose_filter(arguments(folder, "stopped", "keep_rank=4", "pool=40")))


def count_above(world: World, vectors: torch.Tensor, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts at the scores of documents, and those of all scores."""
    index = ShardedIndex(first_added_order(len(vectors)), world)
    rows = torch.arange(len(vectors))[world.rank :: world.size]
    index.add(EncodedShard(Part(vectors[rows]), rows))
    everything = index.scores_of(queries, torch.arange(len(vectors)).expand(len(queries), -1))
    limits = everything[torch.arange(len(queries)), torch.arange(len(queries)) * 3]
    return index.count_above(queries, limits), (everything > limits[:, None]).sum(dim=1)


@pytest.mark.parametrize("size", [1, 3])
def test_counts_are_exact_among_ties(ranks, size):
    torch.manual_seed(0)
    vectors = torch.nn.functional.normalize(torch.randn(60, 8), dim=1).repeat(3, 1)
    vectors[60:] += 1e-8 * torch.randn(120, 8)  # differences that fp32 products round away
    for counts, expected in ranks(size, count_above, vectors, vectors[:40].roll(1, 0)):
        assert counts.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["keep_rank=0"], r"keep_rank=0: "),
        (["keep_rank=null"], r"keep_rank=null: without min_score"),
        (["keep_rank=null", "min_score=0.5", "pool=100"], r"pool=100: has no effect"),
        (["pool=1"], r"pool=1: "),
        (["teacher=here"], r"teacher=here: has no effect without min_score"),
        (["data=[]"], r"data=\[\]: "),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        compose_filter(["model=here", "data=[rows.jsonl]", "output_dir=there", *options])
