"""The `sglang` backend: runs SGLang's own event loop in a thread, and redirects the loop's input and output.

    backend    SglangBackend; conversion of adapters for SGLang; SGLang's options, from the user and the backend
    follower   the process of a rank above 0, if the model is spread over several processes
    head       the output head, which turns hidden states into logits
    engine     SGLang's scheduler in its thread, its requests, and the capture of rows and positions

The settings of this backend are `lmpool.workers.backends.settings.SglangSettings`. Importing `backend` imports torch;
only a `SglangBackend` that starts imports `engine`, which imports sglang.
"""
