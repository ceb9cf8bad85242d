"""A command of the user's own, which is also a stage of a pipeline: docs/extending.md explains this file."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from embedtrain.config.columns import DataPath
from embedtrain.config.commands import DATA, Command
from embedtrain.config.compose import compose_command
from embedtrain.config.options import option
from embedtrain.config.paths import require_sources
from embedtrain.config.validation import OptionChecks
from embedtrain.pipeline.compose import compose_pipeline
from tests.commands import call

HELP = """shorten: the training rows whose queries have few words

{options: data! output_dir! max_words}"""


@dataclass(kw_only=True)
class ShortenOptions:
    """Options of the command."""

    data: str = option("", is_input=True)  # a file of rows
    output_dir: str = ""  # for rows.jsonl
    max_words: int = option(8, at_least=1)  # of a query that is kept


def compose(arguments: list[str]) -> ShortenOptions:
    """The options, checked."""
    options = compose_command("shorten", ShortenOptions, arguments, HELP)
    OptionChecks(options).require(bool(options.data), "data", "is missing; write a file of rows")
    return options


def require_paths(options: ShortenOptions) -> None:
    """Raise a ConfigError if there is no such file."""
    require_sources((), [DataPath(path=str(Path(options.data).absolute()))])


def run(options: ShortenOptions) -> None:
    """Every rank chooses of its share of the rows; rank 0 writes them in their order."""
    from embedtrain.distributed.world import joined_world

    with joined_world() as world:
        rows = [json.loads(line) for line in Path(options.data).read_text().splitlines()]
        mine = range(world.rank, len(rows), world.size)
        kept = [number for number in mine if len(rows[number]["query"].split()) <= options.max_words]
        chosen = sorted(number for numbers in world.gather(kept) for number in numbers)
        with world.fail_together("writing rows"):
            if world.is_main:
                print(f"{len(chosen)} of {len(rows)} rows, on {world.size} ranks")
                Path(options.output_dir).mkdir(parents=True, exist_ok=True)
                text = "".join(json.dumps(rows[number]) + "\n" for number in chosen)
                Path(options.output_dir, "rows.jsonl").write_text(text)


SHORTEN = Command(
    name="shorten",
    summary="keep the rows whose queries have few words",
    options=ShortenOptions,
    compose=compose,
    require_paths=require_paths,
    run=run,
    ranks=True,
    output="output_dir",
    outputs={DATA: "*.jsonl"},
)

PATH = f"{__name__}:SHORTEN"
PIPELINE = """# @package _global_
name: short
kind: pipeline
stages:
  short: {do: DO, data: rows.jsonl, max_words: 3}
  split: {do: split, data: "${out:short.data}", dev: 5}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"query": " ".join(["word"] * (1 + n % 5) + [str(n)]), "pos": [f"text {n}"]} for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, do in ("mine", "mine"), ("short", PATH):
        file = tmp_path / "recipes" / "recipe" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(PIPELINE.replace("DO", do))
    return tmp_path


def test_it_is_a_command_with_ranks(folder):
    assert "keep the rows" not in call(PATH, "--help")
    assert "max_words=8" in call(PATH, "--help")
    for ranks in (1, 2):
        arguments = ["data=rows.jsonl", "max_words=3", f"output_dir=out-{ranks}"]
        printed = call(PATH, f"--nproc-per-node={ranks}", *arguments, cwd=folder)
        assert f"24 of 60 rows, on {ranks} ranks" in printed
    assert (folder / "out-1" / "rows.jsonl").read_text() == (folder / "out-2" / "rows.jsonl").read_text()
    assert "gone.jsonl: no such file" in call(PATH, "data=gone.jsonl", "output_dir=out", cwd=folder, code=1)
    assert "max_words=0" in call(PATH, "data=rows.jsonl", "max_words=0", cwd=folder, code=1)
    assert "tests.extending.test_command:GONE" in call(PATH.replace("SHORTEN", "GONE"), cwd=folder, code=1)
    assert "write an embedtrain.config.commands.Command" in call(PATH.replace("SHORTEN", "HELP"), cwd=folder, code=1)


def test_it_is_a_stage_that_the_user_names(folder):
    arguments = ["--config-dir", "recipes", "recipe=short"]
    refused = rf"do={PATH}: a file cannot name code to run; .* write stages\.short\.do={PATH} on the command line"
    with pytest.raises(Exception, match=refused):
        compose_pipeline(arguments)
    call("train", *arguments, f"stages.short.do={PATH}", cwd=folder)
    assert len((folder / "runs/short/stages/short/rows.jsonl").read_text().splitlines()) == 24
    assert len((folder / "runs/short/stages/split/train.jsonl").read_text().splitlines()) == 19
    again = call("train", *arguments, f"stages.short.do={PATH}", "stages.short.max_words=4", cwd=folder, code=1)
    assert "stages.short: max_words was 3 when the stage ran and is now 4" in again


def test_it_is_submitted(folder):
    script = call("submit", PATH, "data=rows.jsonl", "output_dir=out", "slurm.dry_run=true", cwd=folder)
    assert f'-m embedtrain {PATH} "${{arguments[@]}}"' in script
    assert "--job-name=shorten-out" in script
