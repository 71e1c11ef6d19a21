"""Copies files of weights to and from buckets, through fsspec (https://filesystem-spec.readthedocs.io)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmpool.errors import SettingsError, first_line
from lmpool.settings import shown

SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
"""Schemes of the URLs that are accepted: other file systems of fsspec may run code that a URL contains."""


def is_url(source: str) -> bool:
    """Whether a source of weights is a URL, not a path."""
    return "://" in source


def check_url(url: str) -> None:
    """Refuse a URL with another scheme, or several schemes."""
    if url.partition("://")[0] not in SCHEMES or "::" in url:
        raise SettingsError(f"weights: {shown(url)} must begin with one of {', '.join(SCHEMES)} and ://")


def upload(files: Sequence[Path], url: str) -> None:
    """Copy files into the folder `url`.

    Raises:
        SettingsError: the bucket cannot be used, or a package for its scheme is missing.
    """
    try:
        system, folder = _open(url)
        for file in files:
            system.put_file(str(file), f"{folder}/{file.name}")
    except Exception as error:
        raise SettingsError(f"weights: {shown(url)} cannot be written: {first_line(error)}") from error


def download(url: str, folder: Path) -> None:
    """Copy the files of the folder `url` into an empty folder; raises SettingsError as `upload`."""
    try:
        system, place = _open(url)
        for name in system.ls(place, detail=False):
            system.get_file(name, str(folder / name.rpartition("/")[2]))
    except Exception as error:
        raise SettingsError(f"weights: {shown(url)} cannot be read: {first_line(error)}") from error


def _open(url: str) -> tuple[Any, str]:
    check_url(url)
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise SettingsError("weights: URLs need `pip install 'lmpool[fsspec]'` and a package for the scheme") from error
    system, path = url_to_fs(url)
    system.invalidate_cache()  # Other processes may have changed the files.
    return system, str(path).rstrip("/")
