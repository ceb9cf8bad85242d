"""The report's computations: similarities, ranks, separation, projection, thinning, axes, formats; against oracles."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from embedtrain.config.compose import to_plain
from embedtrain.config.kinds import KINDS, load_kind
from embedtrain.config.recipe import Recipe
from embedtrain.report.changes import RESAMPLES, interval
from embedtrain.report.chart import (
    NumberFormat,
    evenly_spaced,
    format_value,
    round_numbers,
    step_axis,
    tick_labels,
    value_axis,
)
from embedtrain.report.page import options_of
from embedtrain.report.runs import Series, read_runs
from embedtrain.report.sample import PairRelation, Role, Vectors
from embedtrain.report.sample_section import (
    PairFamily,
    cosines,
    group_pairs,
    nearest_documents,
    project,
    select_queries,
    shorten,
)
from tests.tracking.report.runs import make_run, make_sample


@pytest.fixture
def vectors():
    values = np.random.default_rng(1).normal(size=(20, 6)).astype(np.float32)
    return Vectors(values / np.linalg.norm(values, axis=1, keepdims=True), 7)


def test_separation_equals_counting_by_hand(vectors):
    sample = make_sample()
    held_out, trained = group_pairs(sample)
    assert [kind.name for kind in held_out.kinds] == ["positives", "chance pairs"] or not len(held_out.kinds[1].pairs)
    assert (held_out.family, held_out.held_out, trained.origin) == (PairFamily.search, True, "train.jsonl")
    assert len(held_out.kinds[0].pairs) == 5
    assert len(held_out.kinds[-1].pairs) == 5 * 5 - 5
    assert len(trained.kinds[-1].pairs) == 5 * 5 - 5 - 5, "neither positives nor hard negatives are chance"
    positives, chance = (cosines(vectors, held_out.kinds[which].pairs) for which in (0, -1))
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in itertools.product(positives.tolist(), chance.tolist())]
    assert held_out.separation(vectors) == pytest.approx(np.mean(wins))


def test_neighbours_equal_a_full_sort(vectors):
    sample = make_sample()
    assert select_queries(sample) == [0, 1, 2, 3, 4], "only held-out queries, each once"
    for query in select_queries(sample):
        result = nearest_documents(sample, vectors, query)
        documents = [number for number, text in enumerate(sample.texts) if text.held_out and text.role is Role.document]
        by_hand = sorted(documents, key=lambda number: -float(vectors.values[number] @ vectors.values[query]))
        assert [document.text for document in result.nearest] == by_hand[:5]
        assert result.rank == by_hand.index(5 + query) + 1
        assert [document.relation for document in result.nearest] == [
            PairRelation.positive if number == 5 + query else None for number in by_hand[:5]
        ]


def test_the_projection_is_the_first_two_principal_components(vectors):
    projection = project(vectors)
    centred = vectors.values.astype(np.float64) - vectors.values.mean(axis=0)
    spectrum = np.linalg.svd(centred, compute_uv=False) ** 2
    assert projection.variance == pytest.approx(spectrum[:2].sum() / spectrum.sum())
    assert np.square(projection.points).sum() == pytest.approx(spectrum[:2].sum())
    rotation, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(6, 6)))
    rotated = Vectors((vectors.values @ rotation).astype(np.float32), 9)
    assert project(rotated, projection).points == pytest.approx(projection.points, abs=1e-4), "rotated back"
    assert project(Vectors(np.ones((9, 4), dtype=np.float32), 1)) is None


def test_the_interval_equals_a_plain_bootstrap():
    """Of one set, and of the mean over two sets of different sizes, whose queries are drawn separately."""
    generator = np.random.default_rng(3)
    one, two = generator.normal(0.02, 0.3, 200), generator.normal(-0.01, 0.1, 50)
    for sets in ([one], [one, two]):
        means = [
            np.mean([np.mean([of[generator.integers(len(of))] for _ in of]) for of in sets]) for _ in range(RESAMPLES)
        ]
        low, high = interval(sets)
        error = 4 * np.std(means) / math.sqrt(0.025 * RESAMPLES)  # of an estimated quantile
        assert (low, high) == pytest.approx(tuple(np.percentile(means, [2.5, 97.5])), abs=error)
        assert interval(sets) == (low, high)
        # The interval of a mean of many independent values is nearly that of the normal distribution.
        expected = 1.96 * math.sqrt(sum(of.var() / len(of) for of in sets)) / len(sets)
        assert (high - low) / 2 == pytest.approx(expected, rel=0.1)
    assert interval([np.full(5, 0.25)]) == (0.25, 0.25)


def test_thinned_series_keep_spikes_and_holes():
    values = np.sin(np.arange(50_000) / 900)
    values[31_007], values[12_345], values[400] = 9.0, -7.0, math.nan
    series = Series(np.arange(50_000), values)
    few = series.thinned(300)
    assert len(few.steps) < 500
    assert few.finite.max() == 9.0
    assert few.finite.min() == -7.0
    assert np.isnan(few.values).any(), "the hole is kept"
    assert list(few.steps) == sorted(set(few.steps))
    assert (few.steps[0], few.steps[-1]) == (0, 49_999)
    mean = series.smoothed()
    assert mean.values[20_000] == pytest.approx(values[19_500:20_501].mean())
    assert Series(np.arange(20), np.arange(20.0)).smoothed() is None
    assert evenly_spaced(100, 5) == [0, 25, 50, 74, 99]


@pytest.mark.parametrize(
    ("values", "form", "expected"),
    [
        ([0.0, 0.93], NumberFormat.plain, ["0.00", "0.25", "0.50", "0.75", "1.00"]),
        ([0.3, 0.7], NumberFormat.fraction, ["30%", "40%", "50%", "60%", "70%"]),
        ([5.0], NumberFormat.plain, ["0", "2", "4", "6", "8"]),
        ([0.0], NumberFormat.fraction, ["0%", "25%", "50%", "75%", "100%"]),
        ([-2.0], NumberFormat.plain, ["-3", "-2", "-1", "0"]),
        ([1.0, 1.0, 2.0, 1e6], NumberFormat.plain, ["1", "100", "10k", "1M"]),
        ([0.0, 2e-5], NumberFormat.small, ["0", "5e-6", "1e-5", "1.5e-5", "2e-5"]),
        ([0.0, 52_000.0], NumberFormat.rate, ["0", "20k", "40k", "60k"]),
        ([1e-300, 2e-300], NumberFormat.plain, None),
        ([1e300, -1e300], NumberFormat.plain, None),
        ([], NumberFormat.plain, None),
    ],
)
def test_axes_have_round_numbers(values, form, expected):
    axis = value_axis(np.array(values), 100.0, 0.0, form)
    texts = tick_labels(axis, form)
    if expected is not None:
        assert texts == expected
    assert len(set(texts)) == len(texts)
    positions = axis.positions(np.array(values))
    assert ((positions >= -1e-9) & (positions <= 100 + 1e-9)).all()


def test_axes_of_steps_have_whole_numbers():
    assert step_axis(0, 1, 0, 100).ticks == (0.0, 1.0)
    assert step_axis(7, 7, 0, 100).ticks == (7.0,)
    assert all(tick == int(tick) for tick in step_axis(3, 8, 0, 100).ticks)
    assert round_numbers(0, 100_000, 4) == (0, 25_000, 50_000, 75_000, 100_000)


def test_formats_of_numbers_and_texts():
    assert [format_value(value) for value in (0.78912, 12.3456, 12_345.6, 3.2e-5, 0.0, None, math.nan)] == [
        "0.7891", "12.35", "12,346", "3.2e-05", "0.0000", "—", "—",
    ]  # fmt: skip
    assert shorten(" a\n\tb\x00\x1b[31m\u202ec ") == "a b[31mc"
    assert shorten("x" * 1000, 10) == "x" * 10 + " …"
    assert shorten("\ud800") == "(nothing)"


def test_options_that_differ_from_the_default_are_marked(tmp_path):
    (run,) = read_runs([make_run(tmp_path / "run", optim={"lr": 0.5}, data={"train": [{"path": "a"}, {"path": "b"}]})])
    options = {option.name: option for group in options_of(run).values() for option in group}
    assert (options["optim.lr"].value, options["optim.lr"].is_default) == ("0.5", False)
    assert options["optim.eps"].is_default
    assert options["data.train[1].path"].value == "b"


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_of_a_kind_are_not_marked(tmp_path, kind):
    model = to_plain(load_kind(kind).options(path="m"))
    (run,) = read_runs([make_run(tmp_path / "run", model=None)])
    run = replace(run, recipe={**run.recipe, "model": model})
    changed = {option.name for option in options_of(run)["model"] if not option.is_default}
    assert changed == ({"model.path"} if kind == Recipe().model.kind else {"model.path", "model.kind"})


def test_the_kind_of_a_file_is_not_imported(tmp_path):
    (run,) = read_runs([make_run(tmp_path / "run", model={"kind": "evil:Kind", "own": 1})])
    options = {option.name: option for option in options_of(run)["model"]}
    assert (options["model.own"].is_default, options["model.kind"].value) == (False, "evil:Kind")


def test_a_run_of_an_earlier_version_has_the_names_of_options_of_this_one(tmp_path):
    before = make_run(tmp_path / "before", optim={"lr": 2e-5, "min_lr": 2e-6}, loss={"matryoshka_dims": [8]})
    (run,) = read_runs([before])
    options = {option.name: option.value for group in options_of(run).values() for option in group}
    assert (options["optim.min_lr_ratio"], options["loss.matryoshka.dims"]) == ("0.1", "[8]")
    assert not {"optim.min_lr", "loss.matryoshka_dims"} & options.keys()
