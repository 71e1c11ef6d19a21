"""Where rows live: the cache on the server, and the connection that carries them.

Imports `protocol` and `broker`; imported by producers and workers.
"""
