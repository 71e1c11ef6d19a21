"""TLS: which files there must be, and what a failed handshake means."""

from __future__ import annotations

import inspect
import os
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from redis import Redis

from lmpool.errors import SettingsError

_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
# What a server says of our certificate, by the names that OpenSSL has for its alerts.
_OURS = ("CERTIFICATE_REQUIRED", "UNKNOWN_CA", "CERTIFICATE_EXPIRED", "CERTIFICATE_REVOKED", "BAD_CERTIFICATE",
         "UNSUPPORTED_CERTIFICATE", "CERTIFICATE_UNKNOWN", "ACCESS_DENIED")  # fmt: skip
# What a client does that was told nothing of it: redis-py 5 takes any host's certificate.
_CHECKS_HOST: bool = inspect.signature(Redis).parameters["ssl_check_hostname"].default


def check_files(settings: Mapping[str, Any]) -> None:
    """Refuse certificates and keys that cannot be read: the system's error would not say which.

    Raises:
        SettingsError: with the option's name and the file.
    """
    for name in _FILES:
        if not (path := settings.get(name)):
            continue
        try:
            if name == "ssl_ca_path":
                os.scandir(path).close()
            else:
                Path(path).open("rb").close()
        except OSError as error:
            raise SettingsError(f"redis: {name} cannot be read: {path} ({error.strerror})") from None


def check_host(settings: dict[str, Any], *, of_client: bool) -> None:
    """Compare the host with the certificate, unless URL or client say otherwise: redis-py 5 does not do so by itself.

    Args:
        settings: of connections with TLS.
        of_client: they are those of a client, in which the default of redis-py stands for what it was not told.
    """
    if settings.get("ssl_cert_reqs", "required") in ("none", None, ssl.CERT_NONE):
        return
    chosen = settings.get("ssl_check_hostname")
    if chosen is None or (of_client and chosen is _CHECKS_HOST is False):
        settings["ssl_check_hostname"] = True


def refusal(chain: Iterable[BaseException]) -> str:
    """What a server has against our certificate, and what to do; "" when that is not the matter."""
    reason = _reason(chain)
    if not any(name in reason for name in _OURS):
        return ""
    if "CERTIFICATE_REQUIRED" in reason:
        return "it wants a client certificate: name one with ssl_certfile= and ssl_keyfile="
    return f"it does not accept this client certificate ({_words(reason)}): see ssl_certfile="


def fault(chain: Iterable[BaseException], *, has_certificate: bool) -> str:
    """Why no TLS connection could be made, and what to do; "" when that is not the matter.

    Args:
        chain: the exception and those that led to it.
        has_certificate: whether we show the server a certificate.
    """
    for error in chain:
        if isinstance(error, ssl.SSLCertVerificationError):
            why = error.verify_message.rstrip(".")
            return f"the server's certificate is not trusted: {why}; see ssl_ca_certs= and the name of the host"
        if isinstance(error, ssl.SSLError):
            return f"the handshake failed ({_words(error.reason or str(error))}); is it a port with TLS?"
        # The alert that says so may be lost when the server closes at once.
        if isinstance(error, ConnectionResetError) and not has_certificate:
            return "the server has cut it; does it want a client certificate? see ssl_certfile= and ssl_keyfile="
    return ""


def _reason(chain: Iterable[BaseException]) -> str:
    """OpenSSL's name for what the other side has complained of, "" when it has not."""
    for error in chain:
        if isinstance(error, ssl.SSLError) and error.reason and "ALERT" in error.reason:
            return error.reason
    return ""


def _words(reason: str) -> str:
    return reason.rpartition("ALERT_")[2].replace("_", " ").lower()
