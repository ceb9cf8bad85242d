"""`python -m embedtrain pages pdfs=DIR output_dir=DIR`: the pages of PDF files as pictures, and as rows of a corpus."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from embedtrain.config.command_options import ErrorOptions, OutputOptions
from embedtrain.config.compose import compose_command
from embedtrain.config.options import option
from embedtrain.config.validation import OptionChecks, is_expected, require_single_process
from embedtrain.errors import ConfigError
from embedtrain.utils.files import expand_user
from embedtrain.utils.formatting import install_command

HELP = """embedtrain pages: the pages of PDF files as pictures

  embedtrain pages pdfs=DIR output_dir=DIR [option=value ...]

DIR: a PDF file, or a folder whose PDF files, also those of folders in it, are
rendered. Writes DIR/pages.jsonl, a row for each page, which search, mine and
evaluation sets take as a corpus, and a PNG for each page in DIR/images.
The same command resumes, and renders files that are new or have changed.

{options: pdfs! output_dir! dpi max_pixels on_error workers}"""


@dataclass(kw_only=True)
class PagesOptions(ErrorOptions, OutputOptions):
    """Options of `python -m embedtrain pages`."""

    pdfs: str = option("", is_input=True)  # a PDF file, or a folder of them
    dpi: int = option(144, within=(10, 1200))  # pixels per inch of the page
    # pixels of a page; a larger page has fewer pixels per inch
    max_pixels: int = option(4_000_000, within=(10_000, 80_000_000))
    workers: int | None = option(None, at_least=1, in_result=False)  # processes; default: one per CPU core


def compose(arguments: list[str]) -> PagesOptions:
    """The options, checked."""
    require_single_process("pages")
    options = compose_command("pages", PagesOptions, arguments, HELP)
    check = OptionChecks(options)
    check.require(bool(options.pdfs), "pdfs", "is missing; write a PDF file, or a folder of PDF files")
    check.require(bool(options.output_dir), "output_dir", "is missing; write a directory for the pages")
    return options


def require_paths(options: PagesOptions) -> None:
    """Raise a ConfigError for a path that does not exist, or if what renders pages is not installed."""
    if not (expand_user(options.pdfs).exists() or is_expected(options.pdfs)):
        raise ConfigError(f"pdfs={options.pdfs}: no such file or folder")
    if importlib.util.find_spec("pypdfium2") is None or importlib.util.find_spec("PIL") is None:
        raise ConfigError(f"pages are rendered by pypdfium2, which is not installed: {install_command('pages')}")


def run(options: PagesOptions) -> Path:
    """Render the pages that are missing, write the rows, and print what was written. Returns the file of rows."""
    from embedtrain.commands.pages.rendering import render_pages
    from embedtrain.tracking.console import Console
    from embedtrain.tracking.pages import Page

    console = Console()
    with console.progress() as progress:
        written = render_pages(options, progress)
    page = Page()
    facts = [
        ("documents", f"{written.num_documents:,}"),
        ("pages", f"{written.num_pages:,}, of which {written.num_rendered:,} were rendered now"),
        ("rows", str(written.rows)),
    ]
    if written.skipped:
        facts.append(("skipped", f"{len(written.skipped):,} documents or pages: {written.skipped_file}"))
    page.facts(facts)
    if written.skipped:
        page.note(f"the first one skipped: {written.skipped[0]}", "yellow")
    page.note("")
    page.note(f"embedtrain search model=DIR corpus={written.rows} query=TEXT")
    return written.rows
