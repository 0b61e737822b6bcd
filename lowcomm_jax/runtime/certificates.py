"""`make_certificates`: a region's own key and certificate, new with each job, for TLS."""

from __future__ import annotations

import datetime
import pathlib
import secrets

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lowcomm_jax.runtime.serving import CERTIFICATE, KEY, ROOTS

# The clocks of regions may be wrong, and a key ends with its process: no date means anything.
_BEGINS = datetime.datetime(2000, 1, 1)
_ENDS = datetime.datetime(9999, 12, 31, 23, 59, 59)


def make_certificates(folder: str, region: int) -> str:
    """Write a key, a certificate that it has signed itself and can sign no other, and the roots.

    Returns:
      the passphrase of the key, which stands in no file.
    """
    key, passphrase = ec.generate_private_key(ec.SECP256R1()), secrets.token_hex(32)
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
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked = serialization.BestAvailableEncryption(passphrase.encode())
    pathlib.Path(folder, KEY).write_bytes(key.private_bytes(pem, form, locked))
    for file in (CERTIFICATE, ROOTS):
        pathlib.Path(folder, file).write_bytes(made.public_bytes(pem))
    return passphrase
