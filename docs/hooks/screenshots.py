"""Pictures of terminals and reports for README and the pages, in docs/assets/images: `make screenshots`.

It trains the quickstart twice in runs/screenshots, or in the folder that is its argument, then evaluates, searches and
inspects, all in a pseudo-terminal. What is in that folder is not run again: delete it for new measurements. Terminals
become SVG with rich, reports become WebP with Chromium, each for light and dark pages, and for phones.
"""

import fcntl
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from io import StringIO
from itertools import accumulate, product
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.cells import chop_cells
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from embedtrain.report.page import write_report
from tests.browser import Browser

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "assets" / "images"
RANKS = 2
COLUMNS = 100
PHONE_COLUMNS = 52  # as many as can be read at 390 pixels; longer lines end with an ellipsis

_DARK = TerminalTheme(
    (30, 33, 41),
    (214, 217, 224),
    [(70, 75, 88), (240, 113, 120), (152, 195, 121), (229, 192, 123), (97, 175, 239), (198, 120, 221), (86, 182, 194),
     (214, 217, 224)],
    [(120, 126, 140), (255, 135, 140), (180, 220, 150), (245, 212, 150), (130, 195, 250), (215, 150, 235),
     (120, 205, 215), (255, 255, 255)],
)  # fmt: skip
_LIGHT = TerminalTheme(
    (246, 248, 250),
    (36, 41, 47),
    [(36, 41, 47), (207, 34, 46), (17, 99, 41), (125, 78, 0), (9, 105, 218), (130, 80, 223), (27, 124, 131),
     (110, 119, 129)],
    [(87, 96, 106), (164, 14, 38), (26, 127, 55), (99, 60, 1), (33, 139, 255), (164, 117, 249), (49, 146, 170),
     (140, 149, 159)],
)  # fmt: skip
THEMES = {"": _LIGHT, "-dark": _DARK}
# As rich's, without a font from a network: every text has its length, so that any monospaced font fits.
SVG = """<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px;
line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


@dataclass(frozen=True)
class Session:
    """A command and the part of its output that its picture shows.

    Attributes:
        command: as a user types it.
        until: the picture shows the terminal when a line with this text has been printed, otherwise at the end.
        max_lines: lines of output in the picture, the last ones.
    """

    command: str
    until: str | None = None
    max_lines: int = 40


# By the name of the picture. Later ones read the runs of earlier ones.
SESSIONS = {
    "train": Session(
        f"embedtrain train --nproc-per-node {RANKS} recipe=quickstart",
        until="step 80/120",
        max_lines=30,
    ),
    "evaluate": Session(
        "embedtrain evaluate model=runs/quickstart/model "
        "'sets=[recipes/quickstart/dev-en,recipes/quickstart/dev-zh2en]'"
    ),
    "search": Session(
        "embedtrain search model=runs/quickstart/model corpus=recipes/quickstart/dev-en query='compress files'"
    ),
    "inspect": Session("embedtrain inspect data=recipes/quickstart/train-en.jsonl.gz", max_lines=30),
}
COLDER = f"embedtrain train --nproc-per-node {RANKS} recipe=quickstart name=colder loss.temperature=0.03"


def main() -> None:
    """Run what was not run yet, and write the pictures."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "runs" / "screenshots").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    IMAGES.mkdir(parents=True, exist_ok=True)
    if not (folder / "recipes").exists():
        (folder / "recipes").symlink_to(ROOT / "recipes")
    for name, session in SESSIONS.items():
        write_terminal(name, session, recorded(folder, name, session.command))
    recorded(folder, "colder", COLDER)
    write_reports(folder)
    for image in sorted(IMAGES.iterdir()):
        print(f"{image.relative_to(ROOT)}  {image.stat().st_size / 1000:.0f} kB")


def recorded(folder: Path, name: str, command: str) -> str:
    """What the command printed in the folder when it was run for this picture."""
    path = folder / f"{name}.ansi"
    if not path.is_file():
        print(f"$ {command}", flush=True)
        path.write_bytes(run_in_terminal(command, folder))
    return path.read_bytes().decode()  # `read_text` would replace carriage returns


