"""The `vllm` backend: runs vLLM's engine core step by step in the backend's thread.

    backend    VllmBackend
    engine     start of the engine core: arguments, plugins, errors
    capture    capture of rows and positions inside vLLM
    sessions   prompts whose keys and values stay in the engine for their next tokens

The settings of this backend are `lmpool.workers.backends.settings.VllmSettings`. Only the modules `backend`, `engine`
and `capture` import vllm and torch.
"""
