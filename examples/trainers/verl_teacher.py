"""A pool as the teacher of verl's on-policy distillation, in place of the servers that verl starts on GPUs.

    VERL_USE_EXTERNAL_MODULES=examples.trainers.verl_teacher LMPOOL_REDIS_URL=redis://HOST \\
        python -m verl.trainer.main_ppo distillation.enabled=true \\
        distillation.n_gpus_per_node=1 distillation.nnodes=1 \\
        distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size=1 \\
        distillation.teacher_models.teacher_model.model_path=smollm2 ...

verl imports this module in each of its processes. `model_path` is a model of the pool, or "model:adapter". Of several
entries in `teacher_models`, verl takes one for each sample: the entry whose `key` is the sample's `data_source`, or its
value in the field that `distillation.teacher_key` names. verl refuses a configuration without a GPU for the teachers.
Set both variables before `ray start` on every machine, because verl does not forward them to a running Ray cluster.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import verl.experimental.teacher_loop as teacher_loop
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import TokenOutput

from lmpool.errors import SettingsError
from lmpool.producer import Producer


class PooledTeacherClient:
    """A teacher in the pool, with the interface of verl's `LLMServerClient`. verl sends copies to its processes.

    Args:
        name: "model" or "model:adapter".
        options: options of `Producer`, such as `redis`. By default, a request may take 600 s, and the pool does not
            keep its result.
    """

    def __init__(self, name: str, **options: Any) -> None:
        model, _, self.adapter = name.partition(":")
        self.producer = Producer(model, **{"timeout": 600.0, "keep_answers": False, **options})

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **media: Any
    ) -> TokenOutput:
        """The teacher's log-probabilities of each token of a text, or of the k most likely tokens in its place.

        In `extra_fields`, `prompt_logprobs` and `prompt_ids` are (n, max(k, 1)), where k is the request's
        `prompt_logprobs`. Position i has the values for token i + 1; the last position has zeros.
        """
        if given := [name for name, value in media.items() if value]:  # verl passes {} and None for texts.
            raise SettingsError(f"{', '.join(given)}: a pool takes only token ids; use samples of text")
        k = sampling_params["prompt_logprobs"]
        wanted: dict[str, Any] = {"top": k} if k else {"targets": [[token] for token in prompt_ids[1:]]}
        found = await self.producer.positions(prompt_ids[:-1], adapter=self.adapter, **wanted)
        values, ids = found.top or (found.targets, wanted["targets"])
        padded = [np.pad(np.asarray(each), ((0, 1), (0, 0))).tolist() for each in (values, ids)]
        return TokenOutput(token_ids=[], extra_fields={"prompt_logprobs": padded[0], "prompt_ids": padded[1]})


class PooledTeachers:
    """The teachers of verl's configuration, in place of verl's `MultiTeacherModelManager`, which starts servers."""

    def __init__(self, config: Any, resource_pool: Any = None) -> None:
        self.teachers = omega_conf_to_dataclass(config.distillation).teacher_models

    def get_client(self) -> dict[str, PooledTeacherClient]:
        """The client of each teacher, by its key."""
        return {key: PooledTeacherClient(teacher.model_path) for key, teacher in self.teachers.items()}


teacher_loop.MultiTeacherModelManager = PooledTeachers
