"""The `vllm` backend: vLLM's engine core, stepped in the backend's thread.

    engine     the settings as vLLM's own arguments, making the engine, and the errors of making it
    capture    the logits processor that takes rows where tokens would be sampled
    positions  what takes what is wanted of positions, from the hidden states of a step
    sessions   prompts whose keys and values the engine holds ready for one more token
    backend    VllmBackend

Its settings are `lmpool.workers.backends.settings.VllmSettings`. vllm and torch are imported by `backend` and what it
needs, never by this file or `sessions`.
"""
