"""The benchmarks: texts have the documented lengths, results are compared, a failing row does not stop a table."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from sentence_transformers import CrossEncoder
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from benchmarks import late_interaction, memory_traffic, pipeline_ablation, reranking, scale, sparse, synthetic_rows
from benchmarks.comparison import Batches, StepResults, comparison_cells, make_step_context
from benchmarks.gpu import __main__ as gpu_main
from benchmarks.gpu import expected
from benchmarks.gpu import models as gpu_models
from benchmarks.gpu import training as gpu
from benchmarks.inputs import MINILM
from benchmarks.measure import ROUNDS, Timed, WrongResult
from benchmarks.products import Products
from benchmarks.workloads import Workload, descriptions, equal_lengths, load_rows, question_passage, short_pairs, web
from embedtrain.commands.synthesize.prompts import Prompts
from embedtrain.config.evaluation import ScanDtype
from embedtrain.config.recipe import SELECTIVE, Precision
from embedtrain.data.tokens import TextTokenizer
from embedtrain.distributed.world import World
from embedtrain.errors import ConfigError
from embedtrain.inference.loading.load import quiet_libraries
from tests.conftest import ROOT
from tests.marks import slow_but
from tests.pretend_cuda.device import host_reads

QUICK = ("search",)


@pytest.mark.parametrize(
    ("workload", "padding"),
    [(question_passage(), (1.9, 2.2)), (short_pairs(), (1.9, 2.3)), (web(), (2.5, 3.1)), (equal_lengths(), (1.0, 1.0))],
    ids=lambda value: value.name if isinstance(value, Workload) else "",
)
def test_workloads_have_the_documented_padding(workload: Workload, padding: tuple[float, float]) -> None:
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(MINILM), 256)
    steps, factors = ROUNDS * workload.steps, []
    data = workload.data(steps, tokenizer)
    assert data.plan.steps_per_epoch == steps
    for step in range(steps):
        lengths = data.batch(step).tokens.lengths.reshape(2, workload.num_pairs)
        assert lengths.max() <= workload.max_length
        factors.append(workload.num_pairs * lengths.max(axis=1).sum() / lengths.sum())
    assert padding[0] <= np.mean(factors) <= padding[1]


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (StepResults((1.0, 2.1), 10, 20), r"losses differ by 0\.1"),
        (StepResults((1.0, 2.0), 11, 20), "token counts differ"),
    ],
)
def test_different_results_raise(theirs: StepResults, message: str) -> None:
    ours = [Timed(StepResults((1.0, 2.0), 10, 12), 1.0)]
    assert comparison_cells("a table", ours, [Timed(ours[0].value, 3.0)], 1e-5)[2].startswith("3.00")
    with pytest.raises(WrongResult, match=message):
        comparison_cells("a table", ours, [Timed(theirs, 3.0)], 1e-5)


def test_recorded_products_have_the_operations_of_the_step() -> None:
    """Counted by torch with plain attention, which computes no product twice; flash attention computes Q K^T twice."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    texts = torch.randn(3, 7, 32)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        layer(texts).sum().backward()
    once = 2 * 3 * 7 * 7 * 32  # Q K^T of all texts and heads
    products = Products(lambda _: layer(texts).sum().backward())
    products.call(0)
    operations = [2 * int(np.prod(a.shape)) * b.shape[-1] for a, b in products.factors]
    assert sum(operations) == counter.get_total_flops() + once
    assert products.alone(1) is None

    evaluated = Products(lambda _: layer.linear1(texts))
    with torch.inference_mode():
        evaluated.call(0)
    assert [(a.shape, b.shape) for a, b in evaluated.factors] == [((21, 32), (32, 64))]


