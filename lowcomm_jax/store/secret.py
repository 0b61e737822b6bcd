"""`Seal`: signs and checks every record between regions with a shared secret (HMAC-SHA256).

A record is signed together with the format, the run and its key. So a copy under another key is
rejected, and one of another version of the format, too. Payloads need no signature: records name
them by their SHA-256. Records are not encrypted. A program that may write to the store can destroy
a run, but cannot make regions accept false records.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pathlib
from typing import TypeVar

import msgspec

from lowcomm_jax.store.errors import Rejected, Unreadable
from lowcomm_jax.store.records import FORMAT

T = TypeVar("T")
SHORTEST = 16


def read_secret(source: bytes | str | None) -> bytes:
    """The secret's bytes.

    Args:
      source: the bytes; "env:NAME" or "file:PATH" (surrounding white space is dropped); or None,
        under which records are checked for damage, not for their author.

    Raises:
      ValueError: it cannot be read, or is shorter than `SHORTEST` bytes. The message never holds
        the secret.
    """
    if source is None:
        return b""
    where = "the secret"
    if isinstance(source, str):
        kind, _, name = source.partition(":")
        where = f"secret {source!r}" if kind in ("env", "file") else where
        if kind == "env":
            if name not in os.environ:
                raise ValueError(f"{where}: there is no such variable in the environment; set it")
            source = os.environ[name].encode().strip()
        elif kind == "file":
            try:
                source = pathlib.Path(name).read_bytes().strip()
            except OSError as error:
                raise ValueError(f"{where} cannot be read: {error.strerror}") from None
        else:
            raise ValueError('give the secret as bytes, "env:NAME" or "file:PATH"')
    if len(source) < SHORTEST:
        raise ValueError(f"{where} has {len(source)} bytes: use {SHORTEST} or more")
    return source


class Seal:
    """Signs records of one run and opens signed ones.

    A record is one line with the HMAC in hex, then its JSON.
    """

    def __init__(self, run_id: str, secret: bytes):
        self._run_id = run_id
        self._secret = secret

    def of(self, run_id: str) -> Seal:
        """That of another run with the same secret."""
        return Seal(run_id, self._secret)

    def close(self, key: str, record: msgspec.Struct, format: int = FORMAT) -> bytes:
        """A record to be written under `key`."""
        body = msgspec.json.encode(record)
        return self._mac(key, body, format) + b"\n" + body

    def open(self, key: str, data: bytes, kind: type[T], format: int = FORMAT) -> T:
        """The record, of this kind, that was read under `key`.

        Raises:
          Rejected: it was not signed for this format, run and key with this secret, or was altered.
          Unreadable: it was, and it is no record of this kind.
        """
        mac, _, body = data.partition(b"\n")
        if not hmac.compare_digest(mac, self._mac(key, body, format)):
            raise Rejected(f"{key}: not signed for this run with this secret")
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise Unreadable(
                f"{key} is signed as a record of this run, and cannot be read ({error}): another "
                "program writes to this run; end it, and begin again in another rendezvous"
            ) from None

    def _mac(self, key: str, body: bytes, format: int) -> bytes:
        message = f"{format}\n{self._run_id}\n{key}\n".encode() + body
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest().encode()
