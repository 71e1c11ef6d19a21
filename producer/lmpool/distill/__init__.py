"""Divergences between a teacher in a pool and a student, of whole distributions and of parts, with gradients in torch.

numpy arrays need no other package; gradients need torch. This package sends no requests: its functions take the arrays
that `lmpool.producer` returns.
"""

from lmpool.distill.divergence import divergence
from lmpool.distill.partial import partial_divergence, partial_divergence_error
from lmpool.distill.sources import States

__all__ = ["States", "divergence", "partial_divergence", "partial_divergence_error"]
