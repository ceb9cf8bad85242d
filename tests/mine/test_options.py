"""The command line of mine: options, and the messages for those that cannot work."""

import pytest

from embedtrain.commands.mine import compose as compose_mine
from embedtrain.config.columns import DataPath
from embedtrain.config.recipe import TrainSource
from embedtrain.errors import ConfigError

GOOD = ["model=m", "data=[rows.jsonl]", "output_dir=out"]


def test_data_and_corpora_are_paths_or_lists():
    options = compose_mine(["model=m", "data=rows.jsonl", "output_dir=out", "corpus=pool.jsonl", "negatives=3"])
    assert [type(source) for source in options.data] == [TrainSource]
    assert options.data[0].path == "rows.jsonl"
    assert options.corpus == [DataPath(path="pool.jsonl")]
    assert options.negatives == 3
    several = compose_mine([*GOOD[:1], "data=[a.jsonl,{path: b.jsonl, query_prompt: 'q: '}]", "output_dir=out"])
    assert [source.path for source in several.data] == ["a.jsonl", "b.jsonl"]
    assert several.data[1].query_prompt == "q: "
    (one,) = compose_mine(["model=m", "data={path: b.jsonl, query_max_length: 9}", "output_dir=out"]).data
    assert one.query_max_length == 9


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (GOOD[1:], "model='': "),
        ([GOOD[0], GOOD[2]], "data=[]: "),
        (GOOD[:2], "output_dir='': "),
        ([*GOOD, "negatives=0"], "negatives=0: "),
        ([*GOOD, "rank_min=-1"], "rank_min=-1: "),
        ([*GOOD, "rank_min=100"], "rank_min=100: must be below rank_max=100"),
        ([*GOOD, "rank_max=10"], "negatives=15: between rank_min=0 and rank_max=10 are 10 documents"),
        ([*GOOD, "relative_margin=5"], "relative_margin=5.0: "),
        ([*GOOD, "relative_margin=-0.1"], "relative_margin=-0.1: "),
        ([*GOOD, "absolute_margin=-1"], "absolute_margin=-1.0: "),
        ([*GOOD, "max_score=nan"], "max_score=nan: "),
        ([*GOOD, "max_score=0.1", "min_score=0.2"], "min_score=0.2: is above max_score=0.1"),
        ([*GOOD, "teacher_max_length=9"], "teacher_max_length=9: "),
        ([*GOOD, "teacher_revision=main"], "teacher_revision=main: "),
        ([*GOOD, "teacher_pair_template=qwen3"], "teacher_pair_template=qwen3: "),
        ([*GOOD, "teacher_score_labels=[1,0]"], "teacher_score_labels=[1,0]: "),
        ([*GOOD, "teacher=t", "teacher_score_labels=[1,1]"], "teacher_score_labels=[1,1]: "),
        ([*GOOD, "teacher_document_windows=true"], "teacher_document_windows=true: "),
        ([*GOOD, "max_length=2"], "max_length=2: "),
        ([*GOOD, "chunk_tokens=0"], "chunk_tokens=0: "),
        ([*GOOD, "query_batch_size=9000"], "query_batch_size=9000: must be from 1 to 8192"),
        ([*GOOD, "seed=-1"], "seed=-1: "),
        ([*GOOD, "timeout=0"], "timeout=0.0: "),
        ([*GOOD, "instruction_format=x"], "instruction_format=x: must have {instruction} and then {text}"),
        ([*GOOD, "corpus={paths: x}"], "corpus[0] has no `path`"),
        ([*GOOD, "sampling=best"], "sampling"),
        ([*GOOD, "negative=4"], "unknown option negative, did you mean negatives?"),
        ([GOOD[0], GOOD[2], "data=[{path: a, name: b/c}]"], "data, a: name=b/c: "),
        ([GOOD[0], GOOD[2], "data=[{path: a, score_scale: 0}]"], "data, a: score_scale=0.0: "),
    ],
)
def test_a_rejected_option_is_named_with_its_value(arguments, sentence):
    with pytest.raises(ConfigError) as caught:
        compose_mine(arguments)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_output_directory_is_outside_the_data(tmp_path):
    with pytest.raises(ConfigError, match=r"output_dir=.*mined is in "):
        compose_mine(["model=m", f"data=[{tmp_path}]", f"output_dir={tmp_path / 'mined'}"])
