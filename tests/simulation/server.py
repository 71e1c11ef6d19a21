"""The simulated server: fakeredis in a process of its own, which loses keys and connections as a real server does."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakeredis
from fakeredis._commands import COMMANDS_WITH_SUB
from fakeredis._helpers import SimpleError, decode_command_bytes
from fakeredis.commands_mixins import scripting_mixin

from lmpool.testing.front import FakeClient, Front
from tests.simulation.loop import EPOCH, PROCESS, Process, SimulatedLoop

PATH = "/simulated.sock"
"""Where the server listens."""

_OOM = "OOM command not allowed when used memory > 'maxmemory'."
_TABLE = json.loads(Path(fakeredis.__file__).with_name("commands.json").read_text("utf-8"))
_NEEDS_MEMORY = {name for name, facts in _TABLE.items() if "denyoom" in facts[2]} - {"eval", "evalsha"}
_WRITES = {name for name, facts in _TABLE.items() if "write" in facts[2]}


class SimulatedClient(FakeClient):
    """A connected client; the server refuses its commands while it is out of memory.

    Attributes:
        traced: bytes of the commands that the log shows; b"" for none.
    """

    traced = b""

    def __init__(self, front: SimulatedFront) -> None:
        super().__init__(front)
        self._of = front
        self._has_written = False  # Whether the running script has changed a key.

    def _process_command(self, fields: list[bytes]) -> None:
        name = decode_command_bytes(fields[0]) if fields else ""
        if self.traced and any(self.traced in field for field in fields):
            logging.getLogger("server").info("%s", fields)
        if self._of.is_full and name in _NEEDS_MEMORY:
            self.put_response(SimpleError(_OOM))
            return
        super()._process_command(fields)

    def eval(self, script: bytes, numkeys: int, *keys_and_args: bytes) -> Any:
        """Run a script as fakeredis does, but compile each script once, as real servers do."""
        engine: Any = self._server
        front = self._of
        runtime = self._get_server_runtime(engine)
        if (compiled := front.compiled.get(script)) is None:
            engine.script_cache[hashlib.sha1(script).hexdigest().encode()] = script
            compiled = front.compiled[script] = runtime.compile(script)
        engine._lua_current_socket[0] = self
        self._script_resp, self._has_written = 2, False
        engine._lua_set_keys_argv(
            runtime.table_from(keys_and_args[:numkeys]), runtime.table_from(keys_and_args[numkeys:])
        )
        try:
            result = compiled()
        except scripting_mixin.LUA_MODULE.LuaError as error:
            raise SimpleError(f"ERR Error running script: {error}") from error
        finally:
            self._script_resp = None
        return self._convert_lua_result(result, nested=False)

    def _lua_redis_call(self, runtime: Any, expected: set[Any], op: bytes, *args: Any) -> Any:
        name = decode_command_bytes(op)
        if self._of.is_full and not self._has_written and name in _NEEDS_MEMORY:
            raise SimpleError(_OOM)
        self._has_written |= name in _WRITES
        if name in COMMANDS_WITH_SUB and args:
            name, args = f"{name} {decode_command_bytes(scripting_mixin._convert_redis_arg(args[0]))}", args[1:]
        func, signature = self._name_to_func(name)
        result = self._run_command(func, signature, [scripting_mixin._convert_redis_arg(arg) for arg in args], True)
        return self._convert_redis_result(runtime, result)


class SimulatedFront(Front):
    """A server that can be full.

    Attributes:
        is_full: whether commands that need memory are refused.
        compiled: source of a script -> its function.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.is_full = False
        self.compiled: dict[bytes, Callable[[], Any]] = {}

    async def listen(self, loop: SimulatedLoop) -> None:
        """Accept connections in the current process."""
        self._loop = loop
        await loop.create_unix_server(lambda: SimulatedClient(self), self._path)


class SimulatedServer:
    """The pool's server, which may be restarted with any earlier contents.

    Attributes:
        front: the running server.
        process: its process.
    """

    front: SimulatedFront
    process: Process

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    @property
    def database(self) -> Any:
        """The keys: bytes -> item with `value` and `expireat` (None: no lifetime)."""
        return self.front.engine.dbs[0]

    async def start(self, contents: Any = None, clock_s: float = 0.0) -> None:
        """Start a process of the server with contents that `snapshot` returned, or empty."""
        self.process = Process("server", clock_s=clock_s)
        self.front = SimulatedFront(Path(PATH))
        if contents is not None:
            database = self.database
            database._dict.update(copy.deepcopy(contents))
            for key, item in database._dict.items():
                database.schedule_expiry(key, item.expireat)
        token = PROCESS.set(self.process)
        try:
            await self.front.listen(self._loop)
        finally:
            PROCESS.reset(token)

    def snapshot(self) -> Any:
        """The contents now, as the server would write them to the disk."""
        return copy.deepcopy(self.live())

    def kill(self) -> None:
        """End the server's process."""
        self._loop.kill(self.process)

    def live(self) -> dict[bytes, Any]:
        """The keys that exist now."""
        database = self.database
        database.time = self.now
        database._remove_expired()
        return dict(database._dict)

    @property
    def now(self) -> float:
        """The server's clock."""
        return EPOCH + self._loop.time() + self.process.clock_s
