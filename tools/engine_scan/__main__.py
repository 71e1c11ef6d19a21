"""`python -m tools.engine_scan`: has anything moved in the newest engines that the in-process backends rely on?"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from tools.engine_scan.package_index import PackageIndex
from tools.engine_scan.relied import ENGINES, Relied
from tools.engine_scan.scan import Finding, Moved, scan
from tools.engine_scan.wheels import Wheel, WheelUnavailable, open_file, open_url


def main(arguments: Sequence[str] | None = None) -> int:
    """Scan, and print what moved.

    Returns:
        0 when nothing moved in what could be looked at, 1 when something did, 2 when nothing could be looked at.
    """
    given = _parse(arguments)
    if given.wheel:
        outcomes = [_look(engine, given.wheel.name, open_file(given.wheel), given.verbose) for engine in given.engines]
    else:
        with PackageIndex() as index:
            outcomes = [_look_up(index, engine, given.version, given.verbose) for engine in given.engines]
    seen = [moved for moved in outcomes if moved is not None]
    return (1 if any(seen) else 0) if seen else 2


def _look_up(index: PackageIndex, engine: str, version: Version | None, verbose: bool) -> bool | None:
    try:
        offer = index.newest(engine, version)
    except WheelUnavailable as error:
        _not_seen(engine, error)
        return None
    return _look(engine, f"{offer.version}: {offer.filename}", open_url(index.session, offer.url), verbose)


def _look(engine: str, which: str, wheel: AbstractContextManager[Wheel], verbose: bool) -> bool | None:
    """Scan a wheel. Returns whether anything moved, or None when it cannot be read."""
    try:
        with wheel as opened:
            findings = scan(opened.read, ENGINES[engine])
    except WheelUnavailable as error:
        _not_seen(f"{engine} {which}", error)
        return None
    moved = sum(bool(finding.moved) for finding in findings)
    print(f"{engine} {which}: {len(findings)} looked at, {moved or 'nothing'} moved", flush=True)
    _report(findings, verbose)
    return moved > 0


def _report(findings: Sequence[Finding], verbose: bool) -> None:
    by_change: dict[Moved, list[Relied]] = {}  # A lost file, for instance, is one line for all that was in it.
    for finding in findings:
        for moved in finding.moved:
            by_change.setdefault(moved, []).append(finding.relied)
        if verbose and not finding.moved:
            print(f"  ok: {finding.place}: {finding.relied.module}.{finding.relied.name}", flush=True)
    for moved, concerned in by_change.items():
        uses = ", ".join(f"{relied.name} ({relied.why})" for relied in concerned)
        print(f"  moved: {moved.place}: {moved.text}; relied on: {uses}", flush=True)


def _not_seen(what: str, error: WheelUnavailable) -> None:
    print(f"{what}: could not be looked at: {error}", flush=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.engine_scan", description=__doc__)
    parser.add_argument(
        "--engine", dest="engines", action="append", choices=ENGINES, help="only this one; may be given several times"
    )
    parser.add_argument("--version", type=_version, help="this version instead of the newest")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="this file instead of one from the package index")
    parser.add_argument("--verbose", action="store_true", help="name what is where it should be, too")
    given = parser.parse_args(arguments)
    if given.wheel and given.version:
        parser.error("--wheel has its version already; leave --version away")
    if not given.engines:
        given.engines = [_engine_of(parser, given.wheel)] if given.wheel else list(ENGINES)
    return given


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _engine_of(parser: argparse.ArgumentParser, wheel: Path) -> str:
    try:
        name = str(parse_wheel_filename(wheel.name)[0])
    except (InvalidWheelFilename, InvalidVersion):
        name = ""
    if name not in ENGINES:
        parser.error(f"{wheel.name} does not say which engine it is: add --engine")
    return name


if __name__ == "__main__":
    sys.exit(main())
