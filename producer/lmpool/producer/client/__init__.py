"""The client's work in one event loop: sessions, pending requests, submission, notifications and queries.

This folder imports the shared folders and `lmpool.producer.metrics`. The files of `lmpool.producer` import it.
"""