@pytest.mark.quick("ListNet")
@pytest.mark.parametrize("compared", reranking.LOSSES, ids=lambda compared: compared.name)
def test_a_reranker_takes_the_steps_of_sentence_transformers(
    ranks: Any, tmp_path: Path, compared: reranking.Compared
) -> None:
    """Losses of several optimizer steps in fp32, on lists of mixed lengths of which some are cut."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig(**sizes, num_labels=1, initializer_range=0.2)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(MINILM).save_pretrained(tmp_path)
    ours, theirs = ranks(1, _losses, str(tmp_path), compared.name)[0]
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert abs(ours[0] - ours[-1]) > 1e-3, "nothing was learned"


def _losses(world: World, folder: str, loss: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    compared = next(compared for compared in reranking.LOSSES if compared.name == loss)
    model = reranking.load_reranker(folder, Precision.fp32, world, 48)
    rows = [
        {"query": query, "pos": [text], "neg": [other for _, other in descriptions()[40 * n + 40 : 40 * n + 43]]}
        for n, (query, text) in enumerate(descriptions()[:20])
    ]
    batches = Batches(load_rows(rows, 48, 4, model.tokenizer), steps=5, rounds=1)
    cross = CrossEncoder(folder, device="cpu", max_length=48)
    sides = (
        reranking.OurSteps(model, world, batches, compared.build()),
        reranking.TheirSteps(cross, compared.theirs(cross), Precision.fp32, batches),
    )
    ours, theirs = (steps(1) for steps in sides)
    assert ours.real == theirs.real
    return ours.losses, theirs.losses


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> list[gpu.Variant]:
    """Two variants, and the minimal number of steps."""
    monkeypatch.setattr(gpu, "WARM", 1)
    monkeypatch.setattr(gpu, "STEPS", 1)
    return [gpu.VARIANTS[0], next(variant for variant in gpu.VARIANTS if variant.cached is None)]


def test_a_failing_row_reports_its_error_and_the_next_rows_run(
    variants: list[gpu.Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    sized, failures = gpu_models.tiny(gpu_models.MODELS[-1]), [torch.OutOfMemoryError("too much"), ConfigError("never")]
    load = gpu.load

    def failing_load(*args: object, **options: object) -> object:
        if failures:
            raise failures.pop()
        return load(*args, **options)

    monkeypatch.setattr(gpu, "load", failing_load)
    table = gpu.table([sized], [variants[0], *variants], matmul=64).splitlines()[-3:]
    assert "failed: never" in table[0]
    assert "out of memory" in table[1]
    cached = int(table[2].split(" | ")[3].removesuffix("%"))
    assert 40 <= cached <= 75


@pytest.mark.slow
def test_a_variant_with_a_different_loss_is_reported_as_wrong(
    variants: list[gpu.Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, reports = gpu.train_step, []

    def wrong_from_the_fourth_step(*args: Any) -> Any:
        reports.append(step(*args))
        return replace(reports[-1], loss=reports[-1].loss * (1.0 if len(reports) <= 3 else 1.1))

    monkeypatch.setattr(gpu, "train_step", wrong_from_the_fourth_step)
    sized = gpu_models.tiny(gpu_models.MODELS[0])
    table = gpu.table([sized], [variants[0], variants[0]], matmul=64).splitlines()[-2:]
    assert "wrong" not in table[0]
    assert "wrong: its loss is" in table[1]


def reads_of_a_step(world: World, name: str) -> dict[str, int]:
    """What makes the host wait for the device in the second step of a tiny model."""
    sized = gpu_models.sized_named(name, small=True)
    with gpu_models.saved(sized, torch.device("cpu")) as folder:
        loaded = gpu_models.load(folder, world, kind=sized.kind)
    run = make_step_context(loaded, world, loss=gpu.loss_of(sized.kind))
    batch = gpu.rank_batch(gpu_models.RandomTexts(sized.pairs, seed=0), run, loaded, sized.chunk_tokens, 600)
    gpu.train_step(run, batch)
    with host_reads() as reads:
        gpu.train_step(run, batch)
    return dict(reads)


@pytest.mark.slow  # steps of a run are in tests/training/test_waits.py
@pytest.mark.parametrize("name", ["XLM-R-large", *gpu_main.OTHER_KINDS])
def test_measured_steps_wait_for_the_device_as_those_of_a_run(cuda_ranks: Any, name: str) -> None:
    """Once: otherwise the tables would show waits that training does not have."""
    (reads,) = cuda_ranks(1, reads_of_a_step, name)
    assert [(line.split(":")[0], count) for line, count in reads.items()] == [("training/step.py", 1)]


def expected_on(machine: str) -> str:
    """The table of docs/gpus.md."""
    page = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
    return page.partition(f"### {machine}\n\n")[2].partition("\n\n")[0]


@pytest.mark.quick("One card of 24 GB-models0")
@pytest.mark.parametrize(
    ("machine", "models"),
    [
        ("One card of 24 GB", ["XLM-R-base"]),
        ("One node of eight cards of 80 GB", ["Qwen3-4B, LoRA"]),
        *(pytest.param(machine, list(expected.MODELS), marks=pytest.mark.slow) for machine in expected.MACHINES),
    ],
)
def test_what_to_expect_of_gpus_is_what_the_plan_computes(machine: str, models: list[str]) -> None:
    quiet_libraries()
    computed, documented = expected.table(machine, models).splitlines(), expected_on(machine).splitlines()
    assert [line for line in documented if line in computed] == computed
    assert len(documented) == 2 + len(expected.MODELS)


def test_stored_tables_are_replaced_and_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "DEVICE.md"
    assert gpu_main.missing(path) == list(gpu_main.TABLES)
    gpu_main.store(path, "search", ("Search", "| 1 |"))
    gpu_main.store(path, "losses", ("Losses", "| 2 |"))
    gpu_main.store(path, "search", ("Search", "| 3 |"))
    text = path.read_text()
    assert text.startswith("# DEVICE\n")
    assert text.index("| 2 |") < text.index("| 3 |"), "tables keep their order"
    assert "| 1 |" not in text
    assert gpu_main.missing(path) == [name for name in gpu_main.TABLES if name not in ("search", "losses")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in gpu_main.TABLES]
)
def test_every_table_runs_with_tiny_models(name: str) -> None:
    """In a process of its own, as on a GPU: only the sizes and the device are new there."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--small", name]
    result = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    _, _, *rows = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert rows
    for problem in ("failed", "wrong", "out of memory", "nan"):
        assert problem not in "".join(rows)


