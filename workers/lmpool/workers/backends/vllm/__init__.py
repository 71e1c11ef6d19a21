"""The `vllm` backend: vLLM's engine core, stepped in the backend's thread.

    settings   VllmSettings: what to load and how much of the machine to use
    arguments  the settings as vLLM's own arguments
    engine     making the engine, and the errors of making it
    capture    the logits processor that takes rows where tokens would be sampled
    sessions   prompts whose keys and values the engine holds ready for one more token
    backend    VllmBackend

vllm and torch are imported by `backend` and what it needs, never by this file, `settings` or `sessions`.
"""
