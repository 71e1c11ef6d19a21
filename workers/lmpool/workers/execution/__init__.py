"""Runs a backend: its interface (`contract`), the prompts in flight, the thread of the backend, and the watchdogs.

This folder imports only packages of the repository's folder `shared`.
"""
