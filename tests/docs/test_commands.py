"""Every command in the pages composes, and passes the checks that it makes before its work begins.

Its options exist, have the right types and can be combined. With `make test-all`, it runs up to its work: the model,
the rows and the evaluation sets are such as it needs, small ones that stand where the page says: `stand_ins.py`.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import yaml

from embedtrain.config.commands import COMMANDS
from embedtrain.config.compose import compose_recipes
from embedtrain.errors import ConfigError, EmbedtrainError
from tests.conftest import ROOT
from tests.docs.commands import COMPOSED, WHOLE, WORK, Command, check, commands, compose
from tests.docs.pages import blocks, inline_code, pages
from tests.docs.stand_ins import ABSOLUTE, OF_PAGE

_HERE = re.compile(r"^cat > (?P<path>\S+) <<'(?P<end>\w+)'\n(?P<text>.*?)^(?P=end)$", re.MULTILINE | re.DOTALL)

SHELL = ("bash", "sh", "console", "")


def files_of(page: Path) -> dict[str, str]:
    """The files that a page has the reader write: here-documents, and blocks with a title."""
    files = {}
    for block in blocks(page):
        files |= {match["path"]: match["text"] for match in _HERE.finditer(block.text)}
        if block.title is not None:
            files[block.title] = block.text
    return files


def write_files(page: Path, folder: Path) -> None:
    for path, text in files_of(page).items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def commands_of(page: Path) -> list[Command]:
    shell = [block.text for block in blocks(page) if block.language in SHELL and not block.excused]
    whole = [text for text in inline_code(page) if "=" in text and "..." not in text]
    return [command for text in (*shell, *whole) for command in commands(text.replace("recipe=NAME", "recipe=minilm"))]


# Checked on another page, which has the same files.
_CHECKED: set[Command] = set()
# Of runs of other kinds than dense, which `stand_ins.py` has not: composed alone.
_OTHER_RUNS = ("run=runs/modern_colbert",)
# Its commands compose all stages of a pipeline several times, as tests/pipeline does.
_SLOW = "pipelines.md"


def failure(page: Path, command: Command, error: Exception) -> str:
    return f"{page.name}: embedtrain {command.name} {' '.join(command.arguments)}: {error}"


def composed_commands(page: Path, folder: Path, checked: Collection[Command] = ()) -> list[tuple[Command, Any]]:
    """The commands of a page, except `checked`, with the options that they compose."""
    write_files(page, folder)
    composed = []
    for command in dict.fromkeys(map(relative, commands_of(page))):
        if command in checked:
            continue
        try:
            composed.append((command, compose(command)))
        except EmbedtrainError as error:
            if not command.may_fail:
                pytest.fail(failure(page, command, error))
        except SystemExit as error:  # after --help and --cfg
            assert not error.code, command
    return composed


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page.name == _SLOW else page for page in pages()],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_commands_of_a_page_compose(page, page_folder):
    composed_commands(page, page_folder)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_pass_their_checks(page, page_folder, stand_ins):
    has_own_files = page.name in OF_PAGE or bool(files_of(page))
    composed = composed_commands(page, page_folder, () if has_own_files else _CHECKED)
    stand_ins.put(f"{page.read_text(encoding='utf-8')} {composed}", page.name, page_folder)
    for command, options in composed:
        if any(word in _OTHER_RUNS for word in command.arguments):
            continue
        try:
            check(command, options)
        except EmbedtrainError as error:
            if not command.may_fail:
                pytest.fail(failure(page, command, error))
    if not has_own_files:
        _CHECKED.update(command for command, _ in composed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("loss=margin_mse",), "pos_scores"),
        (("loss.matryoshka.dims=[1000]",), "1000"),
        (("evaluation.sets=[dev]", "checkpoint.best_metric=dev/spearman"), "spearman"),
    ],
)
def test_what_composes_and_cannot_work_fails(arguments, message, page_folder, stand_ins):
    command = Command("train", ("recipe=minilm", "data.train=[my.jsonl]", *arguments))
    options = compose(command)
    stand_ins.put(f"my.jsonl dev {options}", "", page_folder)
    with pytest.raises(EmbedtrainError, match=message):
        check(command, options)


def relative(command: Command) -> Command:
    """The command with paths below the folder of the test."""
    arguments = list(command.arguments)
    for absolute, below in ABSOLUTE.items():
        arguments = [re.sub(rf"(?<![\w.}}]){absolute}", below, argument) for argument in arguments]
    return Command(command.name, tuple(arguments), command.may_fail)


def test_what_only_composes_is_listed():
    """A new command is checked up to its work, or says why it cannot be."""
    assert {*WORK, *WHOLE, *COMPOSED} == set(COMMANDS)
    assert len(COMPOSED) <= 6


def test_commands_are_extracted_and_wrong_ones_fail(tmp_path, monkeypatch):
    assert sum(len(commands_of(page)) for page in pages()) > 40
    shell = (
        "cat > x.py <<'PY'\npython -m embedtrain never=1\nPY\n"
        "torchrun --standalone --nproc-per-node 2 -m embedtrain \\\n"
        "  recipe=minilm 'data.train=[{path: a b.jsonl}]'  # so\n"
        'python -m embedtrain inspect data=my.jsonl || echo "exit code $?"\n'
        'python -m embedtrain search model=m corpus=c query="it\'s here" | head\n'
        "embedtrain train --gpus 8 --nodes=2 --node-rank 1 --master host recipe=minilm && embedtrain --version\n"
        ".venv/bin/embedtrain mine model=m\n"
    )
    assert list(commands(shell)) == [
        Command("train", ("recipe=minilm", "data.train=[{path: a b.jsonl}]")),
        Command("inspect", ("data=my.jsonl",), may_fail=True),
        Command("search", ("model=m", "corpus=c", "query=it's here")),
        Command("train", ("recipe=minilm",)),
        Command("mine", ("model=m",)),
    ]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="did you mean temperature"):
        compose(Command("train", ("recipe=minilm", "data.train=[a.jsonl]", "loss.tempature=1")))
    with pytest.raises(ConfigError, match="negatives"):
        compose(Command("mine", ("model=m", "data=[a.jsonl]", "output_dir=b", "negatives=many")))


def test_the_sweep_of_wandb_starts_trainings_in_directories_of_their_own(monkeypatch):
    """Its command with the arguments that wandb's agent fills in composes."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    (sweep,) = (yaml.safe_load(block.text) for block in blocks(ROOT / "docs" / "sweeps.md") if block.title)
    values = {"optim.lr": {"value": 2e-5}, "loss.temperature": {"value": 0.05}}
    assert sweep["parameters"].keys() == values.keys()
    arguments = create_sweep_command_args({"args": values})["args_no_hyphens"]
    command = [
        word
        for text in create_sweep_command(sweep["command"])
        for word in (arguments if text == "${args_no_hyphens}" else [text])
    ]
    monkeypatch.setenv("WANDB_RUN_ID", "r1")
    (recipe,) = compose_recipes(command[command.index("8") + 1 :])
    assert (recipe.optim.lr, recipe.loss.temperature, recipe.output_dir) == (2e-5, 0.05, "runs/sweep/r1")
    name, _, metric = sweep["metric"]["name"].partition("/")
    assert (recipe.evaluation.sets[0].path, metric) == (f"{name}/", "ndcg@10")
