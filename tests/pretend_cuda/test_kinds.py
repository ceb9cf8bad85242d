"""Runs of every kind of model on the pretended device, of two ranks: the numbers of the CPU, and one wait per step."""

import contextlib
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from embedtrain.commands.filter import compose as compose_filter
from embedtrain.commands.filter import run as filter_rows
from embedtrain.commands.mine import compose as compose_mine
from embedtrain.commands.mine import run as mine
from embedtrain.commands.search import compose as compose_search
from embedtrain.commands.search import run as search
from embedtrain.distributed.world import World
from embedtrain.training import loop
from embedtrain.training.step import StepReport
from tests.marks import slow_but
from tests.pretend_cuda.device import host_reads
from tests.pretend_cuda.steps import on_cpu
from tests.runs import evaluation_metrics, losses, metric_rows, rewind_run, run_without_base
from tests.small import batch, save_language_model, save_small, small_model, small_tokenizer, text, write_beir

STEPS = 3
OPTIONS = [
    "name=t", "train.global_batch_size=10", "train.log_every=1", "train.chunk_tokens=60", "train.activation_tokens=130",
    f"train.steps={STEPS}", "parallel.strategy=fsdp", "parallel.precision=fp32", "optim.lr=1e-3", "optim.eps=1e-3",
    "export.check=false", "tracking.report=false",
    "checkpoint.every=2", "evaluation.every=3",
]  # fmt: skip


def save_backbone(folder: Path, architecture: str = "xlm-roberta", num_layers: int = 2) -> Path:
    model = small_model(architecture)
    assert model.config is not None
    return save_small(replace(model, config=model.config | {"num_hidden_layers": num_layers}), folder)


def save_words(folder: Path) -> Path:
    """A language model, whose vocabulary head a sparse model takes."""
    model = small_model("bert", kind="sparse", pooling=None)
    assert model.config is not None
    return save_language_model(replace(model, config=model.config | {"vocab_size": len(small_tokenizer())}), folder)


@dataclass(frozen=True)
class Kind:
    """How a model is made, and the options of its run."""

    options: tuple[str, ...]
    save: Callable[[Path], Path] = save_backbone


EXPANSION = [
    *("model.dimension=8", "model.query_expansion=min", "model.expansion_length=7", "model.document_length=12"),
    "model.skiplist_words=[alpha, beta]",
]
KINDS = {
    "cross-encoder": Kind(
        ("model.kind=cross_encoder", "loss=softmax", "data.batch_negatives=2", "evaluation.rerank_depth=4")
    ),
    "late interaction": Kind(("model.kind=late_interaction", *EXPANSION)),
    "late interaction, XTR": Kind(
        ("model.kind=late_interaction", *EXPANSION, "loss=xtr", "loss.top_k=9",
         "loss.learn_temperature=true", "loss.matryoshka.dims=[8,4]")
    ),
    "sparse": Kind(
        ("model.kind=sparse", "sparsity.query_weight=0.01", "sparsity.document_weight=0.01"), save_words
    ),
    "sparse, sums": Kind(("model.kind=sparse", "model.pooling=sum", "sparsity.document_weight=0.01"), save_words),
    "sparse, static queries": Kind(
        ("model.kind=sparse", "model.queries=static", "model.train_query_weights=true",
         "sparsity.document_weight=0.01"), save_words
    ),
    "m3": Kind(("model.kind=m3", "model.dimension=8", "loss=m3", "loss.self_distillation_start_step=2")),
    "static embeddings, moments in int8": Kind(
        ("model.pooling=mean", "model.config={model_type: static_embedding, vocab_size: 64, hidden_size: 64}",
         "model.tokenizer={model}", "optim.state_dtype=int8")
    ),
    "heads, dimensions and precisions": Kind(
        ("model.pooling=mean", "model.heads=[{out: 24, activation: tanh}]", "loss.matryoshka.dims=[24,16,8]",
         "loss.matryoshka.dims_per_step=2", "loss.matryoshka.precisions=[float,int8,binary]",
         "loss.matryoshka.precisions_per_step=2")
    ),
    "layers": Kind(
        ("model.pooling=mean", "loss.matryoshka.layers=[1,2,3]", "loss.matryoshka.layers_per_step=1",
         "loss.matryoshka.layer_kl=0.5",
         "optim.ema=0.5"),
        lambda folder: save_backbone(folder, "modernbert", 4),
    ),
    "mixed negatives, Muon": Kind(("model.pooling=mean", "loss.mixed_pairs=2", "optim.name=muon")),
}  # fmt: skip


@contextlib.contextmanager
def counted_steps() -> Iterator[list[Counter[str]]]:
    """What makes the host wait in each step of a run."""
    counts, train_step = [], loop.train_step

    def counted(*arguments: Any, **options: Any) -> StepReport:
        with host_reads() as reads:
            report = train_step(*arguments, **options)
        counts.append(reads)
        return report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", counted)
        yield counts


