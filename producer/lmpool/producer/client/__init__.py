"""The client's work in one event loop: sessions, pending requests, submission, notifications and queries.

The files of `lmpool.producer` import this folder, which imports `lmpool.producer.metrics` and the shared folders.
"""
