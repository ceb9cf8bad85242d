"""PDF files, written from the objects that the format consists of."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

_FILE_ID = bytes(range(16))
_PADDING = bytes.fromhex("28bf4e5e4e758a4164004e56fffa01082e2e00b6d0683e802f0ca9fe6453697a")
_PERMISSIONS = -4


def pdf(
    texts: Sequence[str],
    *,
    size: tuple[float, float] = (200, 100),
    rotate: int = 0,
    password: str | None = None,
    broken_pages: Sequence[int] = (),
) -> bytes:
    """A PDF file with a page for each text.

    Args:
        texts: of the pages.
        size: of a page in points.
        rotate: degrees by which a viewer turns the pages.
        password: encrypts the file (RC4 of 40 bits); without the empty password it opens with this one alone.
        broken_pages: numbers of pages, from 0, whose object is no page.
    """
    key = None if password is None else _encryption_key(password)
    pages = [3 + 2 * number for number in range(len(texts))]
    objects = {
        1: b"<< /Type /Catalog /Pages 2 0 R >>",
        2: b"<< /Type /Pages /Kids [%s] /Count %d >>" % (b" ".join(b"%d 0 R" % page for page in pages), len(pages)),
    }
    for page, text in zip(pages, texts, strict=True):
        content = f"BT /F1 12 Tf 10 {size[1] / 2:g} Td ({text}) Tj ET".encode("latin-1")
        if key is not None:
            content = _rc4(hashlib.md5(key + (page + 1).to_bytes(3, "little") + bytes(2)).digest()[:10], content)
        objects[page] = (
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 %g %g] /Rotate %d /Contents %d 0 R /Resources << /Font << "
            b"/F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>" % (*size, rotate, page + 1)
        )
        objects[page + 1] = b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content)
    for number in broken_pages:
        objects[pages[number]] = b"42"
    trailer = b"/Root 1 0 R /Size %d /ID [<%s> <%s>]" % (len(objects) + 1, *[_FILE_ID.hex().encode()] * 2)
    if password is not None and key is not None:
        owner, user = _owner_entry(password), _rc4(key, _PADDING)
        trailer += b" /Encrypt << /Filter /Standard /V 1 /R 2 /O <%s> /U <%s> /P %d >>" % (
            *(value.hex().encode() for value in (owner, user)),
            _PERMISSIONS,
        )
    file, places = bytearray(b"%PDF-1.4\n"), []
    for number, content in sorted(objects.items()):
        places.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    start = len(file)
    file += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    file += b"".join(b"%010d 00000 n \n" % place for place in places)
    file += b"trailer\n<< %s >>\nstartxref\n%d\n%%%%EOF\n" % (trailer, start)
    return bytes(file)


def write_pdf(path: Path, *texts: str, **options: object) -> Path:
    """Write a PDF file of `pdf`, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pdf(texts, **options))  # type: ignore[arg-type]
    return path


def _padded(password: str) -> bytes:
    return (password.encode("latin-1") + _PADDING)[:32]


def _owner_entry(password: str) -> bytes:
    """Entry O of the dictionary of encryption (PDF 1.4, algorithm 3.3, revision 2), with one password for both."""
    return _rc4(hashlib.md5(_padded(password)).digest()[:5], _padded(password))


def _encryption_key(password: str) -> bytes:
    """Algorithm 3.2 of PDF 1.4, revision 2."""
    permissions = _PERMISSIONS.to_bytes(4, "little", signed=True)
    return hashlib.md5(_padded(password) + _owner_entry(password) + permissions + _FILE_ID).digest()[:5]


def _rc4(key: bytes, data: bytes) -> bytes:
    state = list(range(256))
    j = 0
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    i = j = 0
    output = bytearray()
    for byte in data:
        i = (i + 1) % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        output.append(byte ^ state[(state[i] + state[j]) % 256])
    return bytes(output)
