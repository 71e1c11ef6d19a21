"""Checks the jobs on the server, and the counters of lanes and capacities.

Each prompt has one job, which the key of its waiting clients names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from lmpool.protocol.job import decode_ids, digest_of, query_digest, unpack_job
from lmpool.protocol.keys import ModelKeys

_STREAM = re.compile(rb"(lmpool:\{.*\}):(jobs|lane:(.*))", re.DOTALL)
_PARTITION = re.compile(rb"\{\d+\}$")
_LATER = re.compile(rb"(\d+),?\d* (\d+) ")


def wrong_jobs(live: dict[bytes, Any], now_ms: float, agreed_ms: float) -> Iterator[str]:
    """Describe jobs that should not be there.

    Args:
        live: the keys of the server.
        now_ms: the server's clock.
        agreed_ms: since when clients can use all partitions, and send a prompt to one of them. Earlier jobs of a prompt
            may be in several partitions.
    """
    sent = defaultdict[tuple[bytes, bytes], list[tuple[int, bytes]]](list)  # By model and prompt.

    def count(base: bytes, digest: bytes, since: int) -> None:
        sent[_PARTITION.sub(b"}", base), digest].append((since, base))

    for key, item in live.items():
        if key.endswith(b"}:backlog:jobs"):
            for digest, stored in item.value.items():
                if (found := _LATER.match(stored)) and int(found[1]) + int(found[2]) > now_ms:
                    count(key.removesuffix(b":backlog:jobs"), digest, int(found[1]))
        elif found := _STREAM.fullmatch(key):
            worker = b" " + found[3] if found[3] else b""
            group = item.value._groups.get(b"workers")
            for lost in [
                entry for entry in (group.pel if group is not None else ()) if entry not in item.value._values_dict
            ]:
                yield f"a worker holds the job {lost.encode()!r} of {key!r}, which has been removed"
            for entry, values in item.value._values_dict.items():
                fields = dict(zip(values[::2], values[1::2], strict=True))
                if b"m" not in fields:
                    continue
                job, since = unpack_job(fields[b"m"]), int(fields.get(b"t", entry.encode().partition(b"-")[0]))
                # Skip jobs whose first client waits no longer, and jobs that replace a damaged row.
                if since + int(fields[b"u"].partition(b" ")[0]) <= now_ms or job.overwrite:
                    continue
                digest = digest_of(job.ids, job.adapter)
                digest = query_digest(digest, job.query) if job.query else digest
                count(found[1], digest, since)
                if group is not None and entry > group.last_delivered_key:
                    named = _named(live.get(found[1] + b":waiting:" + digest))
                    if named != entry.encode() + worker:
                        prompt = decode_ids(job.ids).tolist()
                        yield f"{prompt} has the job {entry.encode() + worker!r}, and its clients wait for {named!r}"
    for (model, digest), found_jobs in sent.items():
        bases = {base for _, base in found_jobs}
        if len(found_jobs) > len(bases) or (len(bases) > 1 and max(found_jobs)[0] > agreed_ms):
            yield f"the prompt {digest.hex()} has {len(found_jobs)} jobs in {model!r}"


def _named(item: Any) -> bytes:
    """The job that a key of waiting clients names."""
    value = item.value if item is not None else b""
    return value.partition(b"\n")[2] if isinstance(value, bytes) else value.get(b"job", b"")


def wrong_counters(live: dict[bytes, Any], *, has_lost_keys: bool) -> Iterator[str]:
    """Describe counters of lanes and capacities that are not what a count of their members gives."""
    for key, item in live.items():
        if key.endswith(b"}:lanes"):
            counted = {member: item.value.get(member) for member in item.value}
            total = counted.pop(b"", 0)
            if total != sum(counted.values()):
                yield f"the lanes {counted} have the sum {total}"
            for worker, length in counted.items() if not has_lost_keys else ():
                lane = live.get(key.removesuffix(b"s") + b":" + worker)
                if length != (len(lane.value) if lane is not None else 0):
                    yield f"the lane of {worker!r} is counted as {length}"
        elif key.endswith(b"}:capacity"):
            sizes = {name: float(size) for name, size in item.value.items()}
            total = sizes.pop(b"", 0)
            if total != sum(sizes.values()):
                yield f"the capacities {sizes} have the sum {total}"


def waiting_in(value: Any) -> list[bytes]:
    """The reply streams of the clients that a key of waiting clients names."""
    return [value.partition(b"\n")[0]] if isinstance(value, bytes) else [name for name in value if name != b"job"]


def is_held(live: dict[bytes, Any], keys: ModelKeys, job: bytes, worker: str) -> bool:
    """Whether a worker holds a job: an entry of the shared stream, or "ENTRY OWNER" in a lane."""
    entry, _, owner = job.partition(b" ")
    stream = live.get(keys.lane(owner.decode()) if owner else keys.jobs)
    group = stream.value._groups.get(b"workers") if stream is not None else None
    held = group.pel.items() if group is not None else ()
    return any(key.encode() == entry and one.consumer_name == worker.encode() for key, one in held)


def has_unread_jobs(stream: Any) -> bool:
    """Whether a stream has a job that no worker has read."""
    group = stream._groups.get(b"workers")
    after = group.last_delivered_key if group is not None else None
    jobs = (entry for entry, fields in stream._values_dict.items() if b"m" in fields[::2])
    return any(after is None or entry > after for entry in jobs)
