"""Whole runs of late-interaction models: from rows to a model, on any number of ranks, stopped and resumed."""

import json
import re

import pytest

from embedtrain.errors import CheckpointError
from tests.commands import call
from tests.runs import losses, metric_rows, rewind_run, run_without_base
from tests.small import save_small, small_model, write_beir, write_rows
from tests.test_run_cross_encoder import BASE

OPTIONS = [
    *("model.dimension=8", "model.query_expansion=min", "model.expansion_length=7", "model.document_length=12"),
    "model.skiplist_words=[alpha, beta]",
]


def run(world, *arguments):
    return run_without_base(world, *BASE, *arguments)[0]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("late_interaction")
    write_rows(folder / "train.jsonl", 26)
    write_beir(folder / "dev", 6)
    for architecture in ("xlm-roberta", "qwen3"):
        save_small(small_model(architecture, dropout=0.1), folder / architecture)
    return folder


def options(inputs, output_dir, *more, model="xlm-roberta"):
    return [
        "model.kind=late_interaction", f"model.path={inputs / model}", *OPTIONS,
        f"data.train=[{inputs / 'train.jsonl'}]", f"evaluation.sets=[{inputs / 'dev'}]", f"output_dir={output_dir}",
        "checkpoint.every=2", *more,
    ]  # fmt: skip


def test_trained_and_resumed(ranks, inputs, tmp_path):
    """On the same number of ranks a resumed run has the losses of an undisturbed one, dropout included."""
    output = ranks(2, run, *options(inputs, tmp_path / "run"))[0]
    assert "a new projection of tokens to 8 dimensions, maxsim" in output
    exported = call("export", f"run={tmp_path / 'run'}", f"output_dir={tmp_path / 'exported'}", "check=true")
    assert re.search(r"compared with the encoder: largest difference [\d.]+e-\d+, allowed 1e-04", exported)
    resumed = rewind_run(tmp_path / "run", tmp_path / "resumed", 2)
    ranks(2, run, *options(inputs, resumed))
    assert losses(resumed) == losses(tmp_path / "run")
    undisturbed, again = (metric_rows(folder)[-1] for folder in (tmp_path / "run", resumed))
    assert undisturbed["ndcg@10"] == again["ndcg@10"]
    with pytest.raises(AssertionError, match=r"model\.document_length") as raised:
        ranks(1, run, *options(inputs, resumed, "model.document_length=9", "train.steps=4"))
    assert CheckpointError.__name__ in str(raised.value)


LOSSES = {
    "xtr": [
        *("loss=xtr", "loss.top_k=9", "loss.learn_temperature=true", "optim.groups=[{match: ^loss, lr: 1e-2}]"),
        "loss.matryoshka.dims=[8,4]",
    ],
    "combined": [
        "loss=combined",
        "loss.losses=[{name: infonce}, {name: distill_scores, normalize_scores: true}, {name: margin_mse}]",
    ],
}


@pytest.mark.parametrize("name", ["xtr", pytest.param("combined", marks=pytest.mark.slow)])
def test_losses(ranks, inputs, tmp_path, name):
    """From a file to a model: the losses and gradient norms of three steps do not depend on the number of ranks."""
    model, rows = save_small(small_model("xlm-roberta"), tmp_path / "model"), tmp_path / "scored.jsonl"
    lines = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    scored = [
        {**row, "neg": [*row["neg"], "gamma delta"], "pos_scores": [0.9]}
        | {"neg_scores": [n % 5 / 10 for n in range(len(row["neg"]) + 1)]}
        for row in lines
    ]
    rows.write_text("\n".join(map(json.dumps, scored)) + "\n")
    common = [*LOSSES[name], f"model.path={model}", f"data.train=[{rows}]", "evaluation.sets=[]"]
    for size in (1, 2):
        ranks(size, run, *options(inputs, tmp_path / str(size), *common))
    one, two = (metric_rows(tmp_path / str(size)) for size in (1, 2))
    for left, right in zip(one, two, strict=True):
        for key in left.keys() & {"step", "loss", "grad_norm"}:
            assert right[key] == pytest.approx(left[key], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (3, []),
        (4, ["strategy=hsdp", "shard_size=2", "activation_checkpointing=true"]),
        (2, ["strategy=ddp"]),
    ],
    ids=["fsdp", "hsdp", "ddp"],
)
def test_every_layout_has_the_losses_of_one_rank(ranks, inputs, tmp_path, size, layout):
    model = save_small(small_model("xlm-roberta"), tmp_path / "model")
    common = [f"model.path={model}", "loss.temperature=0.5"]
    ranks(1, run, *options(inputs, tmp_path / "one", *common))
    ranks(size, run, *options(inputs, tmp_path / "many", *common, *(f"parallel.{option}" for option in layout)))
    one, many = (metric_rows(tmp_path / name) for name in ("one", "many"))
    for left, right in zip(one, many, strict=True):
        for name in left.keys() & {"step", "loss", "grad_norm", "ndcg@10"}:
            assert right[name] == pytest.approx(left[name], rel=1e-4)


@pytest.mark.slow
def test_adapters_train_the_new_projection(ranks, inputs, tmp_path):
    more = ("model.lora.rank=2", "optim.lr=1e-2", "export.check=true", "train.steps=12")
    output = ranks(2, run, *options(inputs, tmp_path / "run", *more, model="qwen3"))[0]
    assert ", in full: dense; " in output
    values = list(losses(tmp_path / "run").values())
    assert sum(values[-4:]) < sum(values[:4])
