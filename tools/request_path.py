"""Find the files of the package that one request enters, and the types that carry its prompt.

A profile hook in all threads records frames while a real client and a real worker run in one event loop of this
process, with the synthetic backend or a transformers model. The server is the server of `lmpool.testing`, whose files
are not counted. After some warm-up requests, each of several prompts is recorded from the call of `Producer.logprobs`
to its return.

- A file counts if one of its functions or coroutines runs, or resumes, in every one of these requests. This rule
  excludes periodic tasks that happen to run during one request.
- A call is a frame of these files that runs; a coroutine that resumes several times is one call. The program reports
  the calls of the request with the fewest calls, because background tasks add calls to the other requests.
- A type carries a prompt if it is a class of the package, an instance appears among the locals of these frames (or in
  an attribute of such an object), and one of its attributes holds the prompt's ids, its digest, or an object that holds
  either. The digest is found as a bytes value of at least 16 bytes next to the ids that belongs to no other prompt.
  Objects of several prompts, and objects that hold the prompt only inside a list or dict, do not carry the prompt.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import tomllib
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, get_type_hints

import numpy as np

WORKER = "lmpool.workers.worker"
_PRODUCER = "lmpool.producer"
_MODEL = "structure"  # The name of the served model.
_WARM_UPS = 5  # Number of requests before recording starts: the first requests open connections and load scripts.
_REQUESTS = 100  # Number of recorded requests: with only 20, a periodic task might run during each request.
_PROMPT_TOKENS = 12  # Tokens per prompt.
_MIN_DIGEST_BYTES = 16  # Shorter byte strings next to the ids are not digests.


class Recording:
    """Frames and objects of the package that are seen while `is_on`; `hook` is the profile hook of all threads.

    Attributes:
        frames: frames in the order in which they were entered, with their files.
        objects: objects of the package by their `id`; holding them keeps the ids unique.
    """

    def __init__(self, root: Path, paths: Iterable[Path]) -> None:
        relative = [path.relative_to(root) for path in paths]
        self._names = {str(root / path): str(path) for path in relative if path.parts[0] != "testing"}
        self.is_on = False
        self.clear()

    def clear(self) -> None:
        """Discard the recorded frames and objects."""
        self.frames: dict[FrameType, str] = {}
        self.objects: dict[int, object] = {}

    def hook(self, frame: FrameType, event: str, _: object) -> None:
        """Record a frame that starts, resumes, pauses or ends, and the objects of the package among its locals."""
        if self.is_on and event in ("call", "return") and frame.f_code.co_filename in self._names:
            self.frames.setdefault(frame, self._names[frame.f_code.co_filename])
            for value in [*frame.f_locals.values()]:
                if self._record(value):
                    for attribute in attributes(value):
                        self._record(attribute)

    def _record(self, value: object) -> bool:
        module = type(value).__module__
        in_package = module.startswith("lmpool.") and "lmpool.testing" not in module
        if in_package:
            self.objects[id(value)] = value
        return in_package


def attributes(value: object) -> list[object]:
    """Return the values in an object's `__dict__`, its slots and, for a tuple, its fields."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    values = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
    return [*values, *(value if isinstance(value, tuple) else ())]


def prompt_types(objects: Iterable[object], ids: list[int], foreign: set[bytes]) -> tuple[set[type], set[bytes]]:
    """Return the classes of the objects that carry one prompt, and the byte strings next to its ids.

    Byte strings in `foreign` are next to the ids of other prompts too, so they are not this prompt's digest.
    """
    encoded = np.asarray(ids, "<u4").tobytes()

    def is_ids(value: object) -> bool:
        value = value.tolist() if isinstance(value, np.ndarray) and value.size == len(ids) else value
        if isinstance(value, bytes):
            return value == encoded
        return isinstance(value, (list, tuple)) and all(type(number) is int for number in value) and [*value] == ids

    held = [(holder, attributes(holder)) for holder in objects]
    next_to = {v for _, values in held if any(map(is_ids, values)) for v in values if isinstance(v, bytes)}
    digests = {value for value in next_to - foreign if len(value) >= _MIN_DIGEST_BYTES}
    first = [
        holder for holder, values in held if any(is_ids(v) or (isinstance(v, bytes) and v in digests) for v in values)
    ]
    numbers = {id(holder) for holder in first}
    second = [holder for holder, values in held if any(id(value) in numbers for value in values)]
    return {type(holder) for holder in [*first, *second]}, next_to


class RequestPath:
    """The files that all traced requests of one kind entered; each request is a list of the files of its stack frames.

    Attributes:
        files: files that every request entered, in the order of the last request.
        calls: frames of these files, in the request with the fewest.
    """

    def __init__(self, requests: list[list[str]]) -> None:
        common = set.intersection(*map(set, requests))
        self.files = [name for name in dict.fromkeys(requests[-1]) if name in common]
        self.calls = min(sum(name in common for name in files) for files in requests)


async def follow(root: Path, paths: Iterable[Path], hf: str | None) -> tuple[RequestPath, RequestPath, list[str]]:
    """Record cold requests, then hits in the producer's memory, and the types that carry a prompt."""
    recording = Recording(root, paths)
    # Set the hook before any thread starts: a thread takes the hook that is set at its start.
    threading.setprofile(recording.hook)
    sys.setprofile(recording.hook)
    worker_class = import_module(WORKER).Worker
    server_class = get_type_hints(worker_class.__init__)["server"]
    points = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"]["lmpool.backends"]
    place, name = points["hf" if hf else "synthetic"].split(":")
    backend = getattr(import_module(place), name)(name=_MODEL, **({"model": hf} if hf else {}))
    prompts = np.random.default_rng(0).integers(0, 500, (_WARM_UPS + _REQUESTS, _PROMPT_TOKENS)).tolist()
    async with import_module("lmpool.testing").pool() as pool:
        worker = worker_class(server_class(pool.url), backend)
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        serving: asyncio.Future[Any] = asyncio.create_task(worker.run(ready.set_result))
        await asyncio.wait([ready, serving], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            await serving  # If the worker could not start, this `await` raises the reason.
        async with import_module(_PRODUCER).Producer(_MODEL, redis=pool.url) as producer:

            async def record(ids: list[int]) -> list[str]:
                recording.clear()
                recording.is_on = True
                await producer.logprobs(ids)
                recording.is_on = False
                return [*recording.frames.values()]

            colds = [await record(ids) for ids in prompts[:-1]]
            others = recording.objects
            colds.append(await record(prompts[-1]))
            last_only = [value for number, value in recording.objects.items() if number not in others]
            hits = [await record(prompts[-1]) for _ in range(_REQUESTS)]
        worker.stop()
        await serving
    _, foreign = prompt_types(others.values(), prompts[-2], set())
    types, _ = prompt_types(last_only, prompts[-1], foreign)
    return RequestPath(colds[_WARM_UPS:]), RequestPath(hits), sorted(kind.__name__ for kind in types)
