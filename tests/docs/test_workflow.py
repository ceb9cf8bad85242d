"""The GitHub workflow: every test in one part, pinned actions, minimal permissions, targets of the Makefile."""

import re
import shlex

import yaml

from tests.conftest import ROOT

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]


def test_its_parts_have_every_test_once():
    *parts, rest = [part["paths"].split() for part in WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["part"]]
    named = [path for part in parts for path in part]
    assert len(named) == len(set(named))
    assert all((ROOT / path).is_dir() for path in named)
    assert rest[0] == "tests"
    assert sorted(path.removeprefix("--ignore=") for path in rest[1:]) == sorted(named)


def test_actions_are_pinned_and_permissions_are_minimal():
    used = [step["uses"] for step in STEPS if "uses" in step]
    assert used
    assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action) for action in used), used
    assert WORKFLOW["permissions"] == {"contents": "read"}
    more = {name: job["permissions"] for name, job in WORKFLOW["jobs"].items() if "permissions" in job}
    assert more == {"pages": {"pages": "write", "id-token": "write"}}
    for step in STEPS:
        if "actions/checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False
        # Anyone can write the content of an event, so it must not be part of a script.
        assert "${{" not in step.get("run", ""), step


def test_its_targets_are_those_of_the_makefile():
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    called = [words[1] for step in STEPS for words in [shlex.split(step.get("run", ""))] if words[:1] == ["make"]]
    machine = WORKFLOW["jobs"]["machine"]["strategy"]["matrix"]["include"]
    assert {"lint", "docs"} <= set(called)
    assert {*called, *(one["target"] for one in machine)} <= {*targets, ".venv"}
