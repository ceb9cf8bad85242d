"""Renders pages of PDF files in processes of their own, which a file that is damaged on purpose may crash or hang.

OUTPUT_DIR/pages.jsonl                       a row for each page
OUTPUT_DIR/images/DOCUMENT/0001.png          a page; DOCUMENT is the path below the folder of PDF files
OUTPUT_DIR/skipped.txt                       with on_error=skip, what could not be rendered, a line each
OUTPUT_DIR/.pages/settings.json              how pages are rendered
OUTPUT_DIR/.pages/documents.jsonl            what is known of documents: their content, and pages that are bad
"""

import contextlib
import json
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embedtrain.config.recipe import OnError
from embedtrain.errors import ConfigError, DataError
from embedtrain.utils.files import atomic_write, expand_user, file_checksum, open_append, remove_tree, write_json
from embedtrain.utils.formatting import printable
from embedtrain.utils.limits import num_usable_cores

if TYPE_CHECKING:
    from embedtrain.commands.pages import PagesOptions

ROWS, IMAGES, SKIPPED, STATE = "pages.jsonl", "images", "skipped.txt", ".pages"
TIMEOUT = 120.0  # seconds for a page, or to open a document
_MEMORY = 4 << 30  # bytes of a process; a page of 80 million pixels needs 0.6 GB
_POINTS_PER_INCH = 72
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Document:
    """A PDF file."""

    name: str  # the path below the folder, with /
    path: Path
    digest: str = ""
    num_pages: int = 0
    problem: str = ""  # of the whole document
    bad_pages: dict[int, str] = field(default_factory=dict)  # the problem of each, by number from 1

    def image(self, number: int) -> str:
        """The picture of a page, relative to the output directory."""
        return f"{IMAGES}/{self.name}/{number:04}.png"


@dataclass(frozen=True)
class Written:
    """What was written."""

    rows: Path
    num_documents: int
    num_pages: int
    num_rendered: int
    skipped: list[str]
    skipped_file: Path


def render_pages(options: "PagesOptions", progress: Progress) -> Written:
    """Render the pages that are missing, and write the rows of all.

    Raises ConfigError if there is no PDF file or the directory has pages that were rendered otherwise, and DataError
    for a document or page that cannot be rendered, unless `on_error=skip`.
    """
    output_dir = expand_user(options.output_dir)
    documents = find_documents(expand_user(options.pdfs), options.pdfs, output_dir)
    stops = options.on_error is OnError.stop
    _require_settings(output_dir, options)
    with Workers(options.workers or num_usable_cores()) as workers:
        _open_all(documents, workers, progress)
        problems = [f"{document.path}: {document.problem}" for document in documents if document.problem]
        if problems and stops:
            more = f" (and {len(problems) - 1:,} more)" if len(problems) > 1 else ""
            raise DataError(f"{problems[0]}{more}; on_error=skip leaves out what cannot be rendered")
        documents = [document for document in documents if not document.problem]
        state = _State(output_dir / STATE / "documents.jsonl")
        for document in documents:
            state.resume(document, output_dir)
        missing = deque(_missing_pages(documents, output_dir))
        num_missing = num_rendered = len(missing)
        tasks = (
            ("render", document, number, (output_dir / document.image(number), options.dpi, options.max_pixels))
            for document, number in missing
        )
        for done, (document, number, problem) in enumerate(workers.run(tasks), 1):
            progress("rendering pages", done, num_missing)
            if isinstance(problem, str):
                if stops:
                    raise DataError(
                        f"{document.path}, page {number}: {problem}; on_error=skip leaves out what cannot be rendered"
                    )
                num_rendered -= 1
                document.bad_pages[number] = problem
                state.add(document, page=number, problem=problem)
    problems += [f"{d.path}, page {number}: {d.bad_pages[number]}" for d in documents for number in sorted(d.bad_pages)]
    return _write_rows(output_dir, documents, num_rendered, problems)


def find_documents(folder: Path, written: str, output_dir: Path) -> list[Document]:
    """The PDF files of a folder and of the folders in it, or the one file, by name; links to folders are not followed.

    Raises ConfigError if there is none.
    """
    if folder.is_file():
        found = [folder]
        folder = folder.parent
    else:
        own = output_dir.resolve()
        found = []
        for place, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if (Path(place) / name).resolve() != own]
            found += [Path(place) / name for name in names if name.lower().endswith(".pdf")]
    documents = [Document(path.relative_to(folder).as_posix(), path) for path in found]
    documents.sort(key=lambda document: document.name)
    if not documents:
        raise ConfigError(f"pdfs={written}: holds no files that end with .pdf")
    return documents