def run(world: World, cpu: bool, *arguments: str) -> list[dict[str, int]]:
    """Train, and return what makes the host wait in each step."""
    with counted_steps() as counts:
        run_without_base(on_cpu(world) if cpu else world, *OPTIONS, *arguments)
    return [dict(reads) for reads in counts]


def assert_one_read(steps: list[dict[str, int]]) -> None:
    """Of each step, by the ranks' agreement that all is finite, after the optimizer is queued."""
    for reads in steps:
        own = {line: count for line, count in reads.items() if not line.startswith("checkpoint/")}  # of its thread
        assert [(line.split(":")[0], count) for line, count in own.items()] == [("training/step.py", 1)], own


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("kinds"))


def write_inputs(folder: Path) -> Path:
    """26 rows with a negative each, and an evaluation set of 6 queries."""
    rows = [
        {"query": row.query, "pos": list(row.documents.texts[:1]), "neg": [*row.documents.texts[1:], text(400 + i, 5)]}
        for i, row in enumerate(batch(26).rows)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_beir(folder / "dev", 6)
    return folder


def options_of(kind: Kind, inputs: Path, folder: Path) -> list[str]:
    model = kind.save(folder / "model")
    options = [option.replace("{model}", str(model)) for option in kind.options]
    if not any(option.startswith("model.config=") for option in options):
        options.append(f"model.path={model}")
    return [*options, f"data.train=[{inputs / 'train.jsonl'}]", f"evaluation.sets=[{inputs / 'dev'}]"]


QUICK = ("late interaction",)


@pytest.mark.parametrize("name", slow_but(QUICK, KINDS))
def test_runs(ranks, cuda_ranks, inputs, tmp_path, name):
    """In fp32: trained, evaluated, saved, resumed and exported; commands have the results of the CPU as well."""
    options = options_of(KINDS[name], inputs, tmp_path)
    device, cpu, resumed = (tmp_path / folder for folder in ("device", "cpu", "resumed"))
    for steps in cuda_ranks(2, run, False, *options, f"output_dir={device}"):
        assert len(steps) == STEPS
        assert_one_read(steps)
    cuda_ranks(2, run, True, *options, f"output_dir={cpu}")
    rewind_run(device, resumed, 2)
    cuda_ranks(2, run, False, *options, f"output_dir={resumed}")
    assert losses(resumed) == losses(device)
    for found, expected in zip(metric_rows(device), metric_rows(cpu), strict=True):
        for key in {"step", "loss", "grad_norm"} & found.keys():
            assert found[key] == pytest.approx(expected[key], rel=1e-4), key
    for step, metrics in evaluation_metrics(cpu).items():
        assert evaluation_metrics(device)[step] == pytest.approx(metrics, rel=1e-4)
    if name != "cross-encoder":  # the evaluation has scored with it
        expected, found = (
            pool(1, use, device / "model", inputs, tmp_path / folder)
            for pool, folder in ((ranks, "used-on-cpu"), (cuda_ranks, "used-on-device"))
        )
        assert found == expected
        assert all(found[0])


def use(_world: World, model: Path, inputs: Path, out: Path) -> list[str]:
    """What `search` prints, and the rows that `mine` and `filter` write."""
    common = [f"model={model}", "precision=fp32", f"corpus={inputs / 'dev' / 'corpus.jsonl'}"]
    rows = f"data=[{inputs / 'train.jsonl'}]"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        search(compose_search([*common, "query=alpha beta gamma"]))
        mine(compose_mine([*common, rows, "relative_margin=null", "scores=false", f"output_dir={out / 'mined'}"]))
        filter_rows(compose_filter([*common, rows, "keep_rank=20", f"output_dir={out / 'kept'}"]))
    found = [line for line in printed.getvalue().splitlines() if re.match(r"\s*\d+\.\d{3}  d\d", line)]
    return ["\n".join(found), *((out / name / "train.jsonl").read_text() for name in ("mined", "kept"))]


PACKED = [name for name in KINDS if not name.startswith("static")]


@pytest.mark.parametrize("name", slow_but(["m3"], PACKED))
def test_packed_steps(cuda_ranks, inputs, tmp_path, name):
    """In bf16, which the kernel for packed texts computes: losses are those of the CPU up to rounding."""
    options = options_of(KINDS[name], inputs, tmp_path)
    options += ["parallel.precision=bf16", "model.attention=packed", "evaluation.sets=[]", "train.steps=2"]
    for steps in cuda_ranks(2, run, False, *options, f"output_dir={tmp_path / 'device'}"):
        assert_one_read(steps)
    cuda_ranks(2, run, True, *options, f"output_dir={tmp_path / 'cpu'}")
    found, expected = (losses(tmp_path / folder) for folder in ("device", "cpu"))
    assert found == pytest.approx(expected, rel=2e-2)
