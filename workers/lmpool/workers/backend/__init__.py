"""What a backend is (`contract`), and the thread that it runs in.

Imports the shared folders only.
"""
