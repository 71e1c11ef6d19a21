"""Runs a backend: its interface (`contract`), the prompts in flight, the thread of the backend, and the watchdogs.

Imports only the shared folders.
"""
