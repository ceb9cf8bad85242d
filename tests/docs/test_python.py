"""Blocks of Python in the pages run, one after the other, with the names of the blocks before them.

They find the models and files of `stand_ins.py` where they name them. A block that needs what no test has is excused by
a comment of the page that says why, or is listed here.
"""

import importlib
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import embedtrain
from tests.conftest import ROOT
from tests.docs.pages import Block, blocks, pages
from tests.docs.stand_ins import ABSOLUTE
from tests.docs.test_commands import write_files

# Pages whose blocks need what no environment of the tests has.
NOT_RUN = {
    "docs/other-libraries.md": "it runs under torchrun: tests/losses/test_other_libraries.py",
    "docs/serving/python.md": "packages of serving engines: tests/verify runs these blocks in their environments",
    "docs/dual-encoders.md": "an export of two models: tests/dual_encoder opens it with this class",
    "docs/image-text.md": "an export of texts and pictures: tests/image_text opens it with this class",
    "docs/images.md": "an export of texts and pictures: tests/image_text opens it with this class",
    "docs/vision-language.md": "an export of a vision-language model: tests/vision_language opens it with this class",
    "docs/visual-documents.md": "an export over pages: tests/vision_language opens it with this class",
    "docs/sweeps.md": "optuna, which is not installed, and twenty trainings",
}
# Text of a block -> why it is not run, on pages whose other blocks are.
NOT_RUN_BLOCKS = {
    "PeftModel.from_pretrained": "a run with adapters: tests/test_run_cross_encoder.py opens it so",
    'writer={"model": "Qwen/': "a language model of four billion weights; tests/synthesize calls it with small ones",
}
# The recipes train for minutes to days: so many steps of small batches here.
SHORT = {
    "train.steps": 2, "train.epochs": None, "train.global_batch_size": 4, "optim.warmup": 0, "evaluation.sets": [],
    "export.check": False, "checkpoint.best_metric": None,
}  # fmt: skip
PAGES = [page for page in pages() if any(block.language == "python" for block in blocks(page))]


def runs(block: Block) -> bool:
    return (
        block.language == "python"
        and not block.excused
        and not any(text in block.text for text in NOT_RUN_BLOCKS)
        and str(block.page.relative_to(ROOT)) not in NOT_RUN
    )


def short(**options: Any) -> dict[str, Any]:
    """What a call of `train` in a page is given besides: its own options, but few steps."""
    single = dict(options.pop("options", None) or {})
    for name, value in SHORT.items():
        group, _, key = name.partition(".")
        if name == "evaluation.sets" and isinstance(options.get(group), str | Path):
            continue  # the sets
        if isinstance(options.get(group), dict):
            options[group] = {**options[group], key: value}
        else:
            single[name] = value
    return {**options, "options": single}


def with_models(text: str) -> str:
    """A page, and the recipes and groups of models that its blocks name."""
    for folder, named in (("recipes", r'"(\w+)"'), ("configs/model", r'"(\w+)"|/model: (\w+)')):
        files = {ROOT / folder / f"{''.join(match.groups(''))}.yaml" for match in re.finditer(named, text)}
        text = " ".join([text, *(file.read_text(encoding="utf-8") for file in files if file.is_file())])
    return text


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(map(runs, blocks(page)))], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_blocks_of_a_page_run(page, page_folder, stand_ins, monkeypatch):
    write_files(page, page_folder)
    stand_ins.put(with_models(page.read_text(encoding="utf-8")), page.name, page_folder)
    train, split = embedtrain.train, embedtrain.split

    def train_anew(*recipe: str, **options: Any) -> Any:
        for run in (Path("runs", *recipe), Path(options.get("output_dir", "none"))):
            if run.is_symlink():  # it stands for the run that now begins
                run.unlink()
        return train(*recipe, **short(**options))

    def split_few(*arguments: Any, **options: Any) -> Any:
        return split(*arguments, **options | {"dev": 2})

    monkeypatch.setattr(embedtrain, "train", train_anew)
    monkeypatch.setattr(embedtrain, "split", split_few)  # the files have fewer queries than a page holds out
    names: dict[str, Any] = {}
    for block in filter(runs, blocks(page)):
        text = block.text
        for absolute, below in ABSOLUTE.items():
            text = text.replace(f'"{absolute}', f'"{below}')
        if block.title is not None and "__main__" in text:
            runpy.run_path(block.title, run_name="__main__")
        elif block.title is not None:
            importlib.import_module(block.title.removesuffix(".py"))
        else:
            exec(compile(text, str(block), "exec"), names)


def test_few_blocks_are_not_run():
    """Each says why: in a comment of the page, or above."""
    every = [block for page in pages() for block in blocks(page) if block.language == "python"]
    excused = [block for block in every if block.excused]
    listed = [block for block in every if not block.excused and not runs(block)]
    assert len(excused) <= 20, [str(block) for block in excused]
    assert len(listed) <= 17, [str(block) for block in listed]
    assert all((ROOT / page).is_file() for page in NOT_RUN)
    assert all(any(text in block.text for block in every) for text in NOT_RUN_BLOCKS)
