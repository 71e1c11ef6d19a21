"""The commands for clients of a pool: `lmpool logprobs`, `status`, `top`, `dead`, `queue` and so on.

This package may import all packages of the client side. Only modules that define commands import this package.
"""
