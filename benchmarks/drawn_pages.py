"""Pages with known answers: the English descriptions of the quickstart, drawn as pictures, with its queries.

`python -m benchmarks.drawn_pages pages` writes a BEIR folder of 1,500 pages, and `pages/bm25.run`, the best 100 pages
of each query by BM25 on the texts that were drawn: `sets=[pages]`, or to order those alone
`sets=[{path: pages, candidates: pages/bm25.run}]`.
The font is that of Pillow; size, columns and colours of a page follow from its id.
"""

import argparse
import gzip
import hashlib
import json
import textwrap
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from benchmarks.inputs import QUICKSTART
from embedtrain.evaluation.first_stage import bm25_rankings
from embedtrain.evaluation.types import Corpus

SET = QUICKSTART / "dev-en"
MARGIN, GUTTER = 40, 24  # pixels
_WIDTHS, _FONT_SIZES = (480, 600, 720, 850), (13, 15, 17, 20)
_MIN_HEIGHT, _MAX_HEIGHT = 200, 1100
_INK_AND_PAPER = (((0, 0, 0), (255, 255, 255)), ((20, 20, 60), (250, 248, 240)), ((230, 230, 230), (30, 34, 42)))
_LETTERS = "abcdefghijklmnopqrstuvwxyz "
BM25_DEPTH = 100


def draw_page(name: str, text: str) -> Image.Image:
    """The page of a text; what does not fit on it is left out."""
    choices = iter(hashlib.blake2b(name.encode()).digest())
    width = _WIDTHS[next(choices) % len(_WIDTHS)]
    size = _FONT_SIZES[next(choices) % len(_FONT_SIZES)]
    ink, paper = _INK_AND_PAPER[next(choices) % len(_INK_AND_PAPER)]
    num_columns = 2 if width >= 720 and next(choices) % 3 == 0 else 1
    font, line_height = ImageFont.load_default(size), int(size * 1.45)
    column = (width - 2 * MARGIN - (num_columns - 1) * GUTTER) // num_columns
    letters = max(10, int(column * len(_LETTERS) / font.getlength(_LETTERS)))
    lines = [line for paragraph in text.split("\n") for line in textwrap.wrap(paragraph, letters) or [""]]
    lines_per_column = -(-len(lines) // num_columns)
    height = min(_MAX_HEIGHT, max(_MIN_HEIGHT, lines_per_column * line_height + 2 * MARGIN))
    fitting = min(lines_per_column, (height - 2 * MARGIN) // line_height)
    page = Image.new("RGB", (width, height), paper)
    draw = ImageDraw.Draw(page)
    for number in range(num_columns):
        first = number * lines_per_column
        for row, line in enumerate(lines[first : first + fitting]):
            place = (MARGIN + number * (column + GUTTER), MARGIN + row * line_height)
            draw.text(place, line, font=font, fill=ink)
    return page


def write_pages(folder: Path, num_pages: int | None = None) -> None:
    """Write the first `num_pages` pages, by default all, with the queries that they answer, and the run of BM25."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    documents = {row["_id"]: row["text"] for row in _read("corpus")}
    queries = {row["_id"]: row["text"] for row in _read("queries")}
    judgements = [line.split("\t") for line in (SET / "qrels/test.tsv").read_text().splitlines()[1:]]
    # The answers first, so that a few pages have queries.
    order = dict.fromkeys([document for _, document, _ in judgements] + list(documents))
    kept = {name: documents[name] for name in list(order)[:num_pages]}
    judgements = [row for row in judgements if row[1] in kept]
    queries = {query: queries[query] for query, _, _ in judgements}
    for name, text in kept.items():
        draw_page(name, text).save(folder / "images" / f"{name}.png", compress_level=4)
    _write(folder / "corpus.jsonl", [{"_id": name, "image": f"images/{name}.png"} for name in kept])
    _write(folder / "queries.jsonl", [{"_id": query, "text": text} for query, text in queries.items()])
    (folder / "qrels").mkdir(exist_ok=True)
    table = [["query-id", "corpus-id", "score"], *judgements]
    (folder / "qrels/test.tsv").write_text("".join("\t".join(row) + "\n" for row in table))
    with (folder / "bm25.run").open("w") as run:
        corpus = Corpus.from_dict(kept)
        rankings = bm25_rankings(list(queries.values()), corpus, BM25_DEPTH)
        for query, ranking in zip(queries, rankings, strict=True):
            for rank, number in enumerate(ranking, 1):
                run.write(f"{query} Q0 {corpus.ids[number]} {rank} {1 / rank:.9g} bm25\n")


def _read(name: str) -> list[dict[str, Any]]:
    with gzip.open(SET / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pages", type=int, help="so many pages, those that answer a query first; default: all")
    arguments = parser.parse_args()
    write_pages(arguments.folder, arguments.pages)


if __name__ == "__main__":
    main()
