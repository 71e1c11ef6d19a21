"""Meanings of the errors of servers and connections, and what to do: one sentence for each kind of error.

Servers begin an error with a word in capitals. redis-py removes some of these words and raises special classes. An
error within a script has additional text about the script: Redis 6.2 puts this text first, later versions last.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator

from redis import exceptions
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError

_MEANINGS = {
    "NOAUTH": "requires a password: put it into the URL, redis://USER:PASSWORD@HOST",
    "WRONGPASS": "refuses this user or password, or the user is disabled there",
    "AUTH": "has no password: remove it from the URL",
    "NOPERM": "refuses a command that this user may not run",
    "DENIED": "accepts connections from its own host only (protected mode): give it a password or users",
    "NOGROUP": "has no queue of this model: it was emptied, evicted the queue or lost its data. A live worker creates "
    "a new one within seconds, and clients submit again",
    "OOM": "has no memory left and may evict no key: give it more (maxmemory), let it evict (maxmemory-policy "
    "volatile-lru), or delete cached rows with `lmpool flush`",
    "READONLY": "is a replica and accepts no writes: name the primary, which after a failover is another server",
    "MISCONF": "accepts no writes because it could not save its data: check its log and its disk",
    "LOADING": "is reading its data from disk and answers when that is done",
    "BUSY": "is busy with a script: wait, or end it with `redis-cli SCRIPT KILL`",
    "MASTERDOWN": "is a replica that has lost its primary: check whether the primary runs, or name the primary",
    "NOREPLICAS": "accepts no writes because too few replicas follow it (min-replicas-to-write)",
    "CLUSTERDOWN": "belongs to a cluster that is down: `redis-cli CLUSTER INFO` shows which slots no node has",
    "MOVED": "does not have this key any more: its cluster has moved it, and lmpool looks it up again",
    "ASK": "is moving this key to another master of its cluster: lmpool requests it again",
    "TRYAGAIN": "is moving these keys to another master of its cluster: lmpool requests them again",
    "CROSSSLOT": "received a command with keys in several slots of its cluster",
    "WRONGTYPE": "has another type of value under a key of the pool: another program uses its prefix. Remove that key, "
    "or choose another prefix",
    "NOSCRIPT": "has lost the pool's scripts; the next call sends them again",
}
# Meanings of errors without a code, or with the code ERR.
_OTHERS = {
    "unknown command": "lacks a command that the pool needs: use Redis 6.2 or newer, or Valkey, without renamed or "
    "removed commands",
    "max number of clients": "has reached its limit of connections: raise its maxclients, or end some programs",
    "Protocol error, got": "does not speak the protocol of Redis: is this the port of another program?",
}
_CLASSES = {
    exceptions.NoPermissionError: "NOPERM",
    exceptions.OutOfMemoryError: "OOM",
    exceptions.ReadOnlyError: "READONLY",
    exceptions.BusyLoadingError: "LOADING",
    exceptions.MasterDownError: "MASTERDOWN",
    exceptions.ClusterDownError: "CLUSTERDOWN",
    exceptions.MovedError: "MOVED",
    exceptions.AskError: "ASK",
    exceptions.TryAgainError: "TRYAGAIN",
    exceptions.ClusterCrossSlotError: "CROSSSLOT",
    exceptions.NoScriptError: "NOSCRIPT",
}
# Texts of refusals without a code. Redis 7.0 and newer uses the first two texts for refusals within a script.
_CODES_BY_TEXT = {
    "The user executing the script can't": "NOPERM",
    "ACL failure in script": "NOPERM",
    "invalid username-password pair": "WRONGPASS",
    "HELLO must be called with the client already authenticated": "NOAUTH",
    "Authentication required": "NOAUTH",
    # A command lost bytes on the way; the server closes the connection.
    "Protocol error: ": "PROTOCOL",
}
# Codes of errors after which the command must be repeated soon on a new connection.
NOT_NOW = {"MOVED", "ASK", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "LOADING", "MASTERDOWN", "BUSY", "MISCONF",
           "NOREPLICAS", "UNBLOCKED", "PROTOCOL"}  # fmt: skip
_REFUSED = {"NOAUTH", "WRONGPASS", "NOPERM"}
# Patterns in the texts of connection errors: some exceptions of redis-py have no cause. Some texts have only the error
# number, of Linux or macOS. CUT: the other side closed the connection.
CUT = r"Err(or|no) (104|54)\b|reset by peer|closed|Broken pipe|was lost|Connection lost"
_LOST = {
    r"Err(or|no) (111|61)\b|refused": "nothing listens there: does the server run, and are host and port right?",
    r"Err(or|no) (113|101|65|51)\b": "that host cannot be reached: is the network up, and the host right?",
    "Name or service not known|name resolution|nodename nor servname": "no host has this name",
    "No such file or directory": "there is no such socket: has the server ended?",
    "Permission denied": "this user may not open its socket",
    CUT: "the server, or a device on the way to it, has closed the connection; with TLS the URL begins with rediss://",
    r"Err(or|no) (110|60)\b|Timeout": "it is silent",
}
# OpenSSL's names of the alerts with which a server rejects our certificate.
_ALERTS = ("UNKNOWN_CA", "CERTIFICATE_EXPIRED", "CERTIFICATE_REVOKED", "BAD_CERTIFICATE",
           "UNSUPPORTED_CERTIFICATE", "CERTIFICATE_UNKNOWN", "ACCESS_DENIED")  # fmt: skip
_BEFORE = re.compile(r"(ERR )?Error running script \(call to \w+\): (@user_script: ?\d+: )+-?")
_BEHIND = re.compile(r"\s+script: (\w+, )?on @user_script:\d+\.?\s*$")
_CODE = re.compile("[A-Z]+(?= |$)")


def chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and its causes: redis-py may wrap a server's refusal in a ConnectionError."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def words(error: BaseException) -> str:
    """The first line of a server's error, without the text about a script, and with the code that redis-py removes."""
    lines = str(error).splitlines()
    text = _BEHIND.sub("", _BEFORE.sub("", lines[0])) if lines else type(error).__name__
    code = next((code for kind, code in _CLASSES.items() if isinstance(error, kind)), "")
    return text if not code or text.startswith(code) else f"{code} {text}"