def _open_all(documents: list[Document], workers: "Workers", progress: Progress) -> None:
    tasks = (("open", document, 0, ()) for document in documents)
    for done, (document, _, answer) in enumerate(workers.run(tasks), 1):
        progress("opening documents", done, len(documents))
        if isinstance(answer, str):
            document.problem = answer
        elif not _is_utf8(document.name):  # which a row could not have
            document.problem = "its name is not UTF-8: rename it"
        else:
            document.digest, document.num_pages = answer


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _require_settings(output_dir: Path, options: "PagesOptions") -> None:
    """Write how pages are rendered, or compare it with what has been written."""
    import pypdfium2

    path = output_dir / STATE / "settings.json"
    renderer = f"pypdfium2 {pypdfium2.PYPDFIUM_INFO}, PDFium {pypdfium2.PDFIUM_INFO}"
    settings = {"dpi": options.dpi, "max_pixels": options.max_pixels, "renderer": renderer}
    try:
        earlier = json.loads(path.read_bytes())
    except FileNotFoundError:
        # A run that was killed right at its start has left the folder of settings.
        if output_dir.is_dir() and any(other.name != STATE for other in output_dir.iterdir()):
            raise ConfigError(
                f"output_dir={options.output_dir}: holds other files; write a new directory for the pages"
            ) from None
        with atomic_write(path) as unfinished:
            write_json(unfinished, settings)
        return
    except ValueError as error:
        raise DataError(f"{path}: is damaged ({error}); remove {options.output_dir}, or write another one") from None
    if earlier != settings:
        differing = [f"{name}={earlier.get(name)}" for name in settings if earlier.get(name) != settings[name]]
        raise ConfigError(
            f"output_dir={options.output_dir}: holds pages of {', '.join(differing)}; write another directory, or "
            "remove it"
        )


