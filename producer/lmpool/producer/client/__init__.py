"""The client's work in one event loop: sessions, pending requests, submission, notifications and queries.

Imports the shared folders and `lmpool.producer.metrics`; imported by the files of the folder above.
"""
