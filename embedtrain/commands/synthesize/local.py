"""A causal language model of transformers that writes on the ranks of the command, each with a model of its own.

N: texts that are written together; V: size of the vocabulary.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from embedtrain.commands.synthesize.types import Answer, Request, WriterConfig
from embedtrain.config.recipe import Precision
from embedtrain.distributed.device import explain_out_of_memory
from embedtrain.distributed.sharding import resolve_precision
from embedtrain.errors import ModelError
from embedtrain.formats.export_record import verify_settings, verify_weights
from embedtrain.formats.hub import resolve_directory
from embedtrain.formats.transformers import read_tokenizer
from embedtrain.inference.loading.load import quiet_libraries
from embedtrain.models.rope import num_positions
from embedtrain.models.security import (
    BoundExceeded,
    require_bounded_numbers,
    require_safe_config,
    require_safe_files,
    run_bounded,
)
from embedtrain.utils.files import Checksums, checksum_of, expand_user
from embedtrain.utils.formatting import one_line

if TYPE_CHECKING:
    from embedtrain.commands.synthesize.asker import Task, Work
    from embedtrain.distributed.world import World

_RENDER_SECONDS = 30.0
_DTYPES = {Precision.bf16: torch.bfloat16, Precision.fp32: torch.float32}
# Files that answers depend on.
_FILES = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "*.py")


class LocalBackend:
    """A causal language model on each rank. The constructor is a collective.

    Raises ConfigError or ModelError for a model that cannot write, on all ranks.
    """

    def __init__(self, writer: WriterConfig, world: "World", option: str) -> None:
        quiet_libraries()
        self._world, self._num_together = world, writer.concurrency
        directory, config = Path(), AutoConfig.for_model("llama")
        with world.fail_together("opening the language model"):
            directory = resolve_directory(writer.model, writer.revision, f"{option}.model", f"{option}.revision")
            require_safe_files(directory, trust_remote_code=writer.trust_remote_code)
            verify_settings(directory)
            verify_weights(directory, world.local_rank, world.local_size)
            config = _read_config(directory, option, trust_remote_code=writer.trust_remote_code)
            self._prompts = _Prompts(directory, trust_remote_code=writer.trust_remote_code)
        default = Precision.auto if world.device.type == "cuda" else Precision.fp32
        precision = resolve_precision(writer.precision or default, world)
        self._positions = num_positions(config)
        with world.fail_together("loading the language model"), explain_out_of_memory(world.device, world.local_size):
            self._model = _load(directory, config, _DTYPES[precision], trust_remote_code=writer.trust_remote_code)
            self._model.to(world.device)
        self._sampling = _take_generation_config(self._model, self._prompts.tokenizer)
        is_folder = expand_user(writer.model).is_dir()
        short = directory.name if is_folder else writer.model
        self.name = f"{short}@{_digest(directory, precision, world)}"
        self.where = f"{short} writes on the ranks of this command; documents go to no server"
        self.workers = world.size

    def groups(self, requests: Sequence[Request]) -> list[list[int]]:
        """Requests with prompts of similar lengths."""
        lengths = [len(ids) for ids in self._prompts.of(requests)]
        order = sorted(range(len(requests)), key=lambda i: (requests[i].max_new_tokens, lengths[i], i))
        return [order[start : start + self._num_together] for start in range(0, len(order), self._num_together)]

    def prompt_tokens(self, request: Request) -> int:
        """Exactly."""
        return len(self._prompts.of([request])[0])

    def run(self, work: "Work") -> None:
        """Write, a group at a time; near the end of a budget, a text at a time."""
        if self._world.device.type == "cuda":
            torch.cuda.set_device(self._world.device)  # each thread has its own, and this is not the main one
        queue: list[tuple[list[Task], list[list[int]], Any]] = []
        for group in sorted(work.groups, key=lambda group: min(task.position for task in group)):
            prompts = self._prompts.of([task.request for task in group])
            fits = [self._fits(work, task, prompt) for task, prompt in zip(group, prompts, strict=True)]
            tasks = list(itertools.compress(group, fits))
            prompts = list(itertools.compress(prompts, fits))
            if any(not task.is_known for task in tasks):
                queue.append((tasks, prompts, self._reserve(work, tasks, prompts)))
        for tasks, prompts, reserved in queue:
            if reserved.result():
                self._write(work, tasks, prompts)
            elif not work.is_stopping:
                for task, prompt in zip(tasks, prompts, strict=True):
                    if not task.is_known and self._reserve(work, [task], [prompt]).result():
                        self._write(work, [task], [prompt])

    def _fits(self, work: "Work", task: "Task", prompt: list[int]) -> bool:
        """Whether the model has positions for the prompt and the answer; otherwise the task gets its reply."""
        needed = len(prompt) + task.request.max_new_tokens
        fits = len(prompt) > 0 and (not self._positions or needed <= self._positions)
        if not (fits or task.is_known):
            work.fail(
                task,
                f"a prompt of {len(prompt):,} tokens and {task.request.max_new_tokens:,} new ones exceed the "
                f"{self._positions:,} positions of the model",
            )
        return fits

    def _reserve(self, work: "Work", tasks: "list[Task]", prompts: list[list[int]]) -> Any:
        own = [
            (task, len(prompt) + task.request.max_new_tokens)
            for task, prompt in zip(tasks, prompts, strict=True)
            if not task.is_known
        ]
        return work.reserve([task for task, _ in own], sum(tokens for _, tokens in own))

    def _write(self, work: "Work", tasks: "list[Task]", prompts: list[list[int]]) -> None:
        """Write the answers to a group, of which all are computed, so that each is what it always is."""
        own = [task for task in tasks if not task.is_known]
        most = {
            task.position: len(prompt) + task.request.max_new_tokens
            for task, prompt in zip(tasks, prompts, strict=True)
        }
        if work.is_stopping:
            work.release(own, sum(most[task.position] for task in own))
            return
        attempts = {task.position: work.begin(task, most[task.position]) for task in own}
        with explain_out_of_memory(self._world.device, self._world.local_size):
            written = self._generate(tasks, prompts)
        for task, prompt, ids in zip(tasks, prompts, written, strict=True):
            if task.position in attempts:
                work.answer(attempts[task.position], self._answer(task.request, prompt, ids))

    def _answer(self, request: Request, prompt: list[int], ids: list[int]) -> Answer:
        """The answer of the tokens that were written, as far as an end-of-text token, or the limit of the request."""
        ends = self._sampling.ends
        end = next((index for index, token in enumerate(ids[: request.max_new_tokens]) if token in ends), None)
        kept = ids[: request.max_new_tokens] if end is None else ids[:end]
        text = str(self._prompts.tokenizer.decode(kept, skip_special_tokens=True))
        return Answer(text, len(prompt), len(kept) + (end is not None), "length" if end is None else "stop")

    @torch.inference_mode()
    def _generate(self, tasks: "list[Task]", prompts: list[list[int]]) -> list[list[int]]:
        """The tokens that follow each prompt."""
        device, longest = self._world.device, max(map(len, prompts))
        pad = self._sampling.pad
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        generator: Any = self._model
        output: Tensor = generator.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(task.request.max_new_tokens for task in tasks),
            logits_processor=LogitsProcessorList([_Sampler(tasks, self._sampling, device)]),
        )
        rows: list[list[int]] = output[:, longest:].tolist()
        return rows


class _Sampling:
    """What the files of a model say about how it writes.

    Attributes:
        ends: tokens that end a text.
        pad: a token for padding, which is masked.
        warpers: of the logits [N, V] of texts that are sampled, after their temperature.
    """

    def __init__(self, stored: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        ends = stored.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        if tokenizer.eos_token_id is not None:
            self.ends.add(tokenizer.eos_token_id)
        self.pad = next((t for t in (tokenizer.pad_token_id, *sorted(self.ends)) if t is not None), 0)
        self.warpers: list[LogitsProcessor] = []
        if stored.top_k:
            self.warpers.append(TopKLogitsWarper(int(stored.top_k)))
        if stored.top_p is not None and 0 < stored.top_p < 1:
            self.warpers.append(TopPLogitsWarper(float(stored.top_p)))


def _take_generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> _Sampling:
    """Read the sampling of a model, and leave it a configuration that has nothing else of its files.

    `generate` takes whatever a call leaves open from there, among it what names other models, code and files.
    """
    holder: Any = model
    stored: GenerationConfig = holder.generation_config or GenerationConfig()
    sampling = _Sampling(stored, tokenizer)
    holder.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=sorted(sampling.ends) or None,
        pad_token_id=sampling.pad,
        repetition_penalty=stored.repetition_penalty,
    )
    return sampling


class _Sampler(LogitsProcessor):  # type: ignore[misc]
    """Makes the most probable token a sample: adds Gumbel noise to logits [N, V] that are divided by the temperature.

    Each text has a generator of its own, whose seed is the key of its request: what is written depends neither on the
    texts beside it nor on the rank.
    """

    def __init__(self, tasks: "Sequence[Task]", sampling: _Sampling, device: torch.device) -> None:
        self._warpers = sampling.warpers
        self._rows = [index for index, task in enumerate(tasks) if task.request.temperature > 0]
        sampled = [tasks[index] for index in self._rows]
        temperatures = [task.request.temperature for task in sampled]
        self._temperatures = torch.tensor(temperatures, device=device, dtype=torch.float32)[:, None]
        self._generators = [torch.Generator(device).manual_seed(int(task.key[:16], 16) % 2**63) for task in sampled]

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """Scores [N, V] whose largest is the token that follows."""
        if not self._rows:
            return scores
        logits = scores[self._rows].float() / self._temperatures
        for warper in self._warpers:
            logits = warper(input_ids[self._rows], logits)
        noise = torch.empty_like(logits)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        scores = scores.float().clone()
        scores[self._rows] = logits - noise.log()
        return scores


class _Prompts:
    """Turns messages into tokens, by the chat template of a tokenizer, or without one as paragraphs.

    A ModelError if the template cannot render a system message followed by one of the user, or either alone.
    """

    def __init__(self, directory: Path, *, trust_remote_code: bool) -> None:
        self.tokenizer = read_tokenizer(directory, trust_remote_code=trust_remote_code)
        self._has_template = bool(self.tokenizer.chat_template)
        self._has_system = True
        if self._has_template:
            self._has_system = self._renders(directory, ["system", "user"])
            if not self._has_system and not self._renders(directory, ["user"]):
                raise ModelError(f"{directory}: its chat template cannot render a message of the user: {self._problem}")

    def of(self, requests: Sequence[Request]) -> list[list[int]]:
        """The tokens of each request."""
        texts = [self._text([{"role": m.role, "content": m.content} for m in request.messages]) for request in requests]
        if not texts:
            return []
        encoded: list[list[int]] = self.tokenizer(texts, add_special_tokens=not self._has_template)["input_ids"]
        end = self.tokenizer.eos_token_id
        if not self._has_template:  # an end-of-text token, which some tokenizers append, would end the text
            encoded = [ids[:-1] if ids and ids[-1] == end else ids for ids in encoded]
        return encoded

    def _text(self, messages: list[dict[str, str]]) -> str:
        if not self._has_template:
            return "\n\n".join(message["content"] for message in messages) + "\n\n"
        if not self._has_system:
            messages = [{"role": "user", "content": "\n\n".join(message["content"] for message in messages)}]
        # Models that reason first would spend their tokens on it; templates of others ignore the setting.
        return str(
            self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        )

    def _renders(self, directory: Path, roles: list[str]) -> bool:
        """Whether the template renders messages of these roles. A ModelError if it does not end."""

        def render() -> str:
            messages = [{"role": role, "content": f"\ue000{role}\ue001"} for role in roles]
            try:
                text = self._text(messages)
            except MemoryError:
                raise
            except Exception as error:  # a template may raise anything
                return one_line(error)
            missing = [message["content"] for message in messages if message["content"] not in text]
            return "it leaves out the text of a message" if missing else ""

        try:
            self._problem = str(run_bounded(render, _RENDER_SECONDS))
        except BoundExceeded as error:
            raise ModelError(f"{directory}: rendering its chat template {error}") from None
        return not self._problem


def _read_config(directory: Path, option: str, *, trust_remote_code: bool) -> Any:
    require_bounded_numbers(directory / "config.json")
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # files may hold anything
        raise ModelError(f"{option}.model={directory} cannot be opened: {one_line(error)}") from None
    require_safe_config(config, str(directory))
    return config


def _load(directory: Path, config: Any, dtype: torch.dtype, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model; a ModelError unless its files have all weights of a causal language model, as safetensors."""
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # files may hold anything
        raise ModelError(f"{directory} cannot be opened as a causal language model: {one_line(error)}") from None
    missing = sorted(map(str, report["missing_keys"])) or sorted(map(str, report["mismatched_keys"]))
    if missing:
        raise ModelError(f"{directory} is no causal language model: it has no weights of {missing[0]}")
    loaded: PreTrainedModel = model
    return loaded.eval()


def _digest(directory: Path, precision: Precision, world: "World") -> str:
    """12 hexadecimal digits of what answers depend on: the files and the precision. A collective."""
    paths: list[str] = []
    with world.fail_together("listing the files of the language model"):
        if world.is_main:
            paths = sorted({str(path) for pattern in _FILES for path in directory.glob(pattern) if path.is_file()})
    paths = world.broadcast(paths)
    contents: dict[str, list[str]] = {}
    with world.fail_together("reading the files of the language model"):
        for path in paths[world.rank :: world.size]:
            contents[Path(path).name] = Checksums.of(Path(path)).files["."][1]
    merged = {name: blocks for of_rank in world.gather(contents) for name, blocks in of_rank.items()}
    return checksum_of({"files": merged, "precision": precision.value})[:12]