@pytest.mark.slow
def test_in_batch_negatives_of_late_interaction_are_compared() -> None:
    """Ours, by MaxSim and by XTR, and sentence-transformers' in new processes, on a few texts."""
    tables = late_interaction.measure(small=True).split("\n\n")
    assert [table.splitlines()[-1].count("/") for table in tables] >= [5, 3]


@pytest.mark.slow
def test_the_vocabulary_head_is_compared() -> None:
    """With the logits of all tokens, in new processes, on a few texts."""
    assert sparse.measure(small=True).splitlines()[-1].count("/") == 3


def _lineage(value: float, compressed: float) -> dict[str, Any]:
    """Made-up evaluations in which every stage measures `value` on every set, and the second member more."""
    sets = (*pipeline_ablation.SELECTION, *pipeline_ablation.HELD_OUT)
    stages = []
    for stage in {stage for _, stage, _ in pipeline_ablation.ROWS} - {"best"} | {"tuned-2"}:
        better = 0.1 if stage == "tuned-2" else 0.0
        metrics = {name: {"ndcg@10": value + better} for name in sets}
        metrics |= {f"{name}@{pipeline_ablation.COMPRESSED}": {"ndcg@10": compressed} for name in sets}
        stages.append({"stage": f"{stage}-evaluation", "do": "evaluate", "metrics": metrics})
    return {"stages": stages}


def test_the_ablation_compares_the_stages_of_each_seed() -> None:
    results = [pipeline_ablation.metrics_of(_lineage(value, value - 0.05)) for value in (0.5, 0.6, 0.7)]
    rows = {
        line.split(" | ")[0].removeprefix("| "): line.split(" | ")
        for line in pipeline_ablation.table(results).splitlines()
    }
    assert rows["after weak training"][1] == "0.6000 ± 0.1000"
    assert rows["the best of three members on these sets"][2] == "0.7000 ± 0.1000"
    assert rows["merged: the mean of three members"][4] == "-0.1000 ± 0.0000"
    assert rows["128 bits, rescored from int8"][4] == "-0.0500 ± 0.0000"


def test_repetitions_of_the_ablation_differ_in_their_seeds() -> None:
    first, second = (pipeline_ablation.recipe_with_variants(number)["stages"] for number in range(2))
    for name, (original, _) in pipeline_ablation.VARIANTS.items():
        assert first[name]["seed"] == first[original]["seed"] != second[name]["seed"]
        assert "repeat" not in first[name]
    assert first["tuned"]["loss"] == second["tuned"]["loss"] == second["without-mining"]["loss"]


