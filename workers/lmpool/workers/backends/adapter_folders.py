"""Adapters as a worker's settings name them: name=folder."""

from __future__ import annotations

from collections.abc import Sequence

from lmpool.errors import SettingsError
from lmpool.protocol.adapter import MAX_ADAPTERS, check_adapter_name, check_source
from lmpool.settings import check_texts, shown


def read_adapter_folders(given: Sequence[str]) -> dict[str, str]:
    """Read adapters.

    Args:
        given: texts of name=folder; a hub name may stand for the folder.

    Returns:
        adapter -> its folder or hub name.

    Raises:
        SettingsError: a text is not of this form, a name is none or is given twice, or there are too many.
    """
    check_texts("adapters", given)
    found: dict[str, str] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals or not folder:
            raise SettingsError(f"adapters: {shown(text)} is not name=folder")
        check_adapter_name("adapters", name)
        if name in found:
            raise SettingsError(f"adapters: {name!r} is given twice")
        found[name] = check_source("adapters", folder)
    if len(found) > MAX_ADAPTERS:
        raise SettingsError(f"adapters: {len(found)} are too many: one model may have {MAX_ADAPTERS}")
    return found
