"""The `sglang` backend: runs SGLang's own event loop in a thread, with its input and its output redirected.

    backend    SglangBackend; adapters in the form that SGLang loads; SGLang's options, from the user and the backend
    engine     SGLang's scheduler in its thread, its requests, and the capture of rows and positions

The settings of this backend are `lmpool.workers.backends.settings.SglangSettings`. Importing `backend` imports torch;
only a `SglangBackend` that starts imports `engine`, and with it sglang.
"""
