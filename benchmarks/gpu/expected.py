"""The tables of docs/gpus.md: what `plan` computes for one card of 24 GB, one of 80 GB and a node of eight."""

from collections.abc import Iterable

from benchmarks.gpu.models import sized_named
from benchmarks.measure import markdown
from embedtrain.commands.plan import compose_plan
from embedtrain.commands.plan.compute import plan
from embedtrain.inference.loading.load import quiet_libraries

# Options of `plan`. TFLOP/s are 40 % of the dense bf16 peak in the datasheets of an RTX 4090 and an H100.
MACHINES = {
    "One card of 24 GB": ("gpus=1", "gpu_memory=24", "tflops=66"),
    "One card of 80 GB": ("gpus=1", "gpu_memory=80", "tflops=400"),
    "One node of eight cards of 80 GB": ("gpus=8", "gpu_memory=80", "tflops=400"),
}
ROWS_A_CARD, LENGTH = 256, 128
LARGER = ("XLM-R-large", "Qwen3-0.6B", "Qwen3-4B")
MODELS = {
    **{name: (name, ()) for name in ("XLM-R-base", *LARGER)},
    "Qwen3-4B, LoRA": ("Qwen3-4B", ("model.lora.rank=16",)),
    "Qwen3-4B, moments in bf16": ("Qwen3-4B", ("optim.state_dtype=bf16", "optim.betas=[0.9,0.99]")),
    "Qwen3-4B, moments in int8": ("Qwen3-4B", ("optim.state_dtype=int8",)),
}
HEADER = ("model", "strategy", "memory, GiB", "tokens of a step that are encoded once", "largest chunk_tokens",
          "a step, s")  # fmt: skip


def tables() -> str:
    """A section of the page for each machine."""
    quiet_libraries()
    sections = (f"### {machine}\n\n{table(machine, MODELS)}" for machine in MACHINES)
    return "\n\n".join(sections) + "\n"


def table(machine: str, models: Iterable[str]) -> str:
    """The rows of these models."""
    return markdown(HEADER, [_row(MACHINES[machine], label) for label in models])


def _row(machine: tuple[str, ...], label: str) -> list[str]:
    cards = int(machine[0].removeprefix("gpus="))
    name, more = MODELS[label]
    sized = sized_named(name)
    config = ", ".join(f"{key}: {_written(value)}" for key, value in sized.config.items())
    arguments = (
        *machine, *more,
        f"model.config={{{config}}}", f"model.pooling={sized.pooling.value}", "model.tokenizer=none",
        f"train.global_batch_size={ROWS_A_CARD * cards}", f"tokens_per_text={LENGTH}", "texts_per_row=2",
    )  # fmt: skip
    planned = plan(*compose_plan(list(arguments)))
    best, work = planned.best, planned.local
    if not best.fits:
        return [label, f"does not fit: {best.name}", f"{best.memory.total / 2**30:.1f}", "-", "-", "-"]
    tokens = work.texts * planned.work.tokens_per_text
    once = min(1.0, planned.work.activation_tokens / tokens) if planned.work.activation_tokens else 0.0
    return [
        label, best.name, f"{best.memory.total / 2**30:.1f}", f"{once:.0%}", f"{planned.largest_chunk or 0:,}",
        f"{best.traffic.seconds:.2f}",
    ]  # fmt: skip


def _written(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_written(inner)}" for key, inner in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    print(tables(), end="")
