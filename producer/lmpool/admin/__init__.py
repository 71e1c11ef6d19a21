"""Inspect and repair a pool: the survey of models and workers, queues, dead letters.

The commands and the web page use this package. The package imports the client side and prints nothing.
"""
