"""A process that is many open pages of `lmpool web`, as browsers ask for them, without what browsers draw."""

from __future__ import annotations

import asyncio
import contextlib
import time

import uvloop

from benchmarks.harness.line_protocol import serve

_READY_S = 60.0
_POLL_S = 0.05
_LINE_BYTES = 2**24


class Pages:
    """Answers the benchmark's requests."""

    async def until_ready(self, port: int) -> None:
        """Wait until the service at a port of this machine has looked at the pool."""
        async with asyncio.timeout(_READY_S):
            while not await _is_ready(port):  # noqa: ASYNC110 another process becomes so
                await asyncio.sleep(_POLL_S)

    async def watch(self, port: int, token: str, pages: int, begin_s: float, seconds: float) -> float:
        """Open pages after `begin_s` and keep them open for some seconds; how many frames each was sent, on average."""
        await asyncio.sleep(begin_s)
        ends = time.perf_counter() + seconds
        return sum(await asyncio.gather(*[_page(port, token, ends) for _ in range(pages)])) / pages


async def _is_ready(port: int) -> bool:
    with contextlib.suppress(OSError, EOFError):
        return (await _request(port, "/readyz", "")).startswith(b"HTTP/1.1 200")
    return False


async def _page(port: int, token: str, ends: float) -> int:
    """One page until `ends`, by the clock of `time.perf_counter`: what it asks once, then its stream."""
    for path in ("/", "/api/settings", "/api/history"):
        answer = await _request(port, path, token)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{path}: {answer[:200]!r}")
    reader, writer = await _open(port, "/api/stream", token)
    frames = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ends - time.perf_counter()):
            while line := await reader.readline():
                frames += line.startswith(b"data: ")
            raise RuntimeError("the stream has ended")
    writer.close()
    return frames


async def _request(port: int, path: str, token: str) -> bytes:
    """The whole answer to one request, its head included."""
    reader, writer = await _open(port, path, token, "Connection: close\r\n")
    try:
        return await reader.read()
    finally:
        writer.close()


async def _open(port: int, path: str, token: str, more: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_LINE_BYTES)
    head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept-Encoding: gzip\r\n{more}"
    writer.write(f"{head}Authorization: Bearer {token}\r\n\r\n".encode())
    return reader, writer


async def main() -> None:
    """Serve until stdin ends."""
    pages = Pages()
    await serve({"until_ready": pages.until_ready, "watch": pages.watch})


if __name__ == "__main__":
    uvloop.run(main())
