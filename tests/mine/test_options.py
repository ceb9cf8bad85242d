"""Options of mining that cannot work are one sentence, before anything is read."""

import pytest

from embedtrain.config.recipe import TrainSource
from embedtrain.errors import ConfigError
from embedtrain.mine.options import compose_mine

GOOD = ["model=m", "data=[rows.jsonl]", "output_dir=out"]


def test_what_is_asked_for():
    options = compose_mine(["model=m", "data=rows.jsonl", "output_dir=out", "corpus=pool.jsonl", "negatives=3"])
    assert [type(source) for source in options.data] == [TrainSource]
    assert options.data[0].path == "rows.jsonl"
    assert options.corpus == ["pool.jsonl"]
    assert options.negatives == 3
    several = compose_mine([*GOOD[:1], "data=[a.jsonl,{path: b.jsonl, query_prompt: 'q: '}]", "output_dir=out"])
    assert [source.path for source in several.data] == ["a.jsonl", "b.jsonl"]
    assert several.data[1].query_prompt == "q: "
    (one,) = compose_mine(["model=m", "data={path: b.jsonl, query_max_length: 9}", "output_dir=out"]).data
    assert one.query_max_length == 9


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (GOOD[1:], "no model: write model=DIR"),
        ([GOOD[0], GOOD[2]], "no data: write data="),
        (GOOD[:2], "no place for the mined rows: write output_dir=DIR"),
        ([*GOOD, "negatives=0"], "negatives=0: at least 1"),
        ([*GOOD, "rank_min=-1"], "rank_min=-1: "),
        ([*GOOD, "rank_min=100"], "rank_min=100 and rank_max=100 leave no document between"),
        ([*GOOD, "rank_max=10"], "negatives=15, and between rank_min=0 and rank_max=10 are 10 documents"),
        ([*GOOD, "relative_margin=5"], "relative_margin=5.0: a share of the positive's score from 0 to below 1"),
        ([*GOOD, "relative_margin=-0.1"], "relative_margin=-0.1: "),
        ([*GOOD, "absolute_margin=-1"], "absolute_margin=-1.0: "),
        ([*GOOD, "max_score=nan"], "max_score=nan: finite numbers"),
        ([*GOOD, "max_score=0.1", "min_score=0.2"], "min_score=0.2 is above max_score=0.1"),
        ([*GOOD, "teacher_max_length=9"], "teacher_max_length=9 has no use without a teacher"),
        ([*GOOD, "teacher_revision=main"], "teacher_revision=main has no use without a teacher"),
        ([*GOOD, "teacher_batch_size=0"], "teacher_batch_size=0: "),
        ([*GOOD, "max_length=2"], "max_length=2, "),
        ([*GOOD, "chunk_tokens=0"], "chunk_tokens=0: "),
        ([*GOOD, "query_batch_size=9000"], "query_batch_size=9000: from 1 to 8192"),
        ([*GOOD, "seed=-1"], "seed=-1: "),
        ([*GOOD, "timeout=0"], "timeout=0.0: "),
        ([*GOOD, "instruction_format=x"], "instruction_format='x' must say where"),
        ([*GOOD, "corpus={path: x}"], "corpus={'path': 'x'} is neither a path nor a list of paths"),
        ([*GOOD, "sampling=best"], "sampling"),
        ([*GOOD, "negative=4"], "unknown option negative, did you mean negatives?"),
        ([GOOD[0], GOOD[2], "data=[{path: a, name: b/c}]"], "data, a: name=b/c becomes the name of a file in out"),
        ([GOOD[0], GOOD[2], "data=[{path: a, score_scale: 0}]"], "data.train, a: score_scale=0.0"),
    ],
)
def test_what_cannot_work(arguments, sentence):
    with pytest.raises(ConfigError) as caught:
        compose_mine(arguments)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mined_rows_do_not_lie_among_those_that_are_read(tmp_path):
    with pytest.raises(ConfigError, match=r"lies in .*, whose files are all read as rows"):
        compose_mine(["model=m", f"data=[{tmp_path}]", f"output_dir={tmp_path / 'mined'}"])
