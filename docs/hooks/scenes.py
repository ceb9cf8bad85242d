"""Drawn scenes with captions, the data of recipe=quickstart_images, and the picture of what a search finds among them.

`python docs/hooks/scenes.py` writes recipes/quickstart_images. With the model of a run,
`python docs/hooks/scenes.py runs/quickstart_images/model` writes docs/assets/images/found.svg instead.
"""

import base64
import io
import json
import math
import random
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw
from sentence_transformers import SentenceTransformer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "recipes" / "quickstart_images"
SIDE = 64  # pixels of a picture
COLOURS = {
    "red": (214, 39, 40),
    "orange": (255, 140, 20),
    "yellow": (250, 220, 40),
    "green": (30, 150, 60),
    "blue": (40, 80, 210),
    "purple": (140, 60, 180),
    "white": (250, 250, 250),
    "black": (20, 20, 20),
}
RADII = {"small": 7, "large": 13}
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
# How the first thing of a caption stands to the second one, and the same the other way round.
RELATIONS = {"above": "below", "left of": "right of"}
SETS = {"train": 9000, "dev": 500}  # pictures of each; no scene is in both
SEED = 20
Point = tuple[float, float]


@dataclass(frozen=True)
class Thing:
    """A shape of a size and a colour."""

    size: str
    colour: str
    shape: str

    def __str__(self) -> str:
        article = "an" if self.size[0] in "aeiou" else "a"
        return f"{article} {self.size} {self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """Two things and how they stand to each other.

    Attributes:
        relation: of the first one to the second one, a key of RELATIONS.
    """

    first: Thing
    second: Thing
    relation: str

    def caption(self, *, reverse: bool = False) -> str:
        """`a small red circle above a large blue square`, or `a large blue square below a small red circle`."""
        if reverse:
            return f"{self.second} {RELATIONS[self.relation]} {self.first}"
        return f"{self.first} {self.relation} {self.second}"


def scenes(count: int) -> list[Scene]:
    """Different scenes in an order that depends on SEED alone."""
    things = [Thing(*values) for values in product(RADII, COLOURS, SHAPES)]
    every = [Scene(*values) for values in product(things, things, RELATIONS) if values[0] != values[1]]
    return random.Random(SEED).sample(every, count)


def draw(scene: Scene, chance: random.Random) -> Image.Image:
    """The scene on a grey of its own, with its things a few pixels off their places."""
    grey = chance.randint(100, 200)
    tint = tuple(grey + chance.randint(-25, 25) for _ in range(3))
    # A palette of three colours: a file of a quarter of the size.
    image = Image.new("P", (SIDE, SIDE), 0)
    colours = (tint, COLOURS[scene.first.colour], COLOURS[scene.second.colour])
    image.putpalette([value for colour in colours for value in colour])
    canvas = ImageDraw.Draw(image)
    near, far = SIDE // 4, SIDE - SIDE // 4
    places = (
        [(SIDE // 2, near), (SIDE // 2, far)] if scene.relation == "above" else [(near, SIDE // 2), (far, SIDE // 2)]
    )
    for number, (thing, (x, y)) in enumerate(zip((scene.first, scene.second), places, strict=True), start=1):
        draw_thing(canvas, thing, (x + chance.randint(-3, 3), y + chance.randint(-3, 3)), number)
    return image


def draw_thing(canvas: ImageDraw.ImageDraw, thing: Thing, centre: tuple[int, int], colour: int) -> None:
    """A thing in a colour of the palette."""
    (x, y), radius = centre, RADII[thing.size]
    box = (x - radius, y - radius, x + radius, y + radius)
    match thing.shape:
        case "circle":
            canvas.ellipse(box, fill=colour)
        case "ring":
            canvas.ellipse(box, outline=colour, width=max(2, radius // 3))
        case "square":
            canvas.rectangle(box, fill=colour)
        case "triangle":
            canvas.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
        case "star":
            canvas.polygon(_star(x, y, radius), fill=colour)
        case _:
            arm = max(1, radius // 4)
            canvas.rectangle((x - radius, y - arm, x + radius, y + arm), fill=colour)
            canvas.rectangle((x - arm, y - radius, x + arm, y + radius), fill=colour)


def _star(x: int, y: int, radius: int) -> list[Point]:
    """Five points, and the corners between them."""
    corners = []
    for number in range(10):
        length, angle = radius * (1 if number % 2 == 0 else 0.42), math.pi * number / 5
        corners.append((x + round(length * math.sin(angle)), y - round(length * math.cos(angle))))
    return corners


def encoded(image: Image.Image) -> bytes:
    """As a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True, bits=2)
    return file.getvalue()


