"""`Credentials` of a region: made when it starts, or read from a folder of the site's."""

from __future__ import annotations

import datetime
import pathlib
import secrets

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import NameOID

from lowcomm_jax.store.serving import Credentials

# The clocks of regions may be wrong, and a key ends with its process: no date means anything.
_BEGINS = datetime.datetime(2000, 1, 1)
_ENDS = datetime.datetime(9999, 12, 31, 23, 59, 59)


def make_credentials(region: int) -> Credentials:
    """A new key, with a certificate that it has signed itself, and that can sign no other."""
    key = ec.generate_private_key(ec.SECP256R1())
    # OpenSSL finds certificates by their names: those of two jobs of a region must differ.
    unique = f"region {region}, {secrets.token_hex(16)}"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, unique)])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(_BEGINS)
        .not_valid_after(_ENDS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate = made.public_bytes(serialization.Encoding.PEM).decode()
    return _with_key(certificate, certificate, key)


def read_credentials(folder: str) -> Credentials:
    """Those of `ca.crt`, `tls.crt` and `tls.key`, as Kubernetes and cert-manager name them.

    Raises:
      OSError, ValueError, TypeError: a file is missing, or is none.
    """
    files = (pathlib.Path(folder, name) for name in ("ca.crt", "tls.crt", "tls.key"))
    roots, chain, key = (file.read_bytes() for file in files)
    return _with_key(roots.decode(), chain.decode(), serialization.load_pem_private_key(key, None))


def _with_key(roots: str, chain: str, key: PrivateKeyTypes) -> Credentials:
    """The key is written to a file when it is used (`tls_context`): never readable."""
    passphrase = secrets.token_hex(32)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(passphrase.encode()),
    )
    return Credentials(roots, f"{chain}\n{locked.decode()}", passphrase)
