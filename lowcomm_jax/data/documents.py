"""The documents of a corpus on disk: read from the corpus once, then by number."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np

from lowcomm_jax.data.cache import open_or_build
from lowcomm_jax.data.corpora.base import Corpus, UnreadableFile, fingerprint_of

_NAMED = 20  # of what is left out, the first ones are named
_TELL_SECONDS = 0.25
T = TypeVar("T")
# What is done, with how many documents it is done, and of how many.
Progress = Callable[[str, int, int | None], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """D documents, memory-mapped.

    Attributes:
        corpus: name of the corpus.
        text_N: uint8, the UTF-8 texts one after another.
        offset_E: int64 [D + 1], where each text begins, and the end.
        key_D: uint64, a hash of each text: the document's identity in splits and shards.
        topic_D: int32, index into `topics`.
        topics: topic names in the order of first sight.
        digest: SHA-256 over all texts and topics in order.
        blank: documents dropped because they are white space alone.
        unreadable: files (or records) left out because they cannot be read.
        unreadable_names: the first of them, each with the reason.
    """

    corpus: str
    text_N: np.ndarray
    offset_E: np.ndarray
    key_D: np.ndarray
    topic_D: np.ndarray
    topics: tuple[str, ...]
    digest: str
    blank: int
    unreadable: int
    unreadable_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.key_D)

    def text(self, index: int) -> str:
        """Return the text of document `index`."""
        return self.text_N[self.offset_E[index] : self.offset_E[index + 1]].tobytes().decode()

    def texts(self) -> Iterator[str]:
        """Yield all texts in order."""
        return (self.text(index) for index in range(len(self)))


def counted(
    items: Iterable[T],
    what: str,
    total: int | None,
    progress: Progress | None,
    size: Callable[[T], int],
) -> Iterator[T]:
    """Yield items, and tell `progress` of the documents in those that were used up."""
    done, told = 0, time.monotonic()
    for item in items:
        yield item
        done += size(item)
        if progress is not None and time.monotonic() - told >= _TELL_SECONDS:
            told = time.monotonic()
            progress(what, done, total)


def materialise(
    corpus: Corpus, limit: int | None, cache: Path, progress: Progress | None = None
) -> Documents:
    """Read the first `limit` documents of a corpus (None = all) into `cache`, or find them there.

    Documents of white space alone are dropped, as is what cannot be read; both are counted. After
    the first read all samples come from this copy, so that they are a pure function even of a
    stream without random access.

    Raises:
        ValueError: the corpus has no documents.
    """
    name = f"documents/{fingerprint_of(corpus.fingerprint(), limit)[:32]}"
    path = open_or_build(cache, name, lambda folder: _write(corpus, limit, folder, progress))
    head = json.loads((path / "head.json").read_text())
    return Documents(
        corpus=corpus.name,
        text_N=np.asarray(np.memmap(path / "text.bin", np.uint8, "r")),
        offset_E=np.load(path / "offset.npy"),
        key_D=np.load(path / "key.npy"),
        topic_D=np.load(path / "topic.npy"),
        topics=tuple(head["topics"]),
        digest=head["digest"],
        blank=head["blank"],
        unreadable=head["unreadable"],
        unreadable_names=tuple(head["unreadable_names"]),
    )


def _write(corpus: Corpus, limit: int | None, folder: Path, progress: Progress | None) -> None:
    """Write texts, keys, topics and head of a corpus's documents to files of `folder`."""
    digest = hashlib.sha256()
    offset, key, topic = [0], [], []
    number_of: dict[str, int] = {}
    blank, unreadable, names = 0, 0, []
    with open(folder / "text.bin", "wb") as out:
        for document in counted(
            corpus.documents(), "reads documents", limit, progress, lambda _: 1
        ):
            if isinstance(document, UnreadableFile):
                unreadable += 1
                if len(names) < _NAMED:
                    names.append(f"{document.name}: {document.reason}")
                continue
            if not document.text or document.text.isspace():
                blank += 1
                continue
            encoded, name = document.text.encode(), document.topic.encode()
            digest.update(f"{len(encoded)} {len(name)}\n".encode())
            digest.update(encoded)
            digest.update(name)
            out.write(encoded)
            offset.append(offset[-1] + len(encoded))
            hashed = hashlib.blake2b(encoded, digest_size=8).digest()
            key.append(int.from_bytes(hashed, "little"))
            topic.append(number_of.setdefault(document.topic, len(number_of)))
            # Checked here and not at the top: a stream is asked for no document too many.
            if len(key) == limit:
                break
    if not key:
        why = f" ({unreadable} left out, as {names[0]})" if unreadable else ""
        raise ValueError(
            f"the corpus {corpus.name} has no documents{why}; give one that holds text"
        )
    np.save(folder / "offset.npy", np.array(offset, np.int64))
    np.save(folder / "key.npy", np.array(key, np.uint64))
    np.save(folder / "topic.npy", np.array(topic, np.int32))
    head = {"topics": list(number_of), "digest": digest.hexdigest(), "blank": blank}
    head |= {"unreadable": unreadable, "unreadable_names": names}
    (folder / "head.json").write_text(json.dumps(head))
