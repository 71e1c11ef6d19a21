"""A pool as the teacher of TRL's DistillationTrainer: the exact divergence over the whole vocabulary.

    trainer = DistillationTrainer(model=student, teacher_model=PooledTeacher("smollm2"), args=config, ...)

The pool computes the teacher's last hidden states, and TRL multiplies them by the teacher's head, as for a teacher in
its own process. Several teachers may share a trainer: `RoutedTrainer` reads the teacher of each sample, "model" or
"model:adapter", from the column `teacher` of the dataset.

Needs a pool whose workers return hidden states, and pip install torch trl. The student has the teacher's vocabulary.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput
from trl import DistillationTrainer  # type: ignore[attr-defined]  # trl imports its classes on demand

from lmpool.errors import SettingsError
from lmpool.producer import SyncProducer
from lmpool.protocol.row import Head

_THREADS = 32  # Max requests in flight.


class PooledTeacher(nn.Module):
    """One or more teachers in a pool, as the `teacher_model` of a DistillationTrainer.

    The heads of different models are side by side in one matrix. The states of a text are 0 in the columns of other
    heads, so the product with the matrix is the product with the teacher's own head.

    Args:
        names: the teachers, each "model" or "model:adapter". A trainer without routes uses the first.
        options: options of each model's `SyncProducer`, such as `redis`. By default, a request may take 600 s, and the
            pool does not keep its result.

    Raises:
        SettingsError: no teacher is named, or the teachers have different vocabularies or soft-caps.
    """

    def __init__(self, *names: str, **options: Any) -> None:
        super().__init__()
        if not names:
            raise SettingsError("names: name at least one teacher, such as PooledTeacher('smollm2')")
        options = {"timeout": 600.0, "keep_answers": False, **options}
        self.names = names
        self.routes: list[int] | None = None  # The number of each sample's teacher in the next batch.
        parts = [(model, adapter) for model, _, adapter in (name.partition(":") for name in names)]
        producers = {model: SyncProducer(model, **options) for model, _ in parts}
        self._teachers = [(producers[model], adapter) for model, adapter in parts]
        heads = [producer.head(adapter=adapter) for producer, adapter in self._teachers]
        if len({(len(head.weights), head.soft_cap) for head in heads}) > 1:
            found = [
                f"{name} has V = {len(head.weights)}, soft-cap {head.soft_cap}"
                for name, head in zip(names, heads, strict=True)
            ]
            raise SettingsError(f"names: {'; '.join(found)}. Use a trainer for each vocabulary and each soft-cap")
        # Adapters without factors for the head share the head of their model.
        keys = [
            (model, adapter if head.down is not None else "")
            for (model, adapter), head in zip(parts, heads, strict=True)
        ]
        matrices = {key: _matrix(head) for key, head in dict(zip(keys, heads, strict=True)).items()}
        ends = dict(zip(matrices, np.cumsum([each.shape[1] for each in matrices.values()]).tolist(), strict=True))
        self._columns = [slice(ends[key] - matrices[key].shape[1], ends[key]) for key in keys]
        matrix = torch.cat(list(matrices.values()), 1)
        facts: dict[str, Any] = {"vocab_size": matrix.shape[0], "final_logit_softcapping": heads[0].soft_cap}
        self.config = PreTrainedConfig(**facts)
        self.head = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
        self.head.weight = nn.Parameter(matrix, requires_grad=False)

    @property
    def base_model(self) -> PooledTeacher:
        """The module whose `forward` returns the states."""
        return self

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        return self.head

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int = 0, use_cache: bool = False, **media: Any
    ) -> BaseModelOutput:
        """The states of texts at their last `logits_to_keep` positions (0: all): (B, n, d), 0 at padding."""
        if given := [name for name, value in media.items() if value is not None]:
            raise SettingsError(f"{', '.join(given)}: a pool takes only token ids; use samples of text")
        weights, width = self.head.weight, input_ids.shape[1]
        first = max(0, width - (logits_to_keep or width))
        states: Any = torch.zeros(
            len(input_ids), width - first, weights.shape[1], dtype=weights.dtype, device=weights.device
        )
        routes, masks = self.routes or [0] * len(input_ids), attention_mask.bool()
        starts = masks[:, :first].sum(1).tolist()
        texts = [ids[mask].tolist() for ids, mask in zip(input_ids, masks, strict=True)]
        with ThreadPoolExecutor(_THREADS) as threads:
            for at, found in enumerate(threads.map(self._states, routes, texts, starts)):
                states[at, masks[at, first:], self._columns[routes[at]]] = found.to(weights)
        return BaseModelOutput(last_hidden_state=states)

    def _states(self, route: int, ids: list[int], start: int) -> Tensor:
        producer, adapter = self._teachers[route]
        found = torch.from_numpy(producer.hidden(ids, start, adapter=adapter))
        columns = self._columns[route].stop - self._columns[route].start
        # The column of a bias has the state 1.
        return nn.functional.pad(found, (0, columns - found.shape[1]), value=1.0)


def _matrix(head: Head) -> Tensor:
    """The head as one matrix (V, d), with the bias as the last column if the head has one.

    It has the model's dtype, but float32 if it includes LoRA factors or a scale, which rounding would change.
    """
    weights = head.weights.astype(np.float32)
    is_folded = head.down is not None or head.scale != 1
    if head.down is not None and head.up is not None:
        weights = weights + head.up @ head.down
    if head.bias is not None:
        weights = np.concatenate([weights, head.bias[:, None]], 1)
    dtype: torch.dtype = torch.float32 if is_folded else getattr(torch, head.dtype)
    return torch.from_numpy(weights * np.float32(head.scale)).to(dtype)


class RoutedTrainer(DistillationTrainer):
    """A DistillationTrainer with a PooledTeacher, for datasets whose column `teacher` names each sample's teacher."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        names = self.accelerator.unwrap_model(self.teacher_model).names
        routes = torch.tensor([_route(names, sample) for sample in inputs])
        return {**super()._generate_and_score_completions(inputs), "routes": routes}

    def _compute_loss(self, student: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        teacher = self.accelerator.unwrap_model(self.teacher_model)
        teacher.routes = inputs["routes"].tolist()
        base: Any = super()  # TRL is partly untyped.
        try:
            return base._compute_loss(student, inputs, num_items_in_batch)
        finally:
            teacher.routes = None


def _route(names: tuple[str, ...], sample: dict[str, Any]) -> int:
    """The number of the teacher that a sample names."""
    if (name := sample.get("teacher")) not in names:
        raise SettingsError(f"column teacher: {name!r} must be one of {', '.join(names)}; pass it to PooledTeacher")
    return names.index(name)
