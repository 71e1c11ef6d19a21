"""What a backend may answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from lmpool.errors import WorkerError
from lmpool.protocol.model_info import ModelCard
from lmpool.workers.backend.contract import Finished


def check_answers(finished: Finished, held: Collection[bytes], card: ModelCard) -> list[bytes]:
    """Refuse what no worker may publish: a backend that answers like this would do worse next time.

    Args:
        finished: what a step brought.
        held: the digests of the prompts that the backend owes answers to.
        card: the backend's card.

    Returns:
        the digests that were answered.

    Raises:
        WorkerError: a row or failure of a prompt that was not asked for, two answers, or rows of another length.
    """
    answered = finished.digests
    who = f"the backend {card.backend!r} has answered"
    if len(set(answered)) < len(answered):
        twice = [digest for digest, count in Counter(answered).items() if count > 1]
        raise WorkerError(f"{who} {len(twice)} prompts twice in one step, such as {twice[0].hex()}")
    if strangers := [digest for digest in answered if digest not in held]:
        raise WorkerError(f"{who} {len(strangers)} prompts that it was not asked, such as {strangers[0].hex()}")
    for block in finished.blocks:
        if block.numbers.shape[1] != card.vocab_size:
            raise WorkerError(f"{who} rows of {block.numbers.shape[1]} entries; its card says V = {card.vocab_size}")
    return answered
