"""A language model that answers by a rule, and the collections that it reads."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from embedtrain.commands.synthesize import SynthesizeOptions, compose
from embedtrain.commands.synthesize.synthesis import synthesize
from embedtrain.commands.synthesize.types import Answer, Estimate, Refusal, RefusalReason, Reply, Request
from embedtrain.distributed.world import World
from embedtrain.tracking.console import Console

Rule = Callable[[Request], str | Reply]
_WORDS = [
    *("amber", "basalt", "cedar", "dune", "ember", "fjord", "glacier", "harbor"),
    *("island", "jetty", "kelp", "lagoon", "meadow", "nectar", "orchard", "prairie"),
]


def about(number: int) -> str:
    """A document that shares its words with others, and has one of its own."""
    words = [_WORDS[number * step % len(_WORDS)] for step in (1, 3, 5)]
    return (
        f"The unit{number} of the {words[0]} stands beside the {words[1]} and the {words[2]} since the year {number}."
    )


def queries_of(request: Request) -> str:
    """As many queries as were asked for, each about the first document of the prompt and unlike the others."""
    text = request.messages[-1].content
    subject = re.findall(r"unit\d+", text.partition("\nQuery:")[2] or text)[0]
    count = request.schema["properties"]["queries"]["minItems"] if request.schema else 1
    queries: list[Any] = [
        f"{subject} {_WORDS[(request.seed + i) % 16]} {request.seed % 9973} {i}" for i in range(count)
    ]
    if request.schema and "instruction" in json.dumps(request.schema):
        queries = [{"instruction": f"Find {subject}.", "query": query} for query in queries]
    return json.dumps({"queries": queries})


class ScriptedAsker:
    """Answers each request by a rule, and keeps what it was asked."""

    where = "documents stay in this process"

    def __init__(self, rule: Rule = queries_of, name: str = "scripted") -> None:
        self.name, self.requests = name, list[Request]()
        self._rule = rule

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        """The replies by the rule."""
        self.requests += requests
        replies = (self._rule(request) for request in requests)
        return [Answer(reply, 10, 5) if isinstance(reply, str) else reply for reply in replies]

    def estimate(self, requests: Sequence[Request]) -> Estimate:
        """Ten tokens for each."""
        return Estimate(len(requests), 0, 10 * len(requests), sum(each.max_new_tokens for each in requests), 0.0)

    def usage(self) -> Mapping[str, Any]:
        """What was asked."""
        return {"requests": len(self.requests), "tokens": 15 * len(self.requests), "price": 0.0}


def refuse(reason: RefusalReason, message: str = "") -> Refusal:
    """No answer."""
    return Refusal(reason, message)


def write_corpus(path: Path, texts: Sequence[str]) -> Path:
    """Documents with the ids d0, d1, ..."""
    rows = ({"_id": f"d{number}", "text": text} for number, text in enumerate(texts))
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def options_of(corpus: Path | str, output_dir: Path, *more: str) -> SynthesizeOptions:
    """The options of the command, checked; short texts have no certain language."""
    fixed = ["writer.model=scripted", "checks.languages=false", "checks.near_duplicate=null"]
    return compose([f"corpus={corpus}", f"output_dir={output_dir}", *fixed, *more])


def run_scripted(world: World, options: SynthesizeOptions, rule: Rule = queries_of) -> tuple[list[dict[str, Any]], int]:
    """The rows that the command writes, and the number of requests. A collective."""
    asker = ScriptedAsker(rule)
    path = synthesize(options, world, Console(enabled=False), asker, asker.usage)
    return read_rows(path), len(asker.requests)
