"""The package index: which one pip uses here, and the newest wheel of a project on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urljoin, urlsplit

import requests
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from tools.engine_scan.wheels import TIMEOUT, WheelUnavailable, explained

_DEFAULT = "https://pypi.org/simple"
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_PIP_TIMEOUT = 60.0
_assignment = re.compile(r"^([\w.-]+)='(.*)'$", re.MULTILINE)  # a line of `pip config list`


@dataclass(frozen=True, slots=True)
class Offer:
    """A wheel that an index offers."""

    version: Version
    filename: str
    url: str
    yanked: bool = False

    @property
    def preference(self) -> tuple[Version, bool, str]:
        """The newest; of one version that for the commonest machine, though their sources should not differ."""
        return self.version, self.filename.endswith(("x86_64.whl", "-any.whl")), self.filename


class PackageIndex:
    """The index that pip uses here, asked in a session of its own."""

    def __init__(self) -> None:
        configured = _pip_settings()
        self._url = configured.get("index-url") or _DEFAULT
        self.session = requests.Session()
        # Parts of a file are parts of what lies on the server, not of a compressed form.
        self.session.headers.update({"User-Agent": "lmpool-engine-scan", "Accept-Encoding": "identity"})
        self.session.verify = configured.get("cert") or True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.session.close()

    @property
    def name(self) -> str:
        """Its address, without a user's name and password."""
        parts = urlsplit(self._url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()

    def newest(self, project: str, version: Version | None = None) -> Offer:
        """The newest release that is neither withdrawn nor a pre-release, or else the version asked for.

        Raises:
            WheelUnavailable: the index does not answer, or has no such wheel.
        """
        offers = list(self._offers(project))
        if version is not None:
            fitting = [offer for offer in offers if offer.version == version]
        else:
            fitting = [offer for offer in offers if not offer.yanked and not offer.version.is_prerelease]
        if not fitting:
            raise WheelUnavailable(f"{self.name} has no wheel of {project} {version or 'that is a release'}")
        return max(fitting, key=lambda offer: offer.preference)

    def _offers(self, project: str) -> Iterator[Offer]:
        with explained(f"{self.name} cannot be asked for {project}"):
            url = f"{self._url.rstrip('/')}/{project}/"
            response = self.session.get(url, headers={"Accept": _ACCEPT}, timeout=TIMEOUT)
            response.raise_for_status()
            files = _json_files(response) if "json" in response.headers.get("Content-Type", "") else _links(response)
        for filename, link, yanked in files:
            try:
                version = parse_wheel_filename(filename)[1]
            except (InvalidWheelFilename, InvalidVersion):
                continue
            yield Offer(version, filename, urljoin(response.url, link), yanked)


def _json_files(response: requests.Response) -> list[tuple[str, str, bool]]:
    files = response.json().get("files", [])
    return [(file["filename"], file["url"], bool(file.get("yanked"))) for file in files]


def _links(response: requests.Response) -> list[tuple[str, str, bool]]:
    page = _Page()
    page.feed(response.text)
    return page.files


class _Page(HTMLParser):
    """An index page in HTML: (filename, link, withdrawn) of every file."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[tuple[str, str, bool]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a" and (link := given.get("href")):
            filename = unquote(urlsplit(link).path).rpartition("/")[2]
            self.files.append((filename, link.partition("#")[0], "data-yanked" in given))


def _pip_settings() -> dict[str, str]:
    """pip's options as they hold for `pip download`; without pip, those in the environment."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        listed = ""
    settings: dict[str, str] = {}
    for section in ("global", "download"):  # The later ones win, as for pip.
        for name, value in _assignment.findall(listed):
            if name.startswith(f"{section}."):
                settings[name.removeprefix(f"{section}.")] = value
    for option in ("index-url", "cert"):
        if value := os.environ.get(f"PIP_{option.upper().replace('-', '_')}"):
            settings[option] = value
    return settings
