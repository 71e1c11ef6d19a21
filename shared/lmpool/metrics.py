"""Metrics as Prometheus sees them: made from plain numbers, and only when somebody looks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from lmpool.errors import SettingsError
from lmpool.histogram import Histogram, shown_bound

Number = int | float
Samples = Mapping[tuple[str, ...], Number | Histogram]
"""Values of the labels -> the number, or the histogram."""


@dataclass(frozen=True, slots=True)
class Metric:
    """What a metric is.

    Attributes:
        name: as it is exported, with unit, and `_total` if it is a counter.
        kind: what Prometheus calls its type.
        help: one sentence.
        labels: names of the labels that it has beside those that all have.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


def prometheus(extra: str) -> ModuleType:
    """The library, imported only where metrics are wanted.

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


def families(
    metrics: Iterable[Metric], samples: Mapping[str, Samples], common: Sequence[str], library: ModuleType
) -> Iterator[Any]:
    """Metric families for a registry of prometheus_client.

    Args:
        metrics: what is exported.
        samples: name of a metric -> its values; all labels, those in `common` first. A metric without an entry is
            exported without values.
        common: names of the labels that all metrics have.
        library: `prometheus_client.core`.
    """
    for metric in metrics:
        labels = (*common, *metric.labels)
        kind = {
            "counter": library.CounterMetricFamily,
            "gauge": library.GaugeMetricFamily,
            "histogram": library.HistogramMetricFamily,
        }[metric.kind]
        family = kind(metric.name.removesuffix("_total"), metric.help, labels=labels)
        for values, value in samples.get(metric.name, {}).items():
            if isinstance(value, Histogram):
                # Read once: others count on meanwhile, and the buckets must fit their number.
                sums = itertools.accumulate(list(value.counts))
                buckets = [
                    (shown_bound(bound), count) for bound, count in zip([*value.bounds, math.inf], sums, strict=True)
                ]
                family.add_metric(values, buckets, value.total)
            else:
                family.add_metric(values, value)
        yield family
