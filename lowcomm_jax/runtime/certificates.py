"""Certificates of regions, for mutual TLS between them: made at start, or read from files.

A region that makes its own is its own authority. It signs a certificate (a pass) for the key of
every other region, and accepts only connections with such a pass. Its port therefore stays as it is
when a region comes back with another key. No private key leaves its process, not even to a disk.
"""

from __future__ import annotations

import datetime
import hashlib
import pathlib
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

FILES = {"roots": "ca.crt", "chain": "tls.crt", "key": "tls.key"}
"""Names in a folder of certificates, as Kubernetes and cert-manager give them."""

# The clocks of regions may be wrong, and a key ends with its process: no date means anything.
_BEGINS = datetime.datetime(2000, 1, 1)
_ENDS = datetime.datetime(9999, 12, 31, 23, 59, 59)


class Credentials(NamedTuple):
    """The credentials of one end of a connection with mutual TLS, all as PEM.

    Attributes:
      roots: the authorities that it trusts.
      chain: its own certificate, and those between it and the other end's roots.
      key: its private key.
    """

    roots: bytes
    chain: bytes
    key: bytes


class Authority:
    """A new key of a region with a certificate that it has signed itself.

    Attributes:
      certificate: PEM.
      key: PEM; secret.
    """

    def __init__(self, region: int):
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = host_name(region)
        self.certificate = self._sign(self._name, self._key.public_key(), authority=True)
        self.key = self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    def issue(self, certificate: str, region: int) -> bytes:
        """A pass to this region for the key of another region's certificate; both PEM.

        Args:
          region: the other one. By its name, since equal names would make it a certificate that
            has signed itself.

        Raises:
          ValueError: that is no certificate.
        """
        theirs = x509.load_pem_x509_certificate(certificate.encode())
        return self._sign(host_name(region), theirs.public_key(), authority=False)

    def _sign(self, name: str, key: ec.EllipticCurvePublicKey, authority: bool) -> bytes:
        made = (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(_named(self._name))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_BEGINS)
            .not_valid_after(_ENDS)
            .add_extension(x509.BasicConstraints(authority, 0 if authority else None), True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), False)
            .sign(self._key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)


def host_name(region: int) -> str:
    """The name in the certificate that a region makes."""
    return f"region-{region}.lowcomm"


def fingerprint(certificate: str) -> str:
    """Names a certificate: 64 hexadecimal digits."""
    return hashlib.sha256(certificate.encode()).hexdigest()


def read_credentials(folder: str) -> Credentials:
    """The files of a folder (`FILES`).

    Raises:
      ValueError: lists files that are missing, hold no certificate or key, or do not belong
        together.
    """
    wrong, found = [], {}
    for kind, name in FILES.items():
        try:
            found[kind] = (pathlib.Path(folder) / name).read_bytes()
        except OSError as error:
            wrong.append(f"{name} cannot be read ({error.strerror})")
    keys = {}
    for kind, data in found.items():
        try:
            keys[kind] = _public_key(kind, data)
        except (ValueError, TypeError) as error:
            wrong.append(f"{FILES[kind]} is not PEM of what it should be ({error})")
    if {"chain", "key"} <= keys.keys() and keys["chain"] != keys["key"]:
        wrong.append(f"{FILES['key']} is not the key of {FILES['chain']}")
    if wrong:
        raise ValueError(
            f"certificates={folder!r}: {'; '.join(wrong)}: put the authority's certificate into "
            f"{FILES['roots']}, this region's into {FILES['chain']}, and its key, without a "
            f"passphrase, into {FILES['key']}"
        )
    return Credentials(**found)


def _public_key(kind: str, data: bytes) -> bytes:
    """The public key of the first certificate, or of a private key."""
    if kind == "key":
        key = serialization.load_pem_private_key(data, None).public_key()
    else:
        key = x509.load_pem_x509_certificates(data)[0].public_key()
    return key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
