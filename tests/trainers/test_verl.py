"""The pool as verl's teacher: verl's own manager gets the teachers' log-probabilities in the shapes of its losses.

verl trains only on GPUs. These tests run the part of verl between its configuration and its losses:
`verl.experimental.teacher_loop.teacher_manager.AsyncTeacherLLMServerManager` of verl 0.9.1.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lmpool.errors import SettingsError
from lmpool.producer import SyncProducer
from tests.support.pool import DEADLINE_S, Pool

ALONE = "inference.tensor_model_parallel_size=1"
ONE = ["teacher_model.model_path=syn", f"teacher_model.{ALONE}"]
# `+` adds an entry. verl drops its entry `teacher_model` if there are others. The teachers' GPUs must add up to 1.
SEVERAL = [
    *["+a.key=maths", "+a.model_path=syn", "+a.num_replicas=1", f"+a.{ALONE}", "+a.inference.name=vllm"],
    *["+b.key=poems", "+b.model_path=syn:poet", "+b.inference.name=vllm"],
]
IDS = [5, 400, 17, 17, 3]
# The arguments that verl passes for a sample of text.
TEXT: dict[str, Any] = {"multi_modal_data": {}, "mm_processor_kwargs": {}}


@pytest.fixture(scope="module")
def served(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """A pool with a synthetic model and an adapter."""
    folder = tmp_path_factory.mktemp("verl")
    (folder / "adapter_model.bin").write_bytes(b"poet")
    pool = Pool(server_url, "lmpool", folder)
    pool.start("--adapters", f"poet={folder}")
    yield pool
    pool.end()


@pytest.fixture
def producer(served: Pool, monkeypatch: pytest.MonkeyPatch) -> Iterator[SyncProducer]:
    """A producer of the pool; the environment names the pool's server, as in verl's processes."""
    monkeypatch.setenv("LMPOOL_REDIS_URL", served.url)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "examples.trainers.verl_teacher")
    with SyncProducer("syn", timeout=DEADLINE_S) as producer:
        yield producer


def configured(teachers: list[str], *overrides: str) -> Any:
    """verl's configuration with teachers."""
    # verl reads its variable in the environment when it is imported.
    from hydra import compose, initialize_config_module

    counts = [f"distillation.{name}=1" for name in ("n_gpus_per_node", "nnodes")]
    entries = [f"{'+' * (each[0] == '+')}distillation.teacher_models.{each.lstrip('+')}" for each in teachers]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            ["distillation.enabled=true", "actor_rollout_ref.rollout.name=vllm", *counts, *entries, *overrides],
        )


def manager(config: Any) -> Any:
    """verl's manager of teachers with the clients that verl's trainer passes to it, which are copied to a process."""
    import verl.experimental.teacher_loop
    from verl.experimental.teacher_loop.teacher_manager import AsyncTeacherLLMServerManager

    clients = verl.experimental.teacher_loop.MultiTeacherModelManager(config, resource_pool=None).get_client()
    return AsyncTeacherLLMServerManager(config, pickle.loads(pickle.dumps(clients)))  # noqa: S301


async def test_verl_gets_the_logprob_of_each_token(producer: SyncProducer) -> None:
    ids, values = await manager(
        configured(ONE, "distillation.distillation_loss.loss_mode=k3")
    ).compute_teacher_logprobs_single(IDS, **TEXT)
    assert ids.tolist() == [[token] for token in [*IDS[1:], 0]]
    expected = [*producer.score(IDS[:1], IDS[1:]), 0]
    np.testing.assert_allclose(values.numpy(), np.array(expected)[:, None], rtol=0, atol=1e-6)


async def test_verl_gets_the_most_likely_tokens(producer: SyncProducer) -> None:
    options = [f"distillation.distillation_loss.{each}" for each in ("loss_mode=forward_kl_topk", "topk=7")]
    ids, values = await manager(configured(ONE, *options)).compute_teacher_logprobs_single(IDS, **TEXT)
    assert ids.shape == values.shape == (5, 7)
    top = producer.positions(IDS[:-1], top=7).top
    assert top is not None
    assert np.array_equal(ids[:-1], top.ids)
    np.testing.assert_allclose(values[:-1], top.values, rtol=0, atol=1e-6)
    assert not ids[-1].any()
    assert not values[-1].any()


async def test_verl_selects_the_teacher_of_each_sample(producer: SyncProducer) -> None:
    teachers = manager(configured(SEVERAL))
    for key, adapter in (("maths", ""), ("poems", "poet")):
        _, values = await teachers.compute_teacher_logprobs_single(IDS, routing_key=key, **TEXT)
        expected = producer.score(IDS[:1], IDS[1:], adapter=adapter)
        np.testing.assert_allclose(values[:-1, 0], expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="No teacher configured"):
        await teachers.compute_teacher_logprobs_single(IDS, routing_key="art", **TEXT)


async def test_a_sample_with_an_image_is_refused(producer: SyncProducer) -> None:
    with pytest.raises(SettingsError, match="^image_data: a pool takes only token ids"):
        await manager(configured(ONE)).compute_teacher_logprobs_single(IDS, {"images": [1]}, {})
