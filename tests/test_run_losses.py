"""Whole runs with every loss: from files to a model, on any number of ranks, stopped and resumed."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embedtrain.commands.export import ExportOptions
from embedtrain.commands.export import run as export_main
from embedtrain.config.losses import LOSSES
from embedtrain.distributed.world import World
from embedtrain.inference.quantised import QUANTISATION_FILE, read_ranges
from tests.runs import losses, metric_rows, run_without_base
from tests.small import batch, save_guide, save_small, small_model, text

BASE = [
    "name=t", "model.pooling=mean", "train.global_batch_size=10", "train.log_every=1", "train.chunk_tokens=60",
    "train.activation_tokens=130", "train.steps=3", "parallel.strategy=fsdp", "parallel.precision=fp32",
    "optim.lr=1e-3",
    "export.check=false", "tracking.report=false",
]  # fmt: skip


def run(world: World, *arguments: str) -> str:
    """Train like the command; the standard output of this rank."""
    return run_without_base(world, *BASE, *arguments)[0]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A model, a guide of another architecture, and 26 rows in each layout that a loss may need."""
    folder = tmp_path_factory.mktemp("losses")
    save_small(small_model("xlm-roberta"), folder / "model")
    guide = small_model("bert")
    save_guide(replace(guide, config=guide.config | {"hidden_size": 48}), folder, seed=1)
    rows: dict[str, list[dict]] = {"pairs": [], "teacher": [], "triplets": [], "classes": [], "vectors": []}
    for i, row in enumerate(batch(26).rows):
        positive, negatives = row.documents.texts[0], [*row.documents.texts[1:], text(400 + i, 5)]
        rows["pairs"].append({"sentence1": row.query, "sentence2": positive, "score": (i * 7 % 11) / 10})
        scores = {"pos_scores": [0.9], "neg_scores": [(i * j % 5) / 10 for j in range(1, len(negatives) + 1)]}
        rows["teacher"].append({"query": row.query, "pos": [positive], "neg": negatives} | scores)
        rows["triplets"].append({"anchor": row.query, "positive": positive, "negative": negatives[-1]})
        rows["classes"].append({"text": positive, "label": i % 3})
        rows["vectors"].append({"text": positive, "label": [((i + j) % 7) / 7 - 0.4 for j in range(32)]})
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def options(inputs: Path, file: str, output_dir: Path, *more: str) -> list[str]:
    path = inputs / f"{file}.jsonl"
    return [f"model.path={inputs / 'model'}", f"data.train=[{path}]", f"output_dir={output_dir}", *more]


# Loss -> the file of its rows, and its options.
RUNS: dict[str, tuple[str, list[str]]] = {
    "infonce": ("teacher", ["loss.learn_temperature=true", "loss.directions=[query_document,query_query]"]),
    "siglip": ("triplets", []),
    "cosent": ("pairs", []),
    "angle": ("pairs", []),
    "cosine_mse": ("pairs", ["loss.matryoshka.dims=[32,8]"]),
    "contrastive": ("triplets", []),
    "online_contrastive": ("triplets", []),
    "triplet": ("teacher", []),
    "batch_triplet": ("classes", ["loss.mining=semi_hard"]),
    "distill_scores": ("teacher", []),
    "margin_mse": ("teacher", []),
    "bce": ("triplets", ["loss.temperature=0.1"]),
    "softmax": ("teacher", ["loss.temperature=0.1"]),
    "listnet": ("teacher", ["loss.temperature=0.1"]),
    "ranknet": ("teacher", ["loss.temperature=0.1"]),
    "lambdaloss": ("triplets", ["loss.temperature=0.1"]),
    "plistmle": ("teacher", ["loss.temperature=0.1"]),
    "adr_mse": ("teacher", ["loss.temperature=0.1"]),
    "mse": ("teacher", []),
    "distill_embeddings": ("vectors", ["loss.distance=mse"]),
    "distill_similarities": ("triplets", ["loss.teacher={guide}", "loss.directions=[query_document,document_query]"]),
    "similarity_mse": ("triplets", ["loss.teacher={guide}"]),
    "orthogonal": ("triplets", []),
    "combined": (
        "teacher",
        ["loss.losses=[{name: infonce, temperature: 0.2}, {name: distill_scores, weight: 0.5}, {name: orthogonal}]"],
    ),
    "sentence_transformers": ("triplets", ["loss.class_name=TripletLoss", "loss.arguments={triplet_margin: 0.5}"]),
}


def test_every_loss_has_a_run():
    others = {
        "custom": "tests/losses/test_custom.py",
        "xtr": "tests/test_run_late_interaction.py",
        "m3": "tests/test_run_m3.py",
    }
    assert set(RUNS) == set(LOSSES) - set(others), f"runs of the others are in {others}"


