"""What a worker has done and how it is: counted, and served over HTTP as metrics and health.

Imports `backend.contract` and the worker's settings.
"""
