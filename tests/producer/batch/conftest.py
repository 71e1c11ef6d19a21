"""Jobs of arq are tested where arq is: `make test-smoke` does that, with the redis-py that it needs."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [] if find_spec("arq") else ["test_jobs.py"]