def write_data(folder: Path) -> None:
    """A Parquet file for each set, which `datasets` opens with its pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    features = {"caption": {"dtype": "string", "_type": "Value"}, "image": {"_type": "Image"}}
    picture = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema(
        {"caption": pa.string(), "image": picture},
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    chance, every = random.Random(SEED), iter(scenes(sum(SETS.values())))
    for name, count in SETS.items():
        rows = []
        for number in range(count):
            scene = next(every)
            caption = scene.caption(reverse=chance.random() < 0.5)
            picture_file = {"bytes": encoded(draw(scene, chance)), "path": f"{name}-{number}.png"}
            rows.append({"caption": caption, "image": picture_file})
        table = pa.Table.from_pylist(rows, schema=schema)
        path = folder / f"{name}.parquet"
        pq.write_table(table, path, compression="zstd", compression_level=19)
        print(f"{path}: {count:,} pictures, {path.stat().st_size / 1000:.0f} kB")


# Of the figure, whose sizes are pixels.
NUM_QUERIES, NUM_FOUND, CELL, MARGIN, LINE = 3, 6, 96, 12, 34
THEMES = {"": ("#f6f8fa", "#24292f", "#57606a", "#0969da"), "-dark": ("#1e2129", "#d6d9e0", "#8b93a3", "#61afef")}


def write_figure(model_dir: Path, folder: Path) -> None:
    """The first captions of dev.parquet, and the pictures there that the model finds first; the right one is framed."""
    model = SentenceTransformer(str(model_dir), device="cpu")
    rows = pq.read_table(FOLDER / "dev.parquet").to_pylist()
    queries = [row["caption"] for row in rows[:NUM_QUERIES]]
    pictures = [Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB") for row in rows]
    scores = model.similarity(model.encode_query(queries), model.encode_document(pictures)).numpy()
    width, height = MARGIN + NUM_FOUND * (CELL + MARGIN), NUM_QUERIES * (LINE + CELL + LINE) + MARGIN
    for suffix, (background, text, faint, frame) in THEMES.items():
        parts = [
            f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg"'
            f' font-family="sans-serif"><rect width="{width}" height="{height}" rx="8" fill="{background}"/>'
        ]
        for number, query in enumerate(queries):
            top = number * (LINE + CELL + LINE)
            parts.append(f'<text x="{MARGIN}" y="{top + 25}" font-size="16" fill="{text}">{escape(query)}</text>')
            for place, found in enumerate(np.argsort(-scores[number], kind="stable")[:NUM_FOUND]):
                x, y = MARGIN + place * (CELL + MARGIN), top + LINE
                data = base64.b64encode(rows[found]["image"]["bytes"]).decode()
                score = f"{scores[number][found]:.2f}"
                if found == number:
                    parts.append(
                        f'<rect x="{x - 3}" y="{y - 3}" width="{CELL + 6}" height="{CELL + 6}" fill="{frame}"/>'
                    )
                parts.append(
                    f'<image x="{x}" y="{y}" width="{CELL}" height="{CELL}" href="data:image/png;base64,{data}"/>'
                    f'<text x="{x}" y="{y + CELL + 18}" font-size="12" fill="{faint}">{score}</text>'
                )
        (folder / f"found{suffix}.svg").write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:]:
        write_figure(Path(sys.argv[1]), ROOT / "docs" / "assets" / "images")
    else:
        write_data(FOLDER)
