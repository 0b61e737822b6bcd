"""Text from files: one file, a folder, or the standard library of the running interpreter."""

import dataclasses
import fnmatch
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from lowcomm_jax.data.config import DataConfig
from lowcomm_jax.data.corpora.base import (
    Document,
    UnreadableFile,
    fingerprint_of,
    identities,
    read_text,
)

SECTION = 2_000
LONGEST_SECTION = 8_000
LONGEST_WHOLE_FILE = 65_536
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})
_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_BLANK_LINES = re.compile(r"\n[ \t\r]*\n")


def cut_into_sections(text: str) -> list[str]:
    """Cut a long text into sections whose concatenation is the text.

    A section ends at the first blank line after `SECTION` characters; where no blank line follows
    within `LONGEST_SECTION` characters it ends there.
    """
    sections, start = [], 0
    while start < len(text):
        blank = _BLANK_LINES.search(text, start + SECTION, start + LONGEST_SECTION)
        end = min(blank.end() if blank else start + LONGEST_SECTION, len(text))
        sections.append(text[start:end])
        start = end
    return sections


@dataclasses.dataclass(frozen=True)
class FileCorpus:
    """A text file, or those below a folder in the order of their names, without hidden ones.

    A file is a document; a longer one than `longest` becomes the sections of `cut_into_sections`.
    The topic is the first folder below `root`. A file that is not UTF-8 is left out, and named.

    Attributes:
        name: as written in the config.
        root: a file or a folder.
        longest: characters of a file that is one document; None = any number.
        pattern: of the names of files.
        left_out: names of files and folders that are not read.
        loose: topic of files directly in `root`; None = the stem of each.
    """

    name: str
    root: Path
    longest: int | None
    pattern: str = "*"
    left_out: frozenset[str] = frozenset()
    loose: str | None = None

    def files(self) -> list[Path]:
        if self.root.is_file():
            return [self.root]
        return _walk(self.root, self.pattern, self.left_out)

    def fingerprint(self) -> str:
        settings = (self.longest, self.pattern, sorted(self.left_out), self.loose)
        return fingerprint_of("files", self.root.resolve(), *settings, *identities(self.files()))

    def documents(self) -> Iterator[Document | UnreadableFile]:
        for file in self.files():
            parts = (file.name,) if file == self.root else file.relative_to(self.root).parts
            text = read_text(file.read_bytes(), "/".join(parts))
            if isinstance(text, UnreadableFile):
                yield text
                continue
            topic = parts[0] if len(parts) > 1 else self.loose or file.stem
            whole = self.longest is None or len(text) <= self.longest
            for section in [text] if whole else cut_into_sections(text):
                yield Document(section, topic)


def open_python(spec: DataConfig, rest: str) -> tuple[FileCorpus | None, list[str]]:
    """Return the corpus `python` or `python:tests`, or the spec's violations.

    It is the standard library's sources: a file is a document, its top folder the topic.
    Single-file modules share the topic `modules`. Installed packages are never read; the library's
    own tests (absent from some distributions) only with `python:tests`. The library differs between
    interpreter versions, so stored results belong to `synthetic:` corpora instead.
    """
    if rest not in ("", "tests"):
        return None, [f"corpus={spec.corpus!r}: write python or python:tests"]
    root = Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        return None, [f"corpus={spec.corpus!r}: this interpreter ships no sources; use text:PATH"]
    left_out = _NOT_THE_LIBRARY if rest == "tests" else _NOT_THE_LIBRARY | _TEST_FOLDERS
    return FileCorpus(spec.corpus, root, None, "*.py", left_out, "modules"), []


def open_text(spec: DataConfig, rest: str) -> tuple[FileCorpus | None, list[str]]:
    """Return the corpus `text:PATH`, a file in sections or a folder, or the spec's violations."""
    root = Path(os.path.expanduser(rest))
    if not rest or not root.exists():
        return None, [f"corpus={spec.corpus!r}: there is no such path; give a file or a folder"]
    return FileCorpus(spec.corpus, root, 0 if root.is_file() else LONGEST_WHOLE_FILE), []


def _walk(root: Path, pattern: str, left_out: frozenset[str]) -> list[Path]:
    """Files below `root` in the order of their names; no hidden ones, and no folder `left_out`."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name[0] != "." and name not in left_out]
        for name in fnmatch.filter(files, pattern):
            file = Path(folder, name)
            if name[0] != "." and name not in left_out and file.is_file():
                found.append((file.relative_to(root).parts, file))
    return [file for _, file in sorted(found)]