def run_in_terminal(command: str, folder: Path) -> bytes:
    """Everything that `embedtrain ...` prints on a terminal of COLUMNS columns.

    Raises:
        CalledProcessError: the command failed.
    """
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TERM": "xterm-256color",
        "COLUMNS": str(COLUMNS),
    }
    # The command of this checkout, whichever is installed.
    arguments = [sys.executable, "-m", "embedtrain.cli.console", *shlex.split(command)[1:]]
    process = subprocess.Popen(arguments, stdin=terminal, stdout=terminal, stderr=terminal, cwd=folder, env=environment)  # noqa: S603
    os.close(terminal)
    parts = []
    while True:
        try:
            part = os.read(controller, 1 << 16)
        except OSError:  # the last process with this terminal has ended
            break
        if not part:
            break
        parts.append(part)
    os.close(controller)
    if process.wait() != 0:
        sys.stderr.buffer.write(b"".join(parts)[-4000:])
        raise subprocess.CalledProcessError(process.returncode, command)
    return b"".join(parts)


_TOKEN = re.compile(r"\x1b\[(?P<numbers>[0-9;?]*)(?P<letter>[A-Za-z])|(?P<control>[\r\n])|(?P<text>[^\x1b\r\n]+)|\x1b")


def screen(output: str) -> list[str]:
    """The lines on a terminal after this output, with their colors; it interprets what rich and tqdm write."""
    lines, row, at_start = [""], 0, False
    for token in _TOKEN.finditer(output):
        number = int(token["numbers"]) if (token["numbers"] or "").isdigit() else 1
        match token["letter"] or token["control"]:
            case "\r":
                at_start = True
            case "\n":
                row, at_start = row + 1, False
                lines += [""] * (row + 1 - len(lines))
            case "A":
                row = max(row - number, 0)
            case "K":
                lines[row] = ""
            case "J":
                del lines[row + 1 :]
            case "m" | None:
                lines[row] = token[0] if at_start else lines[row] + token[0]
                at_start = False
    while lines and not lines[-1]:
        lines.pop()
    return lines


_FRAME = "\r\x1b[2K"  # begins each refresh of a live display


def until(output: str, text: str) -> str:
    """The output to the first refresh of the display after a line with the text; the whole output if there is none."""
    frames = output.split(_FRAME)
    shown = [index for index, frame in enumerate(frames) if text in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame)]
    return _FRAME.join(frames[: shown[0] + 2]) if shown else output


def write_terminal(name: str, session: Session, output: str) -> None:
    """The picture of one session, for light and dark pages."""
    lines = screen(until(output, session.until) if session.until else output)
    if len(lines) > session.max_lines:
        lines = ["...", *lines[1 - session.max_lines :]]
    texts = list(AnsiDecoder().decode("\n".join(lines)))
    command = Text.assemble(("$ ", "bold green"), (session.command, "bold"))
    for (device, columns), (suffix, theme) in product({"": COLUMNS, "-phone": PHONE_COLUMNS}.items(), THEMES.items()):
        console = Console(record=True, width=columns, file=StringIO(), force_terminal=True, color_system="truecolor")
        console.print(command)
        for line in texts:
            for part in [line] if device else _folded(line, columns):
                console.print(part, no_wrap=True, overflow="ellipsis")
        svg = console.export_svg(title="", theme=theme, code_format=SVG, unique_id=f"t-{name}")
        (IMAGES / f"terminal-{name}{device}{suffix}.svg").write_text(svg, encoding="utf-8")


def _folded(line: Text, columns: int) -> list[Text]:
    """As a terminal breaks it."""
    return list(line.divide(list(accumulate(map(len, chop_cells(line.plain, columns))))[:-1]))


def write_reports(folder: Path) -> None:
    """The top of the report at desktop and phone width, and of a comparison, for light and dark pages."""
    run, other = folder / "runs" / "quickstart", folder / "runs" / "colder"
    pages = {"report": folder / "report.html", "comparison": folder / "comparison.html"}
    write_report([run], pages["report"])
    write_report([run, other], pages["comparison"])
    # Widths, and the element with which the picture ends: the first row of plots, the first set of the table.
    devices = {"": (1280, "#evaluation .cards"), "-phone": (390, "#evaluation tbody")}
    with Browser() as browser:
        for (name, page), (device, (width, last)), scheme in product(pages.items(), devices.items(), THEMES):
            browser.open(page, width=width, dark=bool(scheme), scale=1.5)
            end = browser.evaluate(f"Math.ceil(document.querySelector('{last}').getBoundingClientRect().bottom)")
            browser.screenshot(IMAGES / f"{name}{device}{scheme}.webp", height=end + 12 * (not device))


if __name__ == "__main__":
    main()