@pytest.mark.parametrize("names", [("combined", "batch_triplet"), pytest.param(tuple(RUNS), marks=pytest.mark.slow)])
def test_every_loss_trains_from_files_to_a_model(ranks, inputs, tmp_path, names):
    """26 rows in batches of 10, the last of 6 rows; the same on one rank and on three."""
    for name in names:
        file, more = RUNS[name][0], _with_guide(RUNS[name][1], inputs)
        results = {}
        for size in (1, 3):
            out = tmp_path / f"{name}-{size}"
            ranks(size, run, *options(inputs, file, out, f"loss={name}", *more))
            results[size] = losses(out)
            assert (out / "model" / "model.safetensors").is_file()
        assert results[3] == pytest.approx(results[1], rel=1e-4, abs=1e-6), name
        assert len(set(results[1].values())) == 3, name


@pytest.mark.slow
def test_a_guide_and_a_teacher_of_another_architecture(ranks, inputs, tmp_path):
    guide = inputs / "guide"
    teacher = f"{{name: distill_embeddings, teacher: {guide}, project: true}}"
    parts = f"loss.losses=[{{name: infonce, guide: {guide}}}, {teacher}]"
    results = {}
    for size in (1, 3):
        out = tmp_path / str(size)
        output = ranks(size, run, *options(inputs, "teacher", out, "loss=combined", parts, "model.query_prompt='mu '"))[
            0
        ]
        assert f"guide or teacher {guide}: BertModel" in output
        assert "the loss has trained parameters: parts.distill_embeddings.projection.weight [48, 32]" in output
        results[size] = losses(out)
        assert {"infonce", "distill_embeddings", "accuracy"} <= metric_rows(out)[0].keys()
    assert results[3] == pytest.approx(results[1], rel=1e-4)


WITH_PARAMETERS = {
    "a temperature": ("teacher", ["loss=infonce", "loss.learn_temperature=true", "loss.temperature=0.2"]),
    "a classifier": (
        "pairs",
        ["loss=sentence_transformers", "loss.class_name=SoftmaxLoss", "loss.arguments={num_labels: 3}"],
    ),
}


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [("sharded", (2, 1)), *(pytest.param(layout, (2, 3, 1), marks=pytest.mark.slow) for layout in ("sharded", "full"))],
)
@pytest.mark.parametrize("owned", ["a temperature", pytest.param("a classifier", marks=pytest.mark.slow)])
def test_parameters_of_a_loss_are_saved_and_resumed(ranks, inputs, tmp_path, owned, layout, sizes):
    """Bit-equal on the same number of ranks, equal on another number."""
    file, more = WITH_PARAMETERS[owned]
    if owned == "a classifier":
        lines = [json.loads(line) for line in (inputs / "pairs.jsonl").read_text().splitlines()]
        numbered = [json.dumps(line | {"score": i % 3}) for i, line in enumerate(lines)]
        (tmp_path / "pairs.jsonl").write_text("\n".join(numbered))
        more = [*more, f"data.train=[{tmp_path / 'pairs.jsonl'}]"]
    common = [*more, "train.steps=6", "checkpoint.every=3", "checkpoint.keep=9", f"checkpoint.layout={layout}"]
    ranks(2, run, *options(inputs, file, tmp_path / "whole", *common))
    expected = losses(tmp_path / "whole")
    if owned == "a temperature":
        temperatures = [row["temperature"] for row in metric_rows(tmp_path / "whole")]
        assert temperatures[0] == pytest.approx(0.2, rel=1e-6)
        assert len(set(temperatures)) == 6, "the temperature is trained"
    for size in sizes:
        resumed = tmp_path / str(size)
        shutil.copytree(tmp_path / "whole", resumed)
        shutil.rmtree(resumed / "checkpoints" / "step-00000006")
        ranks(size, run, *options(inputs, file, resumed, *common))
        assert losses(resumed) == (expected if size == 2 else pytest.approx(expected, rel=1e-5))


