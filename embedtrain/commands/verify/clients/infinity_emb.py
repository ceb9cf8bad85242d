"""Vectors and scores of infinity's HTTP server, which runs on a free port of this machine while the program does."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any


def request(route: str, content: dict[str, Any] | None = None) -> Any:
    """The answer of the server to a GET, or to a POST of `content`."""
    body = None if content is None else json.dumps({"model": "model"} | content).encode()
    message = urllib.request.Request(f"{URL}/{route}", body, {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(message, timeout=300) as answer:  # noqa: S310
        return json.load(answer)


def wait() -> None:
    """Wait until the server answers; SystemExit with the last line of its log if it stops instead."""
    deadline = time.monotonic() + 600
    while server.poll() is None and time.monotonic() < deadline:
        try:
            request("health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.3)
    log.seek(0)
    lines = log.read().strip().splitlines() or ["it does not answer"]
    raise SystemExit(f"infinity_emb v2: {lines[-1]}")


def vectors(texts: list[str]) -> list[list[float]]:
    """The vectors of texts."""
    answer = request("embeddings", {"input": texts, "dimensions": given["dimension"]})
    return [row["embedding"] for row in sorted(answer["data"], key=lambda row: row["index"])]


def score(pair: list[str], raw: bool) -> float:
    """The score of a query and a document, as a logit or with the sigmoid function."""
    query, document = pair
    answer = request("rerank", {"query": query, "documents": [document], "raw_scores": raw})
    return float(answer["results"][0]["relevance_score"])


with open(sys.argv[1], encoding="utf-8") as file:
    given = json.load(file)
output: dict[str, Any] = {"version": version("infinity_emb")}
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
URL = f"http://127.0.0.1:{port}"
options = {"model-id": given["model"], "served-model-name": "model", "host": "127.0.0.1", "port": str(port)}
options |= {"device": "cpu", "dtype": "float32"}
command = [str(Path(sys.executable).with_name("infinity_emb")), "v2", "--no-model-warmup"]
command += [word for name, value in options.items() for word in (f"--{name}", value)]
with tempfile.TemporaryFile("w+", encoding="utf-8") as log:
    server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"DO_NOT_TRACK": "1"})  # noqa: S603
    try:
        wait()
        if given["kind"] == "cross_encoder":
            pairs, ways = given["formatted_pairs"], {"logits": True, "activated": False}
            output["scores"] = {way: [score(pair, raw) for pair in pairs] for way, raw in ways.items()}
            texts = dict.fromkeys(ways, pairs)
        else:
            prompts = {"text": ""} | given["prompts"]
            texts = {way: [[prompt + text] for text in given["texts"]] for way, prompt in prompts.items()}
            output["vectors"] = {way: vectors([text for (text,) in rows]) for way, rows in texts.items()}
    finally:
        server.terminate()
        server.wait()
output["changes"] = "strips white space from the ends of texts"
output["changed"] = {
    way: [index for index, row in enumerate(rows) if any(text != text.strip() for text in row)]
    for way, rows in texts.items()
}
with open(sys.argv[2], "w", encoding="utf-8") as result:
    json.dump(output, result)
