"""What the tests of merging share: directories with random weights, the command in this process, its oracle."""

import contextlib
import io
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from embedtrain.commands.merge import compose
from embedtrain.commands.merge import run as main
from embedtrain.distributed.world import World
from tests.small import save_guide, small_model

State = dict[str, Tensor]


def merge(*arguments: str) -> str:
    """Run the command in this process; what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
        main(compose(list(arguments)))
    return " ".join((output.getvalue() + errors.getvalue()).split())


def merge_on_rank(world: World, *arguments: str) -> str:
    return merge(*arguments)


def save_models(folder: Path, count: int, spread: float = 0.3) -> list[Path]:
    """Models near each other, as if trained from the first, each in two files of weights."""
    paths = []
    for index in range(count):
        path = save_guide(small_model("bert"), folder / f"m{index}", seed=0)
        state = load_file(path / "model.safetensors")
        generator = torch.Generator().manual_seed(index)
        for name, tensor in state.items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                state[name] = tensor + spread * max(0.1, float(tensor.std())) * noise
        split_weights(path, state)
        paths.append(path)
    return paths


def split_weights(path: Path, state: State) -> None:
    """Store weights in two files with an index."""
    import json

    (path / "model.safetensors").unlink(missing_ok=True)
    names, weight_map = sorted(state), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def state_of(path: Path) -> State:
    """All weights in the files of a directory."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def is_pooler(name: str) -> bool:
    """Whether the weight is unused by an encoder."""
    return name.startswith("pooler.")


def slerp(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Of two tensors in float64."""
    angle = math.acos(float((a * b).sum() / a.norm() / b.norm()))
    return (math.sin((1 - t) * angle) * a + math.sin(t * angle) * b) / math.sin(angle)


def karcher(tensors: list[Tensor], weights: list[float]) -> Tensor:
    """The mean on the sphere of tensors in float64, times their mean norm, in 1,000 small steps."""
    units = [tensor / tensor.norm() for tensor in tensors]
    mean = sum(w * u for w, u in zip(weights, units, strict=True))
    mean = mean / mean.norm()
    for _ in range(1000):
        logs = []
        for unit in units:
            angle = torch.arccos((mean * unit).sum().clamp(-1, 1))
            logs.append(angle / angle.sin().clamp(min=1e-12) * (unit - angle.cos() * mean))
        mean = mean + 0.1 * sum(w * log for w, log in zip(weights, logs, strict=True))
        mean = mean / mean.norm()
    return mean * sum(w * tensor.norm() for w, tensor in zip(weights, tensors, strict=True))


def ties(tensors: list[Tensor], base: Tensor, weights: list[float], density: float, scale: float) -> Tensor:
    """TIES of tensors in float64."""
    kept = []
    for tensor in tensors:
        change = tensor - base
        threshold = change.abs().float().flatten().topk(max(1, round(density * change.numel()))).values[-1]
        kept.append(torch.where(change.abs().float() >= threshold, change, 0.0))
    sign = sum(w * change for w, change in zip(weights, kept, strict=True)).sign()
    agrees = [((change.sign() == sign) & (change != 0)).double() for change in kept]
    total = sum(w * change * a for w, change, a in zip(weights, kept, agrees, strict=True))
    return base + scale * total / sum(w * a for w, a in zip(weights, agrees, strict=True)).clamp(min=1e-300)


def require_equal(path: Path, expected: State, tolerance: float = 0.0) -> None:
    """Compare the weights of a directory with others in float64; a difference of the last digit is `tolerance` 1e-7."""
    actual = state_of(path)
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        if not tolerance:
            assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
        else:
            difference = (tensor.double() - expected[name].double()).abs().max()
            assert difference <= tolerance * max(1.0, float(expected[name].abs().max())), name
