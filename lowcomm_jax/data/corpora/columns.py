"""Text from columns and records: Parquet and ArrayRecord files, Hugging Face data sets.

The packages that read them are imported where they are used: each is optional or slow to import.
"""

import contextlib
import dataclasses
import glob
import importlib.util
import os
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

_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class ParquetCorpus:
    """Rows of Parquet files in the order of the paths; needs the package pyarrow.

    The topic is the value of `topic_column`, or the file's stem. Rows without text are dropped.
    """

    name: str
    files: tuple[Path, ...]
    text_column: str
    topic_column: str | None

    def fingerprint(self) -> str:
        head = ("parquet", self.text_column, self.topic_column)
        return fingerprint_of(*head, *identities(self.files))

    def documents(self) -> Iterator[Document]:
        """Yield the rows.

        Raises:
            ValueError: a file is no Parquet, lacks a column, or holds no text in `text_column`.
        """
        from pyarrow import parquet

        columns = [name for name in (self.text_column, self.topic_column) if name is not None]
        for path in self.files:
            with _naming(path), parquet.ParquetFile(path) as file:
                _check_columns(path, columns, file.schema_arrow.names)
                for rows in file.iter_batches(batch_size=_ROWS, columns=columns):
                    for row in rows.to_pylist():
                        yield _document(row, path, path.stem, *columns)


@dataclasses.dataclass(frozen=True)
class ArrayRecordCorpus:
    """Records of ArrayRecord files, each the UTF-8 text of a document; the topic is the stem.

    Read through Grain's `ArrayRecordDataSource`; needs the package array_record.
    """

    name: str
    files: tuple[Path, ...]

    def fingerprint(self) -> str:
        return fingerprint_of("arrayrecord", *identities(self.files))

    def documents(self) -> Iterator[Document | UnreadableFile]:
        """Yield the records; those that are not UTF-8 text are left out, and named.

        Raises:
            ValueError: a file is no ArrayRecord.
        """
        from grain.sources import ArrayRecordDataSource

        for path in self.files:
            with _naming(path), ArrayRecordDataSource([str(path)]) as source:
                for index in range(len(source)):
                    text = read_text(source[index], f"{path.name}, record {index}")
                    yield text if isinstance(text, UnreadableFile) else Document(text, path.stem)


@dataclasses.dataclass(frozen=True)
class HubCorpus:
    """Rows of a Hugging Face data set, streamed in its own order; needs the package datasets.

    The reader stops after `limit` documents and keeps them on disk, so that later reads depend on
    neither the network nor the order of a stream. The fingerprint holds the name, not the content:
    a data set that changed under the same name is read anew only after the cache is removed.
    """

    name: str
    dataset: str
    config: str | None
    split: str
    text_column: str
    topic_column: str | None

    def fingerprint(self) -> str:
        columns = (self.text_column, self.topic_column)
        return fingerprint_of("hf", self.dataset, self.config, self.split, *columns)

    def documents(self) -> Iterator[Document]:
        """Yield the rows.

        Raises:
            ValueError: a row lacks a column, or holds no text in `text_column`.
        """
        from datasets import load_dataset

        columns = [name for name in (self.text_column, self.topic_column) if name is not None]
        rows = load_dataset(self.dataset, self.config, split=self.split, streaming=True)
        for row in rows:
            _check_columns(self.name, columns, sorted(row))
            yield _document(row, self.name, self.dataset, *columns)


def open_parquet(spec: DataConfig, rest: str) -> tuple[ParquetCorpus | None, list[str]]:
    """Return the corpus `parquet:GLOB`, or the spec's violations."""
    files, found = _files(spec, rest)
    found += _needs(spec, "pyarrow", "pyarrow")
    if found:
        return None, found
    return ParquetCorpus(spec.corpus, files, spec.text_column, spec.topic_column), []


def open_arrayrecord(spec: DataConfig, rest: str) -> tuple[ArrayRecordCorpus | None, list[str]]:
    """Return the corpus `arrayrecord:GLOB`, or the spec's violations."""
    files, found = _files(spec, rest)
    found += _needs(spec, "array_record", "array_record")
    return (None, found) if found else (ArrayRecordCorpus(spec.corpus, files), [])


def open_hub(spec: DataConfig, rest: str) -> tuple[HubCorpus | None, list[str]]:
    """Return the corpus `hf:NAME[:CONFIG]`, or the spec's violations."""
    dataset, _, config = rest.partition(":")
    found = [] if dataset else [f"corpus={spec.corpus!r}: write hf:NAME or hf:NAME:CONFIG"]
    found += _needs(spec, "datasets", "the extra hf (pip install lowcomm_jax[hf])")
    if found:
        return None, found
    columns = (spec.text_column, spec.topic_column)
    return HubCorpus(spec.corpus, dataset, config or None, spec.split, *columns), []


def _check_columns(where: object, wanted: list[str], names: list[str]) -> None:
    if missing := sorted(set(wanted) - set(names)):
        raise ValueError(
            f"{where} has no column {', '.join(missing)}; set text_column and "
            f"topic_column to some of {', '.join(names)}"
        )


def _document(
    row: dict, where: object, usual: str, text_column: str, topic_column: str | None = None
) -> Document:
    """One row's; its text is empty where there is no value, its topic `usual` without a column."""
    value = row[text_column]
    if value is not None and not isinstance(value, str):
        held = type(value).__name__
        if isinstance(value, list) and value:
            held = f"list of {type(value[0]).__name__}"
        raise ValueError(
            f"{where}: column {text_column} holds {held}, not text; set text_column to a column of "
            "strings, or cut token numbers into batches yourself (docs/data.md)"
        )
    return Document(value or "", usual if topic_column is None else str(row[topic_column]))


def _files(spec: DataConfig, rest: str) -> tuple[tuple[Path, ...], list[str]]:
    pattern = os.path.expanduser(rest)
    names = sorted(glob.glob(pattern, recursive=True)) if rest else []
    files = tuple(Path(name) for name in names if Path(name).is_file())
    if files:
        return files, []
    return (), [f"corpus={spec.corpus!r}: no file matches; correct the path or the pattern"]


def _needs(spec: DataConfig, module: str, package: str) -> list[str]:
    if importlib.util.find_spec(module) is not None:
        return []
    return [f"corpus={spec.corpus!r} needs {package}, which is not installed"]


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in what its reader says of it."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
