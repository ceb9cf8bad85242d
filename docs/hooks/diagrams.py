"""Diagrams of the pages, in docs/assets/images: `python docs/hooks/diagrams.py`.

Each function draws one diagram on a `Canvas`, in the colors of light and of dark pages. Phones get a narrow one.
The lengths of texts in the diagram of packing are those of rows of the quickstart.
"""

import gzip
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "assets" / "images"

# Of light pages, and of dark ones: text, secondary text, lines, surface of boxes, and the colors of data.
PALETTES = {
    "": {"text": "#1f2328", "muted": "#59636e", "line": "#818b98", "box": "#f6f8fa", "empty": "#e3e7ec",
         "a": "#5b6ee1", "b": "#d9822b", "c": "#2b9a66", "d": "#b84592", "fill_a": "#e6e9fb", "fill_b": "#fbeedd",
         "fill_c": "#dff3e8", "fill_d": "#f7e3f0", "bad": "#c93c37"},
    "-dark": {"text": "#e6e9ee", "muted": "#9aa4b2", "line": "#6b7685", "box": "#262b36", "empty": "#343b48",
              "a": "#93a1ff", "b": "#f0a95c", "c": "#63cf9a", "d": "#e083c1", "fill_a": "#2c3157", "fill_b": "#4a3821",
              "fill_c": "#1f4233", "fill_d": "#472a3f", "bad": "#ff7b72"},
}  # fmt: skip


class Canvas:
    """An SVG picture of a width and a height in pixels, without a background."""

    def __init__(self, width: int, height: int, palette: dict[str, str]) -> None:
        self.width, self.height, self.palette = width, height, palette
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, fill: str = "box", line: str | None = "line"
    ) -> None:
        """A rectangle with round corners."""
        stroke = f' stroke="{self.palette[line]}"' if line else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{self.palette[fill]}"{stroke}/>'
        )

    def text(  # noqa: D102
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 14,
        color: str = "text",
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{self.palette[color]}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def note(self, x: float, y: float, text: str, anchor: str = "middle") -> None:
        """A line of small, grey text."""
        self.text(x, y, text, size=12, color="muted", anchor=anchor)

    def label(
        self, x: float, y: float, width: float, height: float, lines: str, fill: str = "box", line: str = "line"
    ) -> None:
        """A box with lines of text in its middle: the first one bold, the others small."""
        self.box(x, y, width, height, fill, line)
        title, *more = lines.split("\n")
        top = y + height / 2 + 5 - 9 * len(more)
        self.text(x + width / 2, top, title, bold=True)
        for number, text in enumerate(more, 1):
            self.text(x + width / 2, top + 18 * number, text, size=12, color="muted")

    def arrow(self, *points: tuple[float, float], color: str = "line", dashed: bool = False) -> None:
        """A line through points, with a head at the last one."""
        path = " ".join(f"{'L' if number else 'M'}{x:g} {y:g}" for number, (x, y) in enumerate(points))
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        (x0, y0), (x1, y1) = points[-2:]
        length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-9)
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        head = f"M{x1:g} {y1:g}" + "".join(
            f"L{x1 - 8 * dx + side * 4 * dy:g} {y1 - 8 * dy - side * 4 * dx:g}" for side in (1, -1)
        )
        stroke = self.palette[color]
        self.parts.append(f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="1.5"{dash}/>')
        self.parts.append(f'<path d="{head}Z" fill="{stroke}"/>')

    def svg(self, title: str) -> str:  # noqa: D102
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" role="img" '
            f'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif">\n'
            f"<title>{escape(title)}</title>\n{body}\n</svg>\n"
        )


