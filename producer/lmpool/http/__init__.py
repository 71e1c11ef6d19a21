"""`lmpool http`: an HTTP gateway to a pool, for programs that speak the protocols of OpenAI, vLLM, TRL or SGLang.

The gateway is a client of the pool like any other. A pool can have any number of gateways, because a gateway keeps
nothing but open connections, caches and counters.
"""
