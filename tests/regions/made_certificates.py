"""An authority, and a certificate that it has signed, as a site would bring them."""

import datetime
import ipaddress
import pathlib

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def write(folder: pathlib.Path, hosts: list[str]) -> None:
    """Write `ca.crt`, `tls.crt` for these hosts, and `tls.key` into a new folder."""
    folder.mkdir()
    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    root = _sign("An Authority", authority.public_key(), "An Authority", authority, [], True)
    leaf = _sign("a region", key.public_key(), "An Authority", authority, hosts, False)
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(root.public_bytes(pem))
    (folder / "tls.crt").write_bytes(leaf.public_bytes(pem))
    form = serialization.PrivateFormat.PKCS8
    (folder / "tls.key").write_bytes(key.private_bytes(pem, form, serialization.NoEncryption()))


def _sign(name, key, issuer, issuers_key, hosts, authority):
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    named = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, x)]) for x in (name, issuer)]
    made = (
        x509.CertificateBuilder(issuer_name=named[1], subject_name=named[0])
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(authority, None), critical=True)
    )
    if hosts:
        made = made.add_extension(x509.SubjectAlternativeName(list(map(_host, hosts))), False)
    return made.sign(issuers_key, hashes.SHA256())


def _host(name):
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
