"""The prefix tree over a vocabulary, and the kernels that sum the weights below its nodes.

Imports `protocol` and files of the folder above, such as `vocabulary`.
"""