def test_the_rule_reads_the_document_of_a_prompt() -> None:
    """And writes lines like its synopsis, as the language model of the table of synthetic rows."""
    description = (
        "Zstd is a fast compressor, which reaches good ratios.\n\nIt has a long history.\n"
        "This package contains the command line tools and their manual."
    )
    prompt = Prompts(None).render("title", documents=[description], count=2, examples=[])
    body = {"messages": [{"role": message.role, "content": message.content} for message in prompt]}
    queries = ["fast compressor", "command line tools and their manual"]
    assert json.loads(synthetic_rows.answer(body)) == {"queries": queries}
    assert synthetic_rows.synopses("metapackage") == ["metapackage"]


def test_the_table_of_synthetic_rows_compares_the_runs_of_each_seed() -> None:
    names = [name for _, name, _ in synthetic_rows.ROWS]
    results = [{name: base + 0.1 * names.index(name) for name in names} for base in (0.1, 0.2, 0.3)]
    rows = [line.split(" | ") for line in synthetic_rows.table(results).splitlines()[2:]]
    assert [row[1] for row in rows[:2]] == ["0.2000 ± 0.1000", "0.3000 ± 0.1000"]
    assert rows[3][2:] == ["trained further on synthetic rows", "+0.1000 ± 0.0000 |"]


@pytest.mark.slow
def test_the_searches_of_the_scale_table_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each memory, on each number of ranks; a second call reads what the first has measured."""
    monkeypatch.setattr(scale, "SIZES", (2000, 4000))
    monkeypatch.setattr(scale, "_cases", lambda _size: [(None, 1), (ScanDtype.int8, 2)])
    table = scale._search_table(tmp_path)
    assert table.count("\n") == 5
    assert scale._search_table(tmp_path) == table
    monkeypatch.setattr(scale, "_result_of", lambda *_: next((tmp_path / "results").glob("*.json")))
    encoding = [{"texts": 3, "ranks": 1, "tokens": 9, "tokenizing": 0.1, "encoding": 0.2}] * 2
    (tmp_path / "results" / "encoding.json").write_text(json.dumps(encoding))
    assert "encoding 3 texts, 9 tokens of a rank" in scale._planned_table(tmp_path)


def test_kernels_read_their_arguments_and_write_their_results() -> None:
    """A product counts all three matrices; views and allocations are no kernels; an expanded row is read once."""
    left, right = torch.empty(3, 5, device="meta"), torch.empty(5, 7, device="meta")
    counts = memory_traffic.counted(lambda: (left.T @ torch.empty(3, 7, device="meta"), left @ right))
    assert (counts.launches, counts.flops) == (2, 2 * (5 * 3 * 7 + 3 * 5 * 7))
    assert (counts.read, counts.written) == (4 * (15 + 21 + 15 + 35), 4 * (35 + 21))
    assert counts.between == 0
    pointwise = memory_traffic.counted(lambda: left + torch.empty(5, device="meta").expand(3, 5))
    assert (pointwise.read, pointwise.written, pointwise.between) == (4 * (15 + 5), 4 * 15, 4 * 35)
    table, ids = torch.empty(1000, 8, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    assert memory_traffic.counted(lambda: nn.functional.embedding(ids, table)).read == 4 * 16 + 8 * 2


@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="TorchInductor's names of torch 2.13")
@pytest.mark.parametrize("name", slow_but(["XLM-R-large"], memory_traffic.MODELS))
def test_compiled_and_recomputed_blocks_are_counted(name: str) -> None:
    """Compiled blocks launch fewer kernels for the same products; recomputation keeps less, and computes more."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        step = memory_traffic.Step(name, small=True)
        eager, compiled = step.block_counts(), step.compiled_counts()
        selective, recomputed = step.block_counts(SELECTIVE), step.block_counts(True)
        whole = step.encoder_counts()
    assert eager.flops == selective.flops == compiled.flops < recomputed.flops
    assert recomputed.kept < selective.kept < eager.kept
    assert compiled.launches < eager.launches < selective.launches < recomputed.launches
    assert compiled.between < eager.between
    assert whole.launches > step.num_blocks * eager.launches
