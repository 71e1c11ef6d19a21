"""What a backend is (`contract`), the thread that it runs in, and the watchdogs of both.

Imports the shared folders only.
"""
