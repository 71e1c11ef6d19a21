"""The prefix tree over a vocabulary, and the kernels that sum the weights below its nodes.

This package imports `protocol` and modules of `lmpool` itself, such as `vocabulary`.
"""
