"""The contract of a corpus: an ordered source of documents with topics."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol


class Document(NamedTuple):
    """One document: its text and the name of its topic."""

    text: str
    topic: str


class UnreadableFile(NamedTuple):
    """A file of a corpus that is left out, and why."""

    name: str
    reason: str


class Corpus(Protocol):
    """A source of documents in an order that depends on its content alone.

    Attributes:
        name: as written in the config.
    """

    @property
    def name(self) -> str: ...

    def fingerprint(self) -> str:
        """Return a short text that changes when the documents may have changed; cheap.

        It is the key of this machine's cache, and holds the paths of files. What must be equal
        between machines is `Documents.digest`, of the content.
        """
        ...

    def documents(self) -> Iterator[Document | UnreadableFile]:
        """Yield the documents; blank ones are left to the reader to drop."""
        ...


def read_text(raw: bytes, name: str) -> str | UnreadableFile:
    """Return the UTF-8 text that the bytes of a file or record are, or why it is left out."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        # Names of files may be no text themselves.
        name = name.encode("utf-8", "backslashreplace").decode()
        return UnreadableFile(name, f"not UTF-8 ({error.reason} at byte {error.start})")


def fingerprint_of(*parts: object) -> str:
    """Return the SHA-256 of the parts; their lengths are hashed, too."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = str(part).encode("utf-8", "surrogatepass")
        digest.update(f"{len(encoded)}:".encode())
        digest.update(encoded)
    return digest.hexdigest()


def identities(files: Iterable[Path]) -> Iterator[object]:
    """What a cache knows files by: path, size and time of last change, not content.

    A link has its own path, which may give a topic, beside the file that it leads to.
    """
    for file in files:
        stat = file.stat()
        yield from (file.absolute(), file.resolve(), stat.st_size, stat.st_mtime_ns)