class _State:
    """What is known of documents from earlier runs, in a file that grows by a line for each fact."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in path.read_bytes().splitlines():
                # The last line of a killed run may be cut off, and is then written again.
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    self._add(json.loads(line))

    def resume(self, document: Document, output_dir: Path) -> None:
        """Take over what is known of this content; remove pages of another one."""
        known = self._known.get(document.name)
        if known is not None and known["digest"] == document.digest:
            document.bad_pages.update(known["bad"])
            return
        remove_tree(output_dir / IMAGES / document.name)
        self.add(document)

    def add(self, document: Document, **fact: Any) -> None:
        """Remember a document, or a fact about it."""
        line = json.dumps({"document": document.name, "digest": document.digest, **fact})
        with open_append(self._path) as file:
            file.write(f"\n{line}\n".encode())

    def _add(self, fact: dict[str, Any]) -> None:
        known = self._known.get(fact["document"])
        if known is None or known["digest"] != fact["digest"]:
            known = self._known[fact["document"]] = {"digest": fact["digest"], "bad": {}}
        if "page" in fact:
            known["bad"][fact["page"]] = fact["problem"]


def _missing_pages(documents: Iterable[Document], output_dir: Path) -> Iterator[tuple[Document, int]]:
    for document in documents:
        for number in range(1, document.num_pages + 1):
            if number not in document.bad_pages and not (output_dir / document.image(number)).is_file():
                yield document, number


def _write_rows(output_dir: Path, documents: list[Document], num_rendered: int, skipped: list[str]) -> Written:
    num_pages = 0
    with atomic_write(output_dir / ROWS) as path, path.open("w", encoding="utf-8") as file:
        for document in documents:
            for number in range(1, document.num_pages + 1):
                if number not in document.bad_pages:
                    row = {"_id": f"{document.name}#{number}", "image": document.image(number)}
                    file.write(json.dumps({**row, "pdf": document.name, "page": number}, ensure_ascii=False) + "\n")
                    num_pages += 1
    skipped_file = output_dir / SKIPPED
    if skipped:
        with atomic_write(skipped_file) as path:
            path.write_text("".join(f"{printable(line)}\n" for line in skipped), encoding="utf-8")
    else:
        skipped_file.unlink(missing_ok=True)
    return Written(output_dir / ROWS, len(documents), num_pages, num_rendered, skipped, skipped_file)


# Processes.


_READY = "ready"
_Task = tuple[str, Document, int, tuple[Any, ...]]


class _Worker:
    """A process that opens documents and renders pages, one at a time."""

    def __init__(self, serve: Callable[[Connection], None]) -> None:
        context = get_context("spawn")
        self.connection, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other,), daemon=True)
        self._process.start()
        other.close()
        self.is_ready = False  # it says so when it has started, which takes longer than a page
        self.task: _Task | None = None
        self.deadline = math.inf

    def begin(self, task: _Task, timeout: float) -> None:
        what, document, number, arguments = task
        self.task = task
        self.set_deadline(timeout)
        self.connection.send((what, document.path, number, arguments))

    def set_deadline(self, timeout: float) -> None:
        if self.is_ready:
            self.deadline = time.monotonic() + timeout

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


class Workers:
    """Processes that answer tasks by `serve`; one that crashes or needs more than `timeout` seconds is replaced."""

    def __init__(self, count: int, serve: Callable[[Connection], None] | None = None, timeout: float = TIMEOUT) -> None:
        self._count, self._serve, self._timeout = count, serve or _serve, timeout
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.end()

    def run(self, tasks: Iterator[_Task]) -> Iterator[tuple[Document, int, Any]]:
        """The answers to tasks, in the order in which they come: what the task gives, or its problem, a string."""
        busy: list[_Worker] = []
        idle = list(self._workers)
        waiting = True
        while True:
            while waiting and len(busy) < self._count:
                task = next(tasks, None)
                if task is None:
                    waiting = False
                    break
                worker = idle.pop() if idle else self._start()
                worker.begin(task, self._timeout)
                busy.append(worker)
            if not busy:
                return
            first = min(worker.deadline for worker in busy)
            timeout = None if first == math.inf else max(0.0, first - time.monotonic())
            ready = wait([worker.connection for worker in busy], timeout)
            now = time.monotonic()
            for worker in list(busy):
                if worker.connection not in ready and now < worker.deadline:
                    continue
                assert worker.task is not None
                _, document, number, _ = worker.task
                answer = self._answer(worker, has_one=worker.connection in ready)
                if not worker.is_ready and answer == _READY:
                    worker.is_ready = True
                    worker.set_deadline(self._timeout)
                    continue
                busy.remove(worker)
                if worker in self._workers:
                    idle.append(worker)
                if isinstance(answer, OSError):  # such as a disk that is full: no fault of the page
                    raise answer
                yield document, number, answer

    def _start(self) -> _Worker:
        self._workers.append(_Worker(self._serve))
        return self._workers[-1]

    def _answer(self, worker: _Worker, *, has_one: bool) -> Any:
        """What a process has answered; one without an answer is ended."""
        if has_one:
            with contextlib.suppress(EOFError, ConnectionError):
                return worker.connection.recv()
        self._workers.remove(worker)
        worker.end()
        return "crashes the process that renders it" if has_one else f"is not rendered after {self._timeout:g} s"


def _serve(connection: Connection) -> None:
    """Answer tasks until the other process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent to the whole group of a terminal
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    opened: tuple[Path, Any] | None = None
    with contextlib.suppress(EOFError, ConnectionError):
        connection.send(_READY)
        while True:
            what, path, number, arguments = connection.recv()
            try:
                if opened is None or opened[0] != path:
                    if opened is not None:
                        opened[1].close()
                    opened = None
                    opened = path, _open(path)
                answer: Any = None
                if what == "open":
                    answer = _describe(*opened)
                else:
                    _render(opened[1], number, *arguments)
            except _Problem as problem:
                answer = str(problem)
            except MemoryError:
                answer = f"needs more than {_MEMORY >> 30} GiB of memory"
            except OSError as error:
                answer = error
            connection.send(answer)


class _Problem(Exception):
    """Why a document or a page cannot be rendered."""


def _open(path: Path) -> Any:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(path)
    except OSError as error:
        raise _Problem(f"cannot be read ({error.strerror or error})") from None
    except pypdfium2.PdfiumError as error:
        # PDFium says so of a file without pages as well.
        if "password" in str(error).lower() and b"/Encrypt" in path.read_bytes():
            raise _Problem("is encrypted: decrypt it before, for example with qpdf --decrypt") from None
        raise _Problem(f"is not a PDF file that can be read: {error}".rstrip(".")) from None
    with contextlib.suppress(pypdfium2.PdfiumError):
        document.init_forms()  # so that what is written in the fields of forms is seen
    return document


def _describe(path: Path, document: Any) -> tuple[str, int]:
    if not len(document):
        raise _Problem("has no pages")
    return file_checksum(path), len(document)


def _render(document: Any, number: int, target: Path, dpi: int, max_pixels: int) -> None:
    import pypdfium2

    try:
        page = document[number - 1]
        width, height = page.get_size()  # in points, after a rotation
        if not (width > 0 and height > 0):
            raise _Problem(f"has no area ({width:g} x {height:g} points)")
        scale = min(dpi / _POINTS_PER_INCH, (max_pixels / (width * height)) ** 0.5)
        picture = page.render(scale=scale).to_pil().convert("RGB")
        page.close()
    except pypdfium2.PdfiumError as error:
        raise _Problem(f"cannot be rendered: {error}".rstrip(".")) from None
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(target) as path:
        picture.save(path, "PNG", compress_level=3)
