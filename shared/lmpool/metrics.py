"""prometheus_client, which is only there where metrics are wanted."""

from __future__ import annotations

from types import ModuleType

from lmpool.errors import SettingsError


def prometheus(extra: str) -> ModuleType:
    """The library's `prometheus_client.core`, imported by the first call.

    Args:
        extra: the extra of lmpool that brings it.

    Raises:
        SettingsError: it is not installed.
    """
    try:
        import prometheus_client.core
    except ImportError as error:
        raise SettingsError(
            f"metrics need the package prometheus-client, which is not installed: pip install 'lmpool[{extra}]'"
        ) from error
    return prometheus_client.core
