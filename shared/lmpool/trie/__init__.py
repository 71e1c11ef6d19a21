"""The prefix tree over a vocabulary, and the kernels that sum up weights below its nodes.

Imports `protocol`, and `vocabulary` and the like beside this folder.
"""
