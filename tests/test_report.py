"""The command `python -m embedtrain.report`: folders as they are written, options, and what it refuses."""

import re
from pathlib import Path

import pytest

from embedtrain.errors import ConfigError
from embedtrain.report.options import compose_report
from tests.test_doors import call
from tests.tracking.report.made import make_run


def test_folders_and_options_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1e-5,[x]").mkdir()
    assert compose_report(["runs/a", "lr=1e-5,[x]", "output=out, (1).html"]).runs == ["runs/a", "lr=1e-5,[x]"]
    assert compose_report(["runs/a", "output=out, (1).html"]).output == "out, (1).html"
    assert compose_report(["runs=[a,b]", "c"]).runs == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "no run: write python -m embedtrain.report runs/NAME"),
        (["a", "too=b"], "unknown option too, did you mean to?"),
        (["a", "output=."], "output=. is a folder: name a file, such as output=./report.html"),
        (["-m", "a"], "multirun"),
    ],
)
def test_what_cannot_be_meant(arguments, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        compose_report(arguments)


def test_one_process_reads(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start it with python, not with torchrun"):
        compose_report(["a"])


@pytest.mark.slow
def test_the_command(tmp_path):
    make_run(tmp_path / "one", name="one")
    make_run(tmp_path / "two", name="two")
    assert call("embedtrain.report", "one", cwd=tmp_path) == "report: one/report.html\n"
    assert call("embedtrain.report", "one", "two", cwd=tmp_path) == "report: one/comparison.html\n"
    assert call("embedtrain.report", "one", "two", "output=deep/in/x.html", cwd=tmp_path) == "report: deep/in/x.html\n"
    assert "2 runs compared" in Path(tmp_path / "deep/in/x.html").read_text()
    said = call("embedtrain.report", "nowhere", cwd=tmp_path, code=1)
    assert said == "error: nowhere is no folder: name the output_dir of a run, such as runs/quickstart\n"
    assert "python -m embedtrain.report runs/NAME [runs/OTHER ...] [output=FILE]" in call("embedtrain.report", "--help")