def test_ranges_of_a_loss_are_resumed_and_exported(ranks, inputs, tmp_path):
    """Bit-equal on the same number of ranks; the exports of the run and of its checkpoint have the same file."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    more = [
        *(
            "loss.matryoshka.precisions=[float,int8,binary]",
            "loss.matryoshka.precision_warmup=0.5",
            "loss.matryoshka.dims=[32,16]",
        ),
        *("train.steps=4", "checkpoint.every=2", "checkpoint.keep=9", "checkpoint.layout=full"),
    ]
    ranks(2, run, *options(inputs, "triplets", whole, *more))
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000004")
    ranks(2, run, *options(inputs, "triplets", resumed, *more))
    assert losses(resumed) == losses(whole)
    last = metric_rows(whole)[-1]
    assert {"loss@32", "loss@32-float", "loss@16-int8", "loss@16-binary"} <= last.keys()
    expected = (whole / "model" / QUANTISATION_FILE).read_bytes()
    assert (resumed / "model" / QUANTISATION_FILE).read_bytes() == expected
    exported = export_main(ExportOptions(run=str(whole), output_dir=str(tmp_path / "exported"), check=False))
    assert (exported / QUANTISATION_FILE).read_bytes() == expected
    (file,) = (whole / "checkpoints" / "step-00000004").glob("weights*.safetensors")
    saved = load_file(file)
    ranges = read_ranges(exported)
    assert ranges.keys() == {32, 16}
    for dimension, each in ranges.items():
        assert torch.stack([each.low, each.high]).equal(saved[f"loss.inner.ranges.{dimension}"])
    # `evaluate` reads them: tests/test_calibrate.py.


def test_a_step_over_several_global_batches(ranks, inputs, tmp_path):
    """The same on any number of ranks; an epoch of 3 batches is 2 steps; a resumed run continues correctly."""
    more = ["train.gradient_accumulation_steps=2", "loss.temperature=0.2", "train.steps=null", "train.epochs=2"]
    results = {}
    for size in (1, 3):
        ranks(
            size,
            run,
            *options(inputs, "triplets", tmp_path / str(size), *more, "checkpoint.every=1", "checkpoint.keep=9"),
        )
        results[size] = losses(tmp_path / str(size))
    assert list(results[1]) == [1, 2, 3]
    assert results[3] == pytest.approx(results[1], rel=1e-5)
    for step in (2, 3):
        shutil.rmtree(tmp_path / "3" / "checkpoints" / f"step-{step:08d}")
    ranks(3, run, *options(inputs, "triplets", tmp_path / "3", *more))
    assert losses(tmp_path / "3") == results[3]
    with pytest.raises(
        AssertionError,
        match=r"train\.gradient_accumulation_steps=2, .*_steps=1",
    ):
        ranks(1, run, *options(inputs, "triplets", tmp_path / "3", *more, "train.gradient_accumulation_steps=1"))


def _with_guide(arguments: list[str], inputs: Path) -> list[str]:
    return [argument.replace("{guide}", str(inputs / "guide")) for argument in arguments]


BAD_OPTIONS = [
    ("triplets", ["loss=infonce", "loss.temperature=0"], r"loss\.temperature=0\.0: must be above 0"),
    ("triplets", ["loss.matryoshka.dims=[64,16]"], r"loss\.matryoshka\.dims=\[64, 16\]: .* 32"),
    ("triplets", ["loss=distill_scores"], r"distill_scores needs .*score.*anchor, positive, negative"),
    ("pairs", ["loss=triplet"], r"loss=triplet"),
    ("triplets", ["loss=batch_triplet"], r"batch_triplet"),
    ("classes", ["loss=infonce"], r"infonce|query and a positive"),
    ("triplets", ["loss=distill_embeddings", "loss.teacher={guide}"], r"loss\.teacher=.* 48 dimensions .* 32"),
]


@pytest.mark.parametrize(("file", "more", "message"), BAD_OPTIONS)
def test_bad_options_fail_before_training(ranks, inputs, tmp_path, file, more, message):
    more = _with_guide(more, inputs)
    with pytest.raises(AssertionError, match=rf"(Config|Data)Error: .*({message})"):
        ranks(2, run, *options(inputs, file, tmp_path / "run", *more))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("row", "loss", "message"),
    [
        ({"query": "mu", "pos": [], "neg": ["nu"]}, "infonce", r'rows\.jsonl:2: "pos" is empty'),
        (
            {"query": "mu", "pos": ["xi"], "neg": ["nu"], "pos_scores": [1.0]},
            "distill_scores",
            r'rows\.jsonl:2: .*distill_scores .*"neg_scores"',
        ),
        (
            {"query": "mu", "pos": ["xi"], "neg": ["nu"], "pos_scores": [1.0], "neg_scores": [float("nan")]},
            "margin_mse",
            r"rows\.jsonl:2: .*neg_scores",
        ),
        ({"query": "mu", "pos": ["xi"], "neg": []}, "triplet", r"rows\.jsonl:2: .*triplet needs a hard negative"),
    ],
)
def test_a_bad_row_is_reported_with_file_and_line(ranks, inputs, tmp_path, row, loss, message):
    first = (inputs / "teacher.jsonl").read_text().splitlines()[0]
    (tmp_path / "rows.jsonl").write_text(f"{first}\n{json.dumps(row)}\n")
    with pytest.raises(AssertionError, match=rf"DataError: .*{message}"):
        ranks(2, run, *options(tmp_path, "rows", tmp_path / "run", f"model.path={inputs / 'model'}", f"loss={loss}"))
