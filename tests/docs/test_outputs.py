"""What the pages show of the program's output: it is printed here and compared, or its words are in the source.

Numbers vary between machines: they are compared as numbers where a page is about them, and as patterns elsewhere.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from embedtrain.config.compose import compose_recipes
from embedtrain.config.recipe import TrainSource
from embedtrain.data.train_data import load_train_data
from embedtrain.errors import ConfigError
from embedtrain.losses.types import BatchInfo, Loss, LossOutput
from embedtrain.testing import check_loss
from tests.commands import call
from tests.conftest import ROOT
from tests.docs.commands import Command, check, commands, compose
from tests.docs.messages import is_of_the_program
from tests.docs.pages import Block, blocks, pages
from tests.docs.test_commands import write_files

DOCS = ROOT / "docs"
# Text that is no output of the program, or of minutes of training: page -> how a block begins -> what compares it.
OTHERS = {
    "compressed-vectors.md": {"vectors, by the bytes": "test_the_tables_of_compressed_vectors"},
    "checkpoint-format.md": {"checkpoints/": "test_a_run_has_the_files_of_the_page"},
    "index.md": {"compress files": "of the quickstart, which `make demo` trains"},
    "rerankers.md": {"  set  ": "of the quickstart's data, which `make demo-reranker` trains on"},
    "triton.md": {"model_repository": "a folder of Triton's", "name:": "a configuration of Triton's"},
    "data-quality.md": {
        "length in tokens": "names of columns, of a run of minutes",
        "== packages ==": "texts of the quickstart's data",
    },
    "other-libraries.md": {"norm": "of the script of the page: tests/losses/test_other_libraries.py"},
    "evaluate.md": {"dev-en+bm25": "names of sets, of a run of minutes"},
    "tutorial.md": {"packages on 2 ranks": "tests/docs/test_tutorial.py"},
}
TEXT = [block for page in pages() for block in blocks(page) if block.language == "text"]


def text_of(page: str, begins: str) -> str:
    """The block of a page that begins so."""
    (found,) = [block.text for block in TEXT if block.page.name == page and block.text.startswith(begins)]
    return found


def same_but_numbers(shown: str, printed: str) -> bool:
    """Whether every line shown is printed, in this order; `...` stands for anything, a number for any number."""
    lines = iter(printed.splitlines())
    return all(any(re.search(pattern(line), other) for other in lines) for line in shown.strip().splitlines())


def pattern(line: str) -> str:
    parts = (re.escape(part) for part in re.split(r"\.\.\.|…", line.strip()))
    return re.sub(
        r"(\\ )+", r"\\s+", ".*".join(re.sub(r"\d+((,|\\\.)\d+)*(e\\-\d+)?", r"[-\\d.,e]+", p) for p in parts)
    )


def test_numbers_and_omissions_are_patterns():
    assert same_but_numbers("step 60/60  loss 0.3549 ...\nend", "x\nstep 1/2 loss 1e-05  lr 2\ny\nend of it")
    assert not same_but_numbers("step 60/60  loss", "steps 1/2 loss")
    assert not same_but_numbers("end\nbegin", "begin\nend")


@pytest.mark.parametrize("block", TEXT, ids=str)
def test_blocks_of_text_have_the_words_of_the_program(block):
    listed = [reason for start, reason in OTHERS.get(block.page.name, {}).items() if block.text.startswith(start)]
    assert listed or is_of_the_program(block.text), f"{block}: the program prints no such text"


def quoted_messages() -> Iterator[tuple[str, str]]:
    """Messages that pages explain: headings of troubleshooting.md, and tables with a column `message`."""
    words = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    ours = words[words.index("## Messages of embedtrain") : words.index("## Symptoms without")]
    for heading in re.findall(r"^### .*", ours, re.MULTILINE):
        yield from (("troubleshooting.md", message) for message in re.findall(r"`([^`]+)`", heading))
    for page in ("slurm.md", "several-hosts.md"):
        is_table = False
        for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
            is_table = line.startswith("|") and (is_table or line.startswith("| message |"))
            if is_table and (message := re.match(r"\| `([^`]+)`", line)):
                yield page, message[1]


# Of a shell and of libraries.
THEIRS = ("zsh: no matches found", "The hostname of the client socket", "Watchdog caught collective operation")


def test_quoted_messages_are_those_of_the_program():
    quoted = list(quoted_messages())
    assert len(quoted) >= 35
    wrong = [
        f"{page}: {message}"
        for page, message in quoted
        if len(message.split()) > 1 and not message.startswith(THEIRS) and not is_of_the_program(message)
    ]
    assert wrong == []
    for made_up in ("the lazy model jumps over the quick loss", "step 4: the loss exploded, lower the rate"):
        assert not is_of_the_program(made_up)


def names_of(listing: str, root: str) -> set[str]:
    """The first names below `root` in a listing of files with explanations, as patterns."""
    lines = [line for line in listing.splitlines() if line.strip() and not line.startswith(root)]
    names = [name for line in lines for name in re.split(r"  +", line.strip())[0].split(", ")]
    return {re.sub(r"\d+", r"\\d+", name.rstrip("/")).replace("*", ".*") for name in names}


@pytest.mark.slow
def test_a_run_has_the_files_of_the_page(stand_ins, page_folder):
    """Nothing that a run writes is missing in the pages."""
    stand_ins.put("runs/mine", "", page_folder)
    listed = names_of(text_of("recipes.md", "runs/NAME/\n"), "runs/NAME/")
    listed |= {name.split("/")[0] for name in listed}
    written = [path.name for path in Path("runs/mine").iterdir()]
    assert "metrics.jsonl" in written
    assert [name for name in written if not any(re.fullmatch(pattern, name) for pattern in listed)] == []
    checkpoint = names_of(text_of("checkpoint-format.md", "checkpoints/"), "checkpoints/")
    for path in Path("runs/mine/checkpoints").glob("step-*/*"):
        assert any(re.fullmatch(pattern, path.name) for pattern in checkpoint), path


@pytest.mark.parametrize("page", ["recipes.md", "tutorial.md"])
def test_the_error_of_a_misspelled_option(page, page_folder):
    write_files(DOCS / page, page_folder)
    with pytest.raises(ConfigError) as raised:
        compose_recipes(["recipe=minilm", "data.train=[my.jsonl]", "loss.tempature=0.05"])
    assert same_but_numbers(text_of(page, "error: unknown option"), f"error: {raised.value}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "begins", "name", "arguments"),
    [
        ("evaluate.md", "dev: retrieval", "evaluate", ("model=runs/mine/model", "sets=[dev.csv]")),
    ],
)
def test_lines_about_columns(page, begins, name, arguments, stand_ins, page_folder):
    stand_ins.put("runs/mine faq.csv", "", page_folder)
    (page_folder / "dev.csv").write_text((page_folder / "faq.csv").read_text())
    command = Command(name, arguments)
    assert same_but_numbers(text_of(page, begins), check(command, compose(command)))


@pytest.mark.slow
def test_the_line_of_a_source(stand_ins, page_folder):
    stand_ins.put("faq.csv", "", page_folder)
    data = load_train_data([TrainSource(path="faq.csv")], seed=0, global_batch_size=4)
    assert same_but_numbers(text_of("data.md", "faq: columns"), data.notes[0])


class LocalMean(Loss):
    """Divides by the rows of its own rank."""

    def forward(self, queries, documents, batch_info: BatchInfo) -> LossOutput:
        return LossOutput((queries - documents[batch_info.positives]).square().sum() / max(1, len(queries)))


@pytest.mark.slow
def test_the_error_of_a_loss_that_depends_on_the_ranks():
    with pytest.raises(AssertionError) as raised:
        check_loss(LocalMean)
    shown = " ".join(text_of("custom-losses.md", "AssertionError").split()).replace("my_losses:LocalMean", "...")
    assert same_but_numbers(shown, f"AssertionError: {' '.join(str(raised.value).split())}")


def figures(table: str) -> dict[str, list[float]]:
    """The numbers of a row by its name, without the unit of the last."""
    rows = [line.split() for line in table.splitlines()[2:] if line.startswith("  dev-en")]
    return {" ".join(row[1:3]): [float(number.rstrip("%")) for number in row[-2:]] for row in rows}


@pytest.mark.slow
def test_the_tables_of_compressed_vectors(stand_ins, page_folder):
    """The page is about these figures: they are measured again."""
    page = DOCS / "compressed-vectors.md"
    stand_ins.put("sentence-transformers/all-MiniLM-L6-v2", "", page_folder)
    every = list(commands("\n".join(block.text for block in blocks(page) if block.language == "bash")))
    measured = [command for command in every if "recipes/quickstart/dev-en" in " ".join(command.arguments)]
    calibrated = [command for command in measured if command.name == "calibrate"]
    shown = [block.text for block in TEXT if block.page == page]
    evaluations = [command for command in measured if command.name == "evaluate"]
    assert len(shown) == len(evaluations) == 2
    for command in calibrated:
        call(command.name, *command.arguments)
    for command, table in zip(evaluations, shown, strict=True):
        printed = call(command.name, *command.arguments, "precision=fp32")
        actual, expected = figures(printed[printed.index("vectors, by the bytes") :]), figures(table)
        assert actual.keys() == expected.keys()
        for name, numbers in expected.items():
            assert actual[name] == pytest.approx(numbers, abs=0.6), name  # bits near 0 differ between CPUs
            assert actual[name][0] == pytest.approx(numbers[0], abs=0.004), name


def test_what_is_not_compared_is_listed():
    assert sum(map(len, OTHERS.values())) <= 12
    for page, begins in OTHERS.items():
        for start in begins:
            assert any(is_of(block, page, start) for block in TEXT), (page, start)


def is_of(block: Block, page: str, start: str) -> bool:
    return block.page.name == page and block.text.startswith(start)
