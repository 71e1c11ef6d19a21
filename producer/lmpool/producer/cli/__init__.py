"""The commands of the client side: `lmpool logprobs`, `status`, `top`, `dead`, `queue` and so on.

Imports all of the client side; nothing imports it.
"""
