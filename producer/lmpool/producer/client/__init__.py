"""The parts of a producer that run in one event loop: sessions, pending requests, submission, replies and queries.

The modules of `lmpool.producer` import this folder, which imports `lmpool.producer.metrics` and the shared folders.
"""
