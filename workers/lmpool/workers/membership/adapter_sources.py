"""Where the adapters of a worker may come from: whoever may offer one names a place on the worker's machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmpool.errors import SettingsError
from lmpool.settings import shown
from lmpool.workers.backends.checkpoint import is_on_hub
from lmpool.workers.settings import WorkerSettings

_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class AdapterSources:
    """Tells which folders and hub names are taken.

    Attributes:
        roots: folders in which adapters must lie, with all links followed; none for all that can be read.
        takes_hub: whether names on a hub are taken from others than whoever starts the worker.
        most_bytes: what the files of one adapter may take together.
    """

    roots: tuple[Path, ...]
    takes_hub: bool
    most_bytes: int

    @classmethod
    def of(cls, settings: WorkerSettings) -> AdapterSources:
        """Those that a worker's settings allow."""
        roots = tuple(Path(root).resolve() for root in settings.adapter_root)
        return cls(roots, settings.adapter_hub, settings.adapter_mb * _MB)

    def place(self, source: str, *, is_own: bool = False) -> str:
        """Where the backend is to look: a folder with all links followed, or the name on the hub.

        What is not there is left to the backend to tell of.

        Args:
            source: folder or hub name.
            is_own: whoever starts the worker has named it.

        Raises:
            SettingsError: it is not taken.
        """
        if is_on_hub(source):
            if not self.takes_hub and not is_own:
                raise SettingsError(
                    f"adapters: {shown(source)} is no folder on this worker's machine, and names on a hub are not "
                    "taken: name a folder, or start all workers with --adapter-hub"
                )
            return source
        try:
            folder = Path(source).expanduser().resolve()
            self._check_root(folder, source)
            for file in folder.iterdir():
                self._check_root(file.resolve(), str(file))
            self.check_size(folder, source)
        except (FileNotFoundError, NotADirectoryError):
            return str(folder)
        except (OSError, RuntimeError) as error:  # Links in a circle; ~somebody who is not known here.
            raise SettingsError(f"adapters: {shown(source)} cannot be read: {error}") from error
        return str(folder)

    def check_size(self, folder: Path, source: str) -> None:
        """Refuse an adapter whose files are too large.

        Args:
            folder: where it lies.
            source: what it was called.

        Raises:
            SettingsError: they are.
        """
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        if size > self.most_bytes:
            raise SettingsError(
                f"adapters: the files in {shown(source)} have {size / _MB:.0f} MB, and {self.most_bytes / _MB:.0f} MB "
                "are taken: start all workers with a larger --adapter-mb if there is the memory"
            )

    def _check_root(self, place: Path, named: str) -> None:
        if self.roots and not any(place.is_relative_to(root) for root in self.roots):
            roots = ", ".join(map(str, self.roots))
            raise SettingsError(
                f"adapters: {shown(named)} lies outside of {roots}: put it there with all its files, or start all "
                "workers with another --adapter-root"
            )