def code_of(error: BaseException) -> str:
    """The word in capitals at the beginning of a server's error, or ""."""
    text = words(error)
    found = _CODE.match(text)
    code = found[0] if found and found[0] != "ERR" else ""
    return next((code for begin, code in _CODES_BY_TEXT.items() if begin in text), code)


def is_refusal(error: BaseException) -> bool:
    """Whether a server refuses a user, a password or a command."""
    kinds = (AuthenticationError, AuthorizationError, NoPermissionError)
    return code_of(error) in _REFUSED or any(isinstance(link, kinds) for link in chain(error))


def meaning(error: BaseException) -> str:
    """The meaning of a server's error, and what to do, as the rest of a sentence: "is …", "has …"; "" if unknown."""
    if code := code_of(error):
        return _MEANINGS.get(code, "")
    return next((sentence for begin, sentence in _OTHERS.items() if begin in words(error)), "")


def loss(error: BaseException) -> str:
    """Why a connection failed or was lost; "" if unknown."""
    text = f"{words(error)} {type(error).__name__}"
    return next((why for pattern, why in _LOST.items() if re.search(pattern, text)), "")


def sentence(error: BaseException, who: str = "the server") -> str:
    """The meaning of a server's error followed by the error's text; the text alone if the meaning is unknown."""
    known = meaning(error)
    return f"{who} {known} ({words(error)})" if known else words(error)


def tls_refusal(error: BaseException) -> str:
    """Why a server rejects our certificate, and what to do; "" for other errors."""
    reasons = [link.reason or "" for link in chain(error) if isinstance(link, ssl.SSLError)]
    reason = next((reason for reason in reasons if "ALERT" in reason), "")
    if "CERTIFICATE_REQUIRED" in reason:
        return "it wants a client certificate: name one with ssl_certfile= and ssl_keyfile="
    is_refused = any(name in reason for name in _ALERTS)
    return f"it does not accept this client certificate ({_alert(reason)}): see ssl_certfile=" if is_refused else ""


def tls_fault(error: BaseException, *, has_certificate: bool) -> str:
    """Why a TLS connection failed, and what to do; "" for other errors."""
    for link in chain(error):
        if isinstance(link, ssl.SSLCertVerificationError):
            why = link.verify_message.rstrip(".")
            return f"the server's certificate is not trusted: {why}; see ssl_ca_certs= and the name of the host"
        if isinstance(link, ssl.SSLError):
            return f"the handshake failed ({_alert(link.reason or str(link))}); is it a port with TLS?"
        # If the server closes the connection at once, its TLS alert may be lost.
        if isinstance(link, ConnectionResetError) and not has_certificate:
            return "the server has cut it; does it want a client certificate? see ssl_certfile= and ssl_keyfile="
    return ""


def _alert(reason: str) -> str:
    return reason.rpartition("ALERT_")[2].replace("_", " ").lower()
