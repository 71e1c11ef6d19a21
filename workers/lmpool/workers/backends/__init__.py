"""The backends, a folder or a file each, and what they share. Only they import an engine.

Imports `backend`; nothing but the entry points of the package names a backend.
"""
