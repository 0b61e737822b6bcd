"""Text from files: one file, a folder, or the standard library of the running interpreter."""

import dataclasses
import fnmatch
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from lowcomm_jax.data.config import DataConfig
from lowcomm_jax.data.corpora.base import Document, Unreadable, fingerprint_files, read_text

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
class PythonCorpus:
    """The standard library's sources: a file is a document, its top folder the topic.

    Single-file modules share the topic `modules`. Installed packages are never read; the library's
    own tests (absent from some distributions) only with `python:tests`. A file that is not UTF-8
    is left out, and named. The library differs between interpreter versions, so
    stored results belong to `synthetic:` corpora instead.
    """

    name: str
    root: Path
    with_tests: bool

    def files(self) -> list[Path]:
        left_out = _NOT_THE_LIBRARY if self.with_tests else _NOT_THE_LIBRARY | _TEST_FOLDERS
        return _walk(self.root, "*.py", left_out)

    def fingerprint(self) -> str:
        return fingerprint_files(f"python {self.with_tests}", self.root, self.files())

    def documents(self) -> Iterator[Document | Unreadable]:
        for file in self.files():
            parts = file.relative_to(self.root).parts
            text = read_text(file.read_bytes(), "/".join(parts))
            if isinstance(text, Unreadable):
                yield text
            else:
                yield Document(text, parts[0] if len(parts) > 1 else "modules")


@dataclasses.dataclass(frozen=True)
class TextCorpus:
    """A text file cut into sections, or a folder of text files.

    A single file becomes the sections of `cut_into_sections`, all of one topic. A folder is read
    recursively in the order of the names, without hidden files. A file of up to
    `LONGEST_WHOLE_FILE` characters is one document; a longer one is cut the same way. The topic is
    the first folder below `root`, or the file's stem for files directly in it. A file that is not
    UTF-8 is left out, and named.
    """

    name: str
    root: Path

    def files(self) -> list[Path]:
        if self.root.is_file():
            return [self.root]
        return _walk(self.root, "*", frozenset())

    def fingerprint(self) -> str:
        base = self.root.parent if self.root.is_file() else self.root
        return fingerprint_files(f"text {self.root.is_file()}", base, self.files())

    def documents(self) -> Iterator[Document | Unreadable]:
        for file in self.files():
            parts = (file.name,) if file == self.root else file.relative_to(self.root).parts
            text = read_text(file.read_bytes(), "/".join(parts))
            if isinstance(text, Unreadable):
                yield text
                continue
            topic = parts[0] if len(parts) > 1 else file.stem
            whole = file != self.root and len(text) <= LONGEST_WHOLE_FILE
            for section in [text] if whole else cut_into_sections(text):
                yield Document(section, topic)


def open_python(spec: DataConfig, rest: str) -> tuple[PythonCorpus | None, list[str]]:
    """Return the corpus `python` or `python:tests`, or the spec's violations."""
    if rest not in ("", "tests"):
        return None, [f"corpus={spec.corpus!r}: write python or python:tests"]
    root = Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        return None, [f"corpus={spec.corpus!r}: this interpreter ships no sources; use text:PATH"]
    return PythonCorpus(spec.corpus, root, rest == "tests"), []


def open_text(spec: DataConfig, rest: str) -> tuple[TextCorpus | None, list[str]]:
    """Return the corpus `text:PATH`, or the spec's violations."""
    root = Path(os.path.expanduser(rest))
    if not rest or not root.exists():
        return None, [f"corpus={spec.corpus!r}: there is no such path; give a file or a folder"]
    return TextCorpus(spec.corpus, root), []


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
