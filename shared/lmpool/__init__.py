"""Full next-token log-probability rows from a pool of model workers, through Redis, with one shared cache.

`lmpool.producer` asks for rows, `lmpool.workers` computes them, `lmpool.testing` is a pool in memory for tests; what
both sides have in common is beside them. In a checkout these are folders of their own, which this package joins.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Only now: whoever imports a part of this package need not wait for it.
    from importlib.metadata import version

    return version("lmpool")
