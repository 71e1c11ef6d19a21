"""Weights that workers read from a bucket."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lmpool.errors import SettingsError, WeightsRefused
from tests.producer.batch.buckets import TestBucket
from tests.producer.batch.conftest import bucket, store  # noqa: F401
from tests.support.pool import Pool
from tests.versions.test_changes import is_of_seed
from tests.versions.traffic import weights


async def test_files_and_tensors_are_copied_to_a_bucket(pool: Pool, bucket: TestBucket, tmp_path: Path) -> None:  # noqa: F811
    # A new process: a forked one would not have the credentials of the store.
    pool.start("--weights-root", bucket.url, installed=True)
    (tmp_path / "step").mkdir()
    save_file({"seed": np.array(1)}, tmp_path / "step" / "model.safetensors")
    async with pool.producer("syn") as publisher:
        assert await publisher.publish_weights(tmp_path / "step", bucket=f"{bucket.url}/weights") == 1
        assert await is_of_seed(publisher, 1)
        assert await publisher.publish_weights(weights(2), bucket=bucket.url) == 2
        assert await is_of_seed(publisher, 2)
        with pytest.raises(WeightsRefused, match="lies outside of s3://"):
            await publisher.publish_weights(tmp_path / "step")
        for url, message in (
            ("http://x/y", "scheme http:// is not accepted"),
            ("s3://nowhere-at-all/x", "cannot be written"),
        ):
            with pytest.raises(SettingsError, match=message):
                await publisher.publish_weights(weights(3), bucket=url)
