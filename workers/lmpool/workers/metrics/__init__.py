"""What a worker has done: counted, told over HTTP, logged.

Imports `backend` and `settings`.
"""
