"""A producer's life in one event loop: what it has asked for, sends and receives.

Imports the shared folders and `deadline`; imported by the files beside this folder.
"""
