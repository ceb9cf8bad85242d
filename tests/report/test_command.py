"""`python -m embedtrain report`: directories and options on its command line, and its output."""

from pathlib import Path

import pytest

from embedtrain.commands.report import compose as compose_report
from embedtrain.errors import ConfigError
from tests.commands import call
from tests.tracking.report.runs import make_run


def test_directories_and_options_are_distinguished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1e-5,[x]").mkdir()
    assert compose_report(["runs/a", "lr=1e-5,[x]", "output=out, (1).html"]).runs == ["runs/a", "lr=1e-5,[x]"]
    assert compose_report(["runs/a", "output=out, (1).html"]).output == "out, (1).html"
    assert compose_report(["runs=[a,b]", "c"]).runs == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], r"runs=\[\]: no run"),
        (["a", "outptu=b"], r"outptu, did you mean output"),
        (["a", "output=."], r"output=\.: "),
        (["-m", "a"], r"multirun"),
    ],
)
def test_invalid_command_lines(arguments, message):
    with pytest.raises(ConfigError, match=message):
        compose_report(arguments)


def test_several_ranks_are_rejected(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"report .*not with torchrun"):
        compose_report(["a"])


@pytest.mark.slow
def test_the_command(tmp_path):
    make_run(tmp_path / "one", name="one")
    make_run(tmp_path / "two", name="two")
    assert call("report", "one", cwd=tmp_path) == "report: one/report.html\n"
    assert call("report", "one", "two", cwd=tmp_path) == "report: one/comparison.html\n"
    assert call("report", "one", "two", "output=deep/in/x.html", cwd=tmp_path) == "report: deep/in/x.html\n"
    assert "2 runs compared" in Path(tmp_path / "deep/in/x.html").read_text()
    output = call("report", "nowhere", cwd=tmp_path, code=1)
    assert output.startswith("error: nowhere is not a folder: ")
    assert output.count("\n") == 1
    assert "embedtrain report runs/NAME [runs/OTHER ...] [output=FILE]" in call("report", "--help")
