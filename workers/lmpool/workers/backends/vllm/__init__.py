"""The `vllm` backend: vLLM's engine core, stepped in the backend's thread.

    backend    VllmBackend
    engine     start of the engine core: arguments, plugins, errors
    capture    capture of rows and positions inside vLLM
    sessions   prompts whose keys and values stay in the engine for their next tokens

Its settings are `lmpool.workers.backends.settings.VllmSettings`. Only `backend`, `engine` and `capture` import vllm and
torch.
"""
