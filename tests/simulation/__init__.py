"""A whole pool in one process with virtual time: every run is drawn from a seed and can be repeated.

`python -m tests.simulation --seed N` runs one seed and prints its log. docs/design/promises.md says what is checked.
"""
