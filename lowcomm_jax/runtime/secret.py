"""`Seal`: signs and checks every record between regions with a shared secret (HMAC-SHA256).

A record is signed together with the run and its key, so that a copy under another key is rejected.
Payloads need no signature: records name them by their SHA-256. Records are not encrypted. A program
that may write to the store can destroy a run, but cannot make regions accept false records.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

from lowcomm_jax.runtime import records
from lowcomm_jax.runtime.errors import Rejected

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
    """Signs records of one run and opens signed ones."""

    def __init__(self, run_id: str, secret: bytes):
        self._run_id = run_id
        self._secret = secret

    def of(self, run_id: str) -> Seal:
        """That of another run with the same secret."""
        return Seal(run_id, self._secret)

    def close(self, key: str, body: dict) -> bytes:
        """A record to be written under `key`."""
        text = json.dumps(body, sort_keys=True)
        return json.dumps({"body": text, "mac": self._mac(key, text)}).encode()

    def open(self, key: str, data: bytes, read: Callable[[Any], T] = records.section) -> T:
        """The body of a record read under `key`.

        Args:
          read: makes a value of the plain JSON, or raises `Rejected`.

        Raises:
          Rejected: it was not signed for this run and key with this secret, or was altered; or it
            holds something else.
        """
        try:
            record = json.loads(data)
            text, mac = record["body"], record["mac"]
            same = hmac.compare_digest(mac.encode(), self._mac(key, text).encode())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise Rejected(f"{key}: not a signed record") from None
        if not same:
            raise Rejected(f"{key}: not signed for this run with this secret")
        try:
            return read(json.loads(text))
        except (ValueError, RecursionError, Rejected) as error:
            raise Rejected(f"{key}: not what stands there: {error}") from None

    def _mac(self, key: str, text: str) -> str:
        message = json.dumps([self._run_id, key, text]).encode()
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()
