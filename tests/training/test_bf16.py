"""What bf16 runs round and what they do not, and where bf16 is the default."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from embedtrain.checkpoint.run_directory import RunDirectory
from embedtrain.config.recipe import ModelConfig, ParallelConfig, Precision, Recipe
from embedtrain.distributed.device import has_bf16
from embedtrain.distributed.sharding import resolve_precision
from embedtrain.distributed.world import World, joined_world
from embedtrain.inference.loading.load import load_model
from embedtrain.tracking.console import Console
from embedtrain.training.backward import Backward
from embedtrain.training.setup import choose_precision
from tests.small import parallel, small_model, small_tokenizer
from tests.training.test_losses import LOSSES, cut_for, loss_of, rows_for


class Narrow(TorchDispatchMode):
    """Notes what is computed in less than fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        built = func(*args, **(kwargs or {}))
        for tensor in built if isinstance(built, tuple | list) else [built]:
            if isinstance(tensor, Tensor) and tensor.dtype in (torch.bfloat16, torch.float16):
                self.found.add(str(func))
        return built


def narrow_in_losses(world: World, model: ModelConfig) -> tuple[dict[str, set[str]], set[str]]:
    """Of each loss in a bf16 run what it computes in less than fp32, its backward pass too; and of the model."""
    loaded = load_model(model, parallel(precision=Precision.bf16), world, seed=0, tokenizer=small_tokenizer())
    actual, of_model = {}, set()
    for name, config in LOSSES.items():
        rank_batch = cut_for(rows_for(config, 8), world, loaded.tokenizer, 10_000, 10_000)
        backward = Backward(loaded.encoder, loss_of(config), world, seed=0, dummy=loaded.tokenizer.dummy())
        real = backward.loss_backward
        within = Narrow()

        def watched(*args, within=within, real=real):
            with within:
                return real(*args)

        backward.loss_backward = watched
        with Narrow() as everything:
            output, finite = backward(rank_batch)
        assert finite
        assert output.local_loss.dtype == torch.float32
        actual[name], of_model = within.found, of_model | everything.found
    return actual, of_model


def test_no_loss_rounds_anything_in_a_bf16_run(ranks):
    actual, of_model = ranks(1, narrow_in_losses, small_model("bert"))[0]
    assert any("mm" in name for name in of_model), "the model computes in bf16"
    assert actual == {name: set() for name in LOSSES}


def of_rounded_vectors(world: World) -> dict[str, list[float]]:
    """Each loss of vectors that are bf16 themselves, and of the same in fp32; under autocast, and without."""
    random = torch.Generator().manual_seed(3)
    actual = {}
    for name, config in LOSSES.items():
        if name in ("classifier", "cached"):
            continue  # classes of sentence-transformers, which compute as they do
        rank_batch = cut_for(
            rows_for(config, 8), world, tokenizer=_tokenizer(), chunk_tokens=10_000, activation_tokens=10_000
        )
        count = rank_batch.num_queries + len(rank_batch.batch_info.owners)
        vectors = torch.nn.functional.normalize(torch.randn(count, 32, generator=random), dim=1).bfloat16()
        loss, values = loss_of(config), []
        for given, autocast in ((vectors.float(), False), (vectors, False), (vectors, True)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                output = loss(given[: rank_batch.num_queries], given[rank_batch.num_queries :], rank_batch.batch_info)
            values.append(output.local_loss.item())
        actual[name] = values
    return actual


def _tokenizer():
    from embedtrain.data.tokens import TextTokenizer

    return TextTokenizer(small_tokenizer(), 48)


def test_a_loss_widens_what_it_is_given(ranks):
    for name, (exact, *others) in ranks(1, of_rounded_vectors)[0].items():
        assert others == pytest.approx([exact, exact], rel=1e-6), name


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capabilities", "has"),
    [
        ({"avx2": True, "amx_bf16": False, "avx512_bf16": False}, False),
        ({"avx2": True, "amx_bf16": True}, True),
        ({"avx512_f": True, "avx512_bf16": True}, True),
        ({"neon": True, "bf16": True}, True),
        ({}, False),
    ],
)
def test_processors_with_bf16_instructions(monkeypatch, capabilities, has):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert has_bf16(CPU) is has
    with joined_world() as world:
        assert resolve_precision(Precision.auto, world) is (Precision.bf16 if has else Precision.fp32)
        assert resolve_precision(Precision.bf16, world) is Precision.bf16, "an explicit choice stays"


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists(),
    reason="what the processor has is compared with /proc/cpuinfo, which Linux alone has",
)
def test_this_processor_is_known(monkeypatch):
    words = set(Path("/proc/cpuinfo").read_text().split())
    has = bool(words & {"amx_bf16", "avx512_bf16", "bf16", "svebf16"})
    assert has_bf16(CPU) is (has and hasattr(torch.cpu, "get_capabilities"))


def chosen(run_dir: Path, precision: Precision = Precision.auto) -> Precision:
    recipe = Recipe(name="a", parallel=ParallelConfig(precision=precision))
    with joined_world() as world:
        return choose_precision(recipe, RunDirectory(run_dir), world, Console()).parallel.precision


def test_a_resumed_run_keeps_its_precision(monkeypatch, tmp_path, capsys):
    """Also on other processors, unless the user chooses another one."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True}, raising=False)
    assert chosen(tmp_path) is Precision.fp32
    assert "precision: fp32, not every CPU has bf16 instructions" in capsys.readouterr().out
    (tmp_path / "recipe.yaml").write_text("parallel: {precision: bf16}\n")
    assert chosen(tmp_path) is Precision.fp32, "without a checkpoint nothing is resumed"
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    capsys.readouterr()
    assert chosen(tmp_path) is Precision.bf16
    assert "parallel.precision=fp32 is faster" in capsys.readouterr().out
    assert chosen(tmp_path, Precision.fp32) is Precision.fp32
    (tmp_path / "recipe.yaml").write_text("parallel: [")
    assert chosen(tmp_path) is Precision.fp32
