"""A pytest fixture with the folder of a real model, SmolLM2-135M-Instruct."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from examples.smollm2 import write_smollm2

MODELS = Path(os.environ.get("LMPOOL_TEST_CACHE", Path(__file__).parents[3] / ".cache" / "models"))


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Folder of SmolLM2-135M-Instruct in float32, written once and kept between test runs."""
    return write_smollm2(MODELS / "smollm2-float32", "float32")
