"""The tables of the pool page: models, outliers and pages of workers, with texts shortened and numbers checked.

The size of a table does not depend on the number of workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from lmpool.admin.fleet import by_name, by_need, number
from lmpool.admin.survey import Survey, file_notices, shortened
from lmpool.protocol.model_info import TRIE_SERVICE

PAGE_WORKERS = 100
"""Max workers in one page of the table of workers: more rows slow a browser down."""

MAX_TEXT = 120  # Max characters of a name or text that the page shows.
_MAX_STATE = 20  # Max characters of a worker's state.
_MAX_NOTICES = 4  # Max sentences about changed files above the tables.
_WORKER_FIELDS = (
    "rows", "rows_per_s", "tokens", "reused", "lane", "in_flight", "failures", "homed", "stolen", "shared", "batch",
    "p50_s", "p99_s", "silent_s", "ranks",
)  # fmt: skip


class Tables:
    """The tables of one survey."""

    def __init__(self, models: Survey) -> None:
        self._models = models

    def frame(self) -> dict[str, Any]:
        """Return the tables that all pages get: models, outliers, notices, and the first page of workers."""
        workers = self.workers()
        return {
            "models": [_shown_model(model) for model in self._models],
            # One page lists all workers of a small pool, so outliers would only repeat them.
            "outliers": self._outliers() if workers["total"] > PAGE_WORKERS else [],
            "notices": [shortened(notice) for notice in file_notices(self._models)[:_MAX_NOTICES]],
            "workers": workers,
        }

    def workers(self, wanted: str = "", offset: int = 0) -> dict[str, Any]:
        """Return a page of the workers whose id, model and state contain `wanted`, from the page that has `offset`.

        If all workers fit one page, they are in the order of their names, otherwise the most urgent are first.
        """
        matching = self._ordered
        if wanted := wanted.lower():
            matching = [
                worker
                for worker in matching
                if wanted in f"{worker['id']} {worker['model']} {worker.get('state')}".lower()
            ]
        # A page behind the last one is the last page: workers may have left since the page was requested.
        begin = max(0, min(offset, len(matching) - 1)) // PAGE_WORKERS * PAGE_WORKERS
        listed = [_shown_worker(worker) for worker in matching[begin : begin + PAGE_WORKERS]]
        return {"total": len(self._ordered), "matching": len(matching), "offset": begin, "listed": listed}

    @cached_property
    def _ordered(self) -> list[dict[str, Any]]:
        named = by_name(self._models)
        return named if len(named) <= PAGE_WORKERS else by_need(self._models)

    def _outliers(self) -> list[dict[str, Any]]:
        return [
            {
                "model": shortened(model["name"], MAX_TEXT),
                "kind": found["kind"],
                "count": found["count"],
                "most": [(shortened(name, MAX_TEXT), finite(value)) for name, value in found["most"]],
            }
            for model in self._models
            for found in model["summary"]["outliers"]
        ]


def _shown_model(model: dict[str, Any]) -> dict[str, Any]:
    info, summary = model["info"] or {}, model["summary"]
    shown = {name: info.get(name) for name in ("backend", "vocab_size", "dtype", "encoding", "max_prompt_tokens")}
    if model["name"] == TRIE_SERVICE:
        shown["vocab_size"] = None  # Trie workers serve vocabularies of any size.
    shown |= {name: finite(model[name]) for name in ("queued", "age_s", "dead", "rows_per_s", "p50_s", "p99_s")}
    shown |= {"name": model["name"], "adapters": model.get("adapters", []), "trouble": model["trouble"]}
    # Send pairs, not objects: any program may have written the name of a state.
    counts = {
        name: [(shortened(key, _MAX_STATE), count) for key, count in summary[name].items()]
        for name in ("states", "versions")
    }
    sums = {name: finite(summary[name]) for name in ("rows", "tokens", "reused", "homed", "shared", "occupancy")}
    return {**shown, **counts, **sums, "workers": summary["workers"]}


def _shown_worker(worker: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {name: finite(number(worker, name)) for name in _WORKER_FIELDS}
    for name in ("id", "model", "state", "changed_files", "devices"):
        shown[name] = shortened(str(worker.get(name) or ""), _MAX_STATE if name == "state" else MAX_TEXT)
    return shown


def finite(value: float | None) -> float | None:
    """Return None for infinity and NaN, which JSON does not have."""
    return value if value is not None and abs(value) < 1e300 else None
