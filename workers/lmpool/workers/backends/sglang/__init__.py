"""The `sglang` backend: SGLang's own event loop in a thread, with its input and its output redirected.

    backend    SglangBackend
    launch     start of an engine: options, adapters, errors
    engine     SGLang's scheduler in its thread, its requests, and the capture of rows and positions

Its settings are `lmpool.workers.backends.settings.SglangSettings`. Only `engine` imports sglang, and `launch` imports
`engine` after it has checked the settings. All three import torch.
"""
