"""Reads the metrics and health of a process on this machine over HTTP."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families


class Page(NamedTuple):
    """A response over HTTP."""

    status: int
    text: str


def free_port() -> int:
    """An unused port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def get(port: int, path: str) -> Page | None:
    """Get a path from a port of this machine, or None if no process listens on the port."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=120) as answer:
            return Page(answer.status, answer.read().decode())
    except urllib.error.HTTPError as error:
        return Page(error.code, error.read().decode())
    except OSError:
        return None


class Scrape:
    """Metrics in Prometheus's text format, parsed by Prometheus's own client library.

    Attributes:
        kinds: name of each family -> its type.
    """

    def __init__(self, text: str) -> None:
        families = list(text_string_to_metric_families(text))
        self.kinds = {family.name: family.type for family in families}
        self.helps = {family.name: family.documentation for family in families}
        self.labels = {
            family.name: {name for sample in family.samples for name in sample.labels} - {"le"} for family in families
        }
        self._samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    @property
    def samples(self) -> list[tuple[str, frozenset[tuple[str, str]]]]:
        """The name of each sample, and its labels with their values."""
        return list(self._samples)

    def find(self, name: str, **labels: str) -> float | None:
        """The value of one sample, or None if the process does not export the sample."""
        return self._samples.get((name, frozenset(labels.items())))

    def value(self, name: str, **labels: str) -> float:
        """The value of one sample, which the process must export."""
        return self._samples[name, frozenset(labels.items())]


def scrape(port: int) -> Scrape:
    """The metrics of a process on this machine."""
    page = get(port, "/metrics")
    assert page is not None
    assert page.status == 200
    return Scrape(page.text)
