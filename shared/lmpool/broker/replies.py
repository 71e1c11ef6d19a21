"""What the errors of servers and connections mean, and what to do: each kind has one sentence here.

Servers begin an error with a word in capitals. redis-py takes some of these off and has classes instead, and what a
script was told is wrapped in words about the script, by Redis 6.2 in front, by later ones behind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from redis import exceptions
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError

_MEANINGS = {
    "NOAUTH": "wants a password, and none was given: name it in the URL, redis://USER:PASSWORD@HOST",
    "WRONGPASS": "refuses this user or password, or the user is switched off there",
    "AUTH": "has no password, and one was given: leave it out of the URL",
    "NOPERM": "refuses what this user may not do",
    "DENIED": "takes connections from its own host only (protected mode): give it a password or users",
    "NOGROUP": "has no queue of this model: it was emptied, has evicted it or lost its data. A live worker makes a new "
    "one within seconds, and clients ask again",
    "OOM": "has no memory left and may evict nothing: give it more (maxmemory), let it evict (maxmemory-policy "
    "volatile-lru), or drop cached rows with `lmpool flush`",
    "READONLY": "is a replica and takes no writes: name the primary, which after a failover is another server",
    "MISCONF": "takes no writes because it could not save its data: see its log and its disk",
    "LOADING": "is reading its data from disk and answers when that is done",
    "BUSY": "is kept busy by a script: wait, or end it with `redis-cli SCRIPT KILL`",
    "MASTERDOWN": "is a replica that has lost its primary: see whether that one runs, or name it",
    "NOREPLICAS": "takes no writes because too few replicas follow it (min-replicas-to-write)",
    "CLUSTERDOWN": "belongs to a cluster that is down: `redis-cli CLUSTER INFO` tells which slots nobody has",
    "MOVED": "does not have this key any more: its cluster has moved it, and it is looked for anew",
    "ASK": "is handing this key to another master of its cluster: it is asked for again",
    "TRYAGAIN": "is handing these keys to another master of its cluster: they are asked for again",
    "CROSSSLOT": "was asked for keys that are in several slots of its cluster",
    "WRONGTYPE": "has something else under a key of the pool: somebody writes under its prefix. Remove that key, or "
    "take another prefix",
    "NOSCRIPT": "has forgotten the pool's scripts, which are sent again with the next call",
}
# Of errors that begin with ERR, or with nothing.
_OTHERS = {
    "unknown command": "lacks a command that the pool needs: it must be Redis 6.2 or newer, or Valkey, without "
    "commands that were renamed or removed",
    "max number of clients": "has as many connections as it may have: raise its maxclients, or end some programs",
    "Protocol error, got": "does not speak Redis's protocol: is this the port of something else?",
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
# The first two are how Redis 7.0 and later servers tell of what a script was refused.
_AUTH_WORDS = {
    "The user executing the script can't": "NOPERM",
    "ACL failure in script": "NOPERM",
    "invalid username-password pair": "WRONGPASS",
    "HELLO must be called with the client already authenticated": "NOAUTH",
    "Authentication required": "NOAUTH",
}
# Answers of a server that is not the one to ask, or not now: ask again soon, on a new connection.
_NOT_NOW = {"MOVED", "ASK", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "LOADING", "MASTERDOWN", "BUSY", "MISCONF",
            "NOREPLICAS", "UNBLOCKED"}  # fmt: skip
_REFUSED = {"NOAUTH", "WRONGPASS", "NOPERM"}
# By what an error of a connection has in it: often a number alone, Linux's or macOS's.
_CUT = r"Err(or|no) (104|54)\b|reset by peer|closed|Broken pipe|was lost|Connection lost"
_LOST = {
    r"Err(or|no) (111|61)\b|refused": "nothing listens there: does the server run, and are host and port right?",
    r"Err(or|no) (113|101|65|51)\b": "there is no way to that host: is the network up, and the host right?",
    "Name or service not known|name resolution|nodename nor servname": "its host is not known by this name",
    "No such file or directory": "there is no such socket: has the server ended?",
    "Permission denied": "this user may not open its socket",
    _CUT: "the server, or something on the way to it, has cut the connection; where TLS is spoken the URL begins with "
    "rediss://",
    r"Err(or|no) (110|60)\b|Timeout": "it is silent",
}
_BEFORE = re.compile(r"(ERR )?Error running script \(call to \w+\): (@user_script: ?\d+: )+-?")
_BEHIND = re.compile(r"\s+script: (\w+, )?on @user_script:\d+\.?\s*$")
_CODE = re.compile("[A-Z]+(?= |$)")


def chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that led to it: redis-py may wrap a refusal in a lost connection."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def was_cut(error: BaseException) -> bool:
    """Whether the other end of a connection has ended it."""
    # By the text: redis-py has the system's exception with some of its own only.
    return re.search(_CUT, str(error)) is not None


def words(error: BaseException) -> str:
    """A server's own words in one line, without those about a script, and with the code that redis-py takes off."""
    lines = str(error).splitlines()
    text = _BEHIND.sub("", _BEFORE.sub("", lines[0])) if lines else type(error).__name__
    code = next((code for kind, code in _CLASSES.items() if isinstance(error, kind)), "")
    return text if not code or text.startswith(code) else f"{code} {text}"


def code_of(error: BaseException) -> str:
    """The word in capitals by which servers tell kinds of errors apart; "" where there is none."""
    text = words(error)
    for begin, code in _AUTH_WORDS.items():
        if begin in text:
            return code
    code_word = _CODE.match(text)
    return code_word[0] if code_word and code_word[0] != "ERR" else ""


def is_not_now(error: BaseException) -> bool:
    """Whether a server's answer means to ask again, on a new connection."""
    return code_of(error) in _NOT_NOW


def is_refusal(error: BaseException) -> bool:
    """Whether a server refuses a user, a password or a command."""
    kinds = (AuthenticationError, AuthorizationError, NoPermissionError)
    return code_of(error) in _REFUSED or any(isinstance(link, kinds) for link in chain(error))


def meaning(error: BaseException) -> str:
    """What a server's error says of the server, and what to do: "is …", "has …"; "" where nothing is known of it."""
    code, text = code_of(error), words(error)
    if code:
        return _MEANINGS.get(code, "")
    return next((sentence for begin, sentence in _OTHERS.items() if begin in text), "")


def loss(error: BaseException) -> str:
    """Why there is no connection; "" where nothing is known of it."""
    text = f"{words(error)} {type(error).__name__}"
    return next((why for pattern, why in _LOST.items() if re.search(pattern, text)), "")


def sentence(error: BaseException, who: str = "the server") -> str:
    """What a server's error means, with its own words behind; these alone where nothing is known of it."""
    known = meaning(error)
    return f"{who} {known} ({words(error)})" if known else words(error)