FLOW = {
    "files": ("your files\nJSONL, CSV, Parquet,\nBEIR, Hub data sets", "box", "line"),
    "rows": ("rows\nchecked once, tokenized,\ncached on disk", "box", "line"),
    "batch": ("global batch k\na function of data,\noptions, seed and k", "fill_b", "b"),
    "chunks": ("packed chunks\nno padding, equal work\non every rank", "fill_a", "a"),
    "encoder": ("encoder\nsharded by FSDP2\nover the ranks", "fill_a", "a"),
    "loss": ("loss\nover the texts\nof all ranks", "fill_c", "c"),
    "checkpoints": ("checkpoints\nresume on any\nnumber of ranks", "box", "line"),
    "model": ("model/\nreopened, and compared\nwith the trained encoder", "box", "line"),
    "served": ("served\nsentence-transformers,\nvLLM, TEI, ONNX ...", "box", "line"),
}
GRADIENT = "gradient of every embedding, chunk by chunk"


def flow(c: Canvas) -> None:
    """From files to a served model."""
    width, gap, y = 158, 22, 176
    for number, name in enumerate(("files", "rows", "batch", "chunks", "encoder", "loss")):
        x = 8 + number * (width + gap)
        c.label(x, 14, width, 84, *FLOW[name])
        if number:
            c.arrow((x - gap + 2, 56), (x - 3, 56))
    last = 8 + 5 * (width + gap) + width / 2
    encoder = 8 + 4 * (width + gap) + width / 2
    c.arrow((last, 98), (last, 124), (encoder, 124), (encoder, 102), color="c")
    c.note((last + encoder) / 2 + 40, 142, GRADIENT)
    c.arrow((encoder - 40, 98), (encoder - 40, y - 3))
    for name, column in (("checkpoints", 4), ("model", 3), ("served", 2)):
        x = 8 + column * (width + gap)
        c.label(x, y, width, 84, *FLOW[name])
        if column < 4:
            c.arrow((x + width + gap - 2, y + 42), (x + width + 3, y + 42))
    c.label(
        8,
        y,
        2 * width + gap,
        84,
        "report.html, metrics.jsonl\nevaluation sharded over the ranks,\nthe same floats on any number of them",
    )


def flow_on_phones(c: Canvas) -> None:
    """The same in two columns, which are read like a snake: left to right, then right to left."""
    left, right, width, height = 6, 208, 166, 84
    y = {"files": 8, "batch": 116, "encoder": 224, "checkpoints": 376, "served": 484}
    for name, x, top in (
        ("files", left, y["files"]), ("rows", right, y["files"]), ("batch", right, y["batch"]),
        ("chunks", left, y["batch"]), ("encoder", left, y["encoder"]), ("loss", right, y["encoder"]),
        ("checkpoints", left, y["checkpoints"]), ("model", right, y["checkpoints"]), ("served", right, y["served"]),
    ):  # fmt: skip
        c.label(x, top, width, height, *FLOW[name])
    c.label(left, y["served"], width, height, "report.html\nthe same metrics on any\nnumber of ranks")
    for top in (y["files"], y["encoder"], y["checkpoints"]):
        c.arrow((left + width + 2, top + 42), (right - 3, top + 42))
    c.arrow((right - 2, y["batch"] + 42), (left + width + 3, y["batch"] + 42))
    for x, top in ((right, y["files"]), (left, y["batch"]), (right, y["checkpoints"])):
        c.arrow((x + width / 2, top + height), (x + width / 2, top + 105))
    down = y["encoder"] + height
    c.arrow((right + 83, down), (right + 83, down + 26), (left + 120, down + 26), (left + 120, down + 4), color="c")
    c.note(222, down + 44, GRADIENT)
    c.arrow((left + 44, down), (left + 44, y["checkpoints"] - 3))


