"""A process that sends the requests of many open pages of `lmpool web`, like browsers but without rendering."""

from __future__ import annotations

import asyncio
import contextlib
import time

import uvloop

from benchmarks.harness.line_protocol import serve

_READY_S = 60.0  # Max seconds until `lmpool web` is ready.
_POLL_S = 0.05  # Seconds between two checks whether `lmpool web` is ready.
_LINE_BYTES = 2**24  # Max bytes of a line of the event stream; each frame is one line.


class Pages:
    """Handlers that open pages."""

    async def until_ready(self, port: int) -> None:
        """Wait until the `lmpool web` service at a port of this machine has polled the pool."""
        async with asyncio.timeout(_READY_S):
            while not await _is_ready(port):  # noqa: ASYNC110 another process becomes ready
                await asyncio.sleep(_POLL_S)

    async def watch(self, port: int, token: str, pages: int, begin_s: float, seconds: float) -> float:
        """Open pages after `begin_s`, keep them open for `seconds`, and return the mean number of frames per page."""
        await asyncio.sleep(begin_s)
        ends = time.perf_counter() + seconds
        return sum(await asyncio.gather(*[_page(port, token, ends) for _ in range(pages)])) / pages


async def _is_ready(port: int) -> bool:
    with contextlib.suppress(OSError, EOFError):
        return (await _request(port, "/readyz", "")).startswith(b"HTTP/1.1 200")
    return False


async def _page(port: int, token: str, ends: float) -> int:
    """Load one page, read its stream until `ends` (`time.perf_counter`), and return the number of frames."""
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
            raise RuntimeError("the service closed the stream")
    writer.close()
    return frames


async def _request(port: int, path: str, token: str) -> bytes:
    """The whole response to one request, including its head."""
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
    """Respond to requests on stdin until stdin ends."""
    pages = Pages()
    await serve({"until_ready": pages.until_ready, "watch": pages.watch})


if __name__ == "__main__":
    uvloop.run(main())
