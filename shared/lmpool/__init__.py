"""Full next-token log-probability rows from a pool of model workers, through Redis, with one shared cache.

`lmpool.producer` requests rows, `lmpool.workers` computes rows, and `lmpool.testing` is a pool in memory for tests.
These three parts share the other modules. In a git checkout each part has a folder, and this package joins the folders.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Import here, so that importing a part of this package does not wait for importlib.metadata.
    from importlib.metadata import version

    return version("lmpool")
