"""The `vllm` backend: runs vLLM's engine core step by step in the backend's thread.

    backend    VllmBackend
    engine     start of the engine core (arguments, plugins, errors), and capture of rows and positions inside it
    sessions   prompts whose keys and values stay in the engine for their next tokens

The settings of this backend are `lmpool.workers.backends.settings.VllmSettings`. Only the modules `backend` and
`engine` import vllm and torch.
"""
