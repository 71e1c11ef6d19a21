"""`lmpool web`: a live page of the pool, and an explorer of its models.

The service is a separate process that reads the server as `lmpool status` does and sends requests as any client. The
pages are files in `static`; the pages need no build step and load nothing from other hosts.
"""
