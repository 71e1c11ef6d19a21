"""Counters of a worker, served over HTTP as metrics and health, and traces of its jobs.

This folder imports `execution` and `settings`.
"""
