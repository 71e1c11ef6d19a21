"""The commands of the client side: `lmpool logprobs`, `status`, `top`, `dead`, `queue` and so on.

This package may import all of the client side. Only modules that define commands import it.
"""