def lengths_of_quickstart(count: int) -> list[int]:
    """The numbers of words of the queries and documents of the quickstart's first English rows."""
    with gzip.open(ROOT / "recipes" / "quickstart" / "train-en.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line, _ in zip(file, range(count // 2), strict=False)]
    return [len(text.split()) for row in rows for text in (row["query"], row["pos"][0])]


def packing(c: Canvas, left: int = 470, top: int = 0) -> None:
    """Padding against packing, for eight texts of the quickstart. The packed ones begin at `left` and `top`."""
    lengths = lengths_of_quickstart(8)
    longest, total = max(lengths), sum(lengths)
    scale, colors = 400 / longest, ("a", "b", "c", "d")
    c.text(8, 22, "With padding", anchor="start", bold=True)
    c.note(8, 42, f"every text as long as the longest one: {longest * len(lengths):,} positions", anchor="start")
    for row, length in enumerate(lengths):
        y = 54 + row * 20
        c.box(8, y, longest * scale, 15, "empty", None)
        c.box(8, y, max(length * scale - 1, 2), 15, colors[row % 4], None)
    c.text(left, top + 22, "Packed", anchor="start", bold=True)
    c.note(left, top + 42, f"texts one after another, each attends to itself: {total:,} positions", anchor="start")
    x, y, width = 0.0, top + 54, longest
    for row, length in enumerate(lengths):
        remaining = float(length)
        while remaining > 0:
            piece = min(remaining, width - x)
            c.box(left + x * scale, y, max(piece * scale - 1, 2), 15, colors[row % 4], None)
            x, remaining = x + piece, remaining - piece
            if x >= width:
                x, y = 0.0, y + 20
    c.note(
        left,
        y + 46,
        f"{longest * len(lengths) / total:.1f} times fewer, for these four rows of the quickstart",
        anchor="start",
    )


def ranks(c: Canvas) -> None:
    """How embeddings and gradients travel between ranks."""
    for rank in range(2):
        one_rank(c, rank, 8 + rank * 516, 8)
    c.note(476, 128, "all-gather")
    c.arrow((436, 140), (516, 140))
    c.arrow((516, 150), (436, 150))
    c.note(476, 178, "reduce-scatter")
    c.arrow((436, 192), (516, 192), color="bad", dashed=True)
    c.arrow((516, 202), (436, 202), color="bad", dashed=True)
    c.note(476, 328, "Each score is computed once. The sum of the local losses is the loss of the whole batch.")


def ranks_on_phones(c: Canvas) -> None:
    """The same, one rank below the other."""
    one_rank(c, 0, 8, 8)
    one_rank(c, 1, 8, 376)
    c.note(178, 344, "all-gather", anchor="end")
    c.arrow((188, 308), (188, 372))
    c.arrow((198, 372), (198, 308))
    c.arrow((248, 308), (248, 372), color="bad", dashed=True)
    c.arrow((258, 372), (258, 308), color="bad", dashed=True)
    c.note(268, 344, "reduce-scatter", anchor="start")
    c.note(218, 696, "Each score is computed once.")
    c.note(218, 714, "The sum of the local losses is the loss of the whole batch.")


def one_rank(c: Canvas, rank: int, x: float, top: float) -> None:
    """What a rank computes, in a box."""
    c.box(x, top, 420, 296, "box", "line")
    c.text(x + 16, top + 24, f"rank {rank}", anchor="start", bold=True)
    c.label(x + 16, top + 38, 180, 56, f"queries of rank {rank}\nN/2 rows", "fill_a", "a")
    c.label(x + 224, top + 38, 180, 56, f"documents of rank {rank}\nwith their gradient", "fill_b", "b")
    c.label(x + 224, top + 134, 180, 56, "all documents\ngathered from all ranks", "fill_b", "b")
    c.label(
        x + 16,
        top + 228,
        388,
        56,
        f"local loss of rank {rank}\nits queries against all documents, sum over its rows / N",
        "fill_c",
        "c",
    )
    c.arrow((x + 106, top + 94), (x + 106, top + 224))
    c.arrow((x + 280, top + 94), (x + 280, top + 130))
    c.arrow((x + 300, top + 190), (x + 300, top + 224))
    c.arrow((x + 350, top + 224), (x + 350, top + 194), color="bad", dashed=True)
    c.arrow((x + 350, top + 130), (x + 350, top + 98), color="bad", dashed=True)


def caching(c: Canvas) -> None:
    """Gradient caching: the forward pass of all chunks, the loss, the backward pass of one chunk after another."""
    width = 104
    for column, (title, note) in enumerate((
        ("1. Encode every chunk", "graphs of as many chunks as fit are kept"),
        ("2. Loss of the whole batch", "gradient of every embedding"),
        ("3. Backward, chunk by chunk", "the others are encoded again"),
    )):  # fmt: skip
        x = 8 + column * 316
        c.text(x, 22, title, anchor="start", bold=True)
        c.note(x, 42, note, anchor="start")
    for chunk in range(4):
        y = 58 + chunk * 44
        kept = chunk == 3
        c.label(8, y, width, 34, f"chunk {chunk + 1}", "fill_a" if kept else "box", "a" if kept else "line")
        c.arrow((8 + width, y + 17), (154, y + 17))
        c.box(158, y + 5, 92, 24, "fill_b", "b")
        c.text(204, y + 22, "embeddings", size=12)
        c.arrow((250, y + 17), (320, 58 + 83), color="line")
        c.arrow((480, 58 + 83), (548, y + 17), color="bad", dashed=True)
        c.box(552, y + 5, 92, 24, "fill_d", "d")
        c.text(598, y + 22, "gradients", size=12)
        c.arrow((644, y + 17), (688, y + 17), color="bad", dashed=True)
        c.label(
            692,
            y,
            width + 50,
            34,
            "graph kept" if kept else "encoded again",
            "fill_a" if kept else "box",
            "a" if kept else "line",
        )
        c.arrow((692 + width + 50, y + 17), (884, 58 + 83), color="bad", dashed=True)
    c.label(324, 104, 152, 74, "loss\nall rows, all ranks", "fill_c", "c")
    c.label(888, 104, 64, 74, "sum\nof the\nweights'", "fill_d", "d")
    c.note(480, 256, "Memory grows with the chunk, not with the batch. Dropout masks are the same both times.")


def caching_on_phones(c: Canvas) -> None:
    """The same from top to bottom, with a column for each chunk."""
    columns = [8 + 104 * chunk for chunk in range(4)]
    c.text(8, 22, "1. Encode every chunk", anchor="start", bold=True)
    c.note(8, 40, "graphs of as many chunks as fit are kept", anchor="start")
    c.label(132, 178, 160, 60, "loss\nall rows, all ranks", "fill_c", "c")
    c.text(8, 204, "2. Loss", anchor="start", bold=True)
    c.note(8, 222, "of the whole batch", anchor="start")
    for chunk, x in enumerate(columns):
        kept = chunk == 3
        fill, line = ("fill_a", "a") if kept else ("box", "line")
        middle = x + 48
        c.label(x, 54, 96, 34, f"chunk {chunk + 1}", fill, line)
        c.arrow((middle, 88), (middle, 106))
        c.box(x + 2, 110, 92, 24, "fill_b", "b")
        c.text(middle, 127, "embeddings", size=12)
        c.arrow((middle, 134), (152 + 40 * chunk, 175))
        c.arrow((152 + 40 * chunk, 238), (middle, 278), color="bad", dashed=True)
        c.box(x + 2, 282, 92, 24, "fill_d", "d")
        c.text(middle, 299, "gradients", size=12)
        c.arrow((middle, 306), (middle, 324), color="bad", dashed=True)
        c.label(x, 328, 96, 40, "graph\nkept" if kept else "encoded\nagain", fill, line)
        c.arrow((middle, 368), (152 + 40 * chunk, 409), color="bad", dashed=True)
    c.text(8, 438, "3. Backward", anchor="start", bold=True)
    c.note(8, 456, "chunk by chunk", anchor="start")
    c.label(132, 412, 160, 54, "sum\nof the weights' gradients", "fill_d", "d")
    c.note(212, 490, "Memory grows with the chunk, not with the batch.")
    c.note(212, 508, "Dropout masks are the same both times.")


def batches(c: Canvas, left: int = 270, top: int = 0, height: int = 62, row: int = 13) -> None:
    """Batches of one source each, mixed batches, and batches of which a part is mixed.

    The batches begin at `left`, and `top` below their name; `height` is that of a name with its batches, `row` the
    width of a row of a batch.
    """
    rows, per_batch = (("by_source", "every batch from one source"), ("mixed", "every batch from all sources"),
                       ("by_source, mixed_share=0.25", "a quarter of each batch from all sources")), 8  # fmt: skip
    one = ["aaaaaaaa", "cccccccc", "aaaaaaaa", "bbbbbbbb", "aaaaaaaa", "bbbbbbbb"]
    mixed = ["abacabab", "aabcabca", "babaacab", "acaabbab", "abcababa", "caabaabb"]
    shares = [first[:6] + second[:2] for first, second in zip(one, mixed, strict=True)]
    for number, ((name, note), drawn) in enumerate(zip(rows, (one, mixed, shares), strict=True)):
        y = 8 + number * height
        c.text(8, y + 18, name, anchor="start", bold=True)
        c.note(8, y + 36, note, anchor="start")
        for batch, sources in enumerate(drawn):
            x = left + batch * (per_batch * row + 10)
            c.box(x, y + top, per_batch * row + 4, 42, "box")
            for place, source in enumerate(sources):
                c.box(x + 3 + place * row, y + top + 6, row - 2, 30, source, None)
    bottom = 14 + 3 * height
    for number, (source, name) in enumerate((("a", "msmarco"), ("b", "nli"), ("c", "faq"))):
        c.box(left + number * 120, bottom, 12, 12, source, None)
        c.note(left + 18 + number * 120, bottom + 11, name, anchor="start")


def life(c: Canvas) -> None:
    """The life of a run: checkpoints, a kill, and the same command on another number of ranks."""

    def steps(x: float, y: float, first: int, count: int, fill: str) -> float:
        for step in range(count):
            c.box(x, y, 26, 26, fill, None)
            c.text(x + 13, y + 18, str(first + step), size=12)
            x += 29
        return x

    c.text(8, 30, "8 ranks", anchor="start", bold=True)
    x = steps(90, 14, 1, 8, "fill_a")
    c.text(x + 16, 34, "killed", color="bad", bold=True, anchor="start")
    c.box(90 + 6 * 29 - 3, 62, 3, 18, "c", None)
    c.arrow((90 + 6 * 29 - 2, 42), (90 + 6 * 29 - 2, 60), color="c")
    c.label(90 + 6 * 29 - 82, 62, 160, 48, "checkpoint 6\nweights, optimizer", "fill_c", "c")
    c.text(8, 156, "4 ranks", anchor="start", bold=True)
    c.note(8, 174, "the same command", anchor="start")
    begin = 90 + 6 * 29
    c.arrow((begin - 2, 110), (begin - 2, 136), color="c")
    end = steps(begin, 140, 7, 12, "fill_b")
    c.note((begin + end) / 2, 190, "batches 7, 8, 9 ... are those of the run that was killed")
    c.arrow((end, 153), (end + 22, 153))
    c.label(end + 26, 126, 150, 54, "model/\nreopened, compared")


def life_on_phones(c: Canvas) -> None:
    """The same with smaller steps, and the model below."""

    def steps(x: float, y: float, numbers: range, fill: str) -> None:
        for place, step in enumerate(numbers):
            c.box(x + place * 23, y, 20, 26, fill, None)
            c.text(x + place * 23 + 10, y + 18, str(step), size=12)

    begin = 64 + 6 * 23
    c.text(8, 30, "8 ranks", anchor="start", bold=True)
    steps(64, 14, range(1, 9), "fill_a")
    c.text(64 + 8 * 23 + 6, 32, "killed", color="bad", bold=True, anchor="start")
    c.arrow((begin - 2, 42), (begin - 2, 60), color="c")
    c.label(begin - 82, 62, 160, 48, "checkpoint 6\nweights, optimizer", "fill_c", "c")
    c.arrow((begin - 2, 110), (begin - 2, 136), color="c")
    c.text(8, 156, "4 ranks", anchor="start", bold=True)
    c.note(8, 174, "the same command", anchor="start")
    steps(begin, 140, range(7, 15), "fill_b")
    c.note(196, 202, "batches 7, 8, 9 ... are those of the run that was killed")
    c.arrow((begin + 174, 166), (begin + 174, 216))
    c.label(begin + 28, 219, 150, 50, "model/\nreopened, compared")


def kinds(c: Canvas, columns: int = 4) -> None:
    """What a query and a document become in each kind of model, and how they are compared."""
    shown = (
        ("dense", "one vector a text", "cosine"),
        ("late_interaction", "a vector for every token", "sum of maxima"),
        ("sparse", "a weight for every word", "inner product"),
        ("cross_encoder", "the pair is read together", "one score"),
    )
    for number, (kind, what, how) in enumerate(shown):
        x, top = 8 + number % columns * 240, number // columns * 232
        c.box(x, top + 8, 224, 216)
        c.text(x + 112, top + 32, kind, bold=True)
        c.note(x + 112, top + 50, what)
        if kind == "cross_encoder":
            c.label(x + 22, top + 66, 180, 34, "query + document", "fill_a", "a")
            c.arrow((x + 112, top + 100), (x + 112, top + 168))
        for side, (name, fill) in enumerate((("query", "a"), ("document", "b"))):
            left = x + 14 + side * 104
            if kind == "cross_encoder":
                continue
            c.label(left, top + 66, 92, 30, name, f"fill_{fill}", fill)
            c.arrow((left + 46, top + 96), (left + 46, top + 112))
            heights = {"dense": [1], "late_interaction": [1] * 5, "sparse": [0.2, 0.9, 0.1, 0.6, 0.1, 0.4]}[kind]
            step = 92 / len(heights)
            for bar, height in enumerate(heights):
                c.box(left + bar * step + 2, top + 146 - 30 * height, step - 4, 30 * height, fill, None)
            c.arrow((left + 46, top + 148), (x + 92 + 40 * side, top + 168))
        c.label(x + 42, top + 172, 140, 38, how, "fill_c", "c")


class Diagram(NamedTuple):
    """A picture: its function, its size in pixels and its title; its function and size on phones."""

    draw: Callable[[Canvas], None]
    width: int
    height: int
    title: str
    draw_on_phones: Callable[[Canvas], None]
    phone_width: int
    phone_height: int


DIAGRAMS = {
    "diagram-flow": Diagram(
        flow, 1084, 270, "From files to a gradient, and to a served model", flow_on_phones, 380, 576
    ),
    "diagram-packing": Diagram(
        packing, 890, 222, "Padded and packed texts", partial(packing, left=8, top=224), 420, 416
    ),
    "diagram-ranks": Diagram(
        ranks, 952, 340, "Embeddings and gradients between two ranks", ranks_on_phones, 436, 724
    ),
    "diagram-caching": Diagram(caching, 960, 270, "Gradient caching in three steps", caching_on_phones, 424, 520),
    "diagram-batches": Diagram(
        batches, 960, 220, "Batches by source, mixed batches, and both",
        partial(batches, left=8, top=46, height=104, row=6), 360, 344,
    ),
    "diagram-life": Diagram(
        life, 800, 204, "A run that is killed and resumed on fewer ranks", life_on_phones, 392, 278
    ),
    "diagram-kinds": Diagram(kinds, 968, 232, "Four kinds of models", partial(kinds, columns=2), 480, 464),
}  # fmt: skip


def pictures() -> dict[str, str]:
    """The content of every file, by its name."""
    files = {}
    for name, each in DIAGRAMS.items():
        devices = {"": (each.draw, each.width, each.height)}
        devices["-phone"] = (each.draw_on_phones, each.phone_width, each.phone_height)
        for (device, (draw, width, height)), (scheme, palette) in product(devices.items(), PALETTES.items()):
            canvas = Canvas(width, height, palette)
            draw(canvas)
            files[f"{name}{device}{scheme}.svg"] = canvas.svg(each.title)
    return files


if __name__ == "__main__":
    for name, content in pictures().items():
        (IMAGES / name).write_text(content, encoding="utf-8")
