"""The `sglang` backend: SGLang's own event loop in a thread, touched at two places only.

    launch     from the settings to an engine that runs, SGLang's own options, and the errors on the way
    engine     SGLang's scheduler in its thread: made, given requests, asked for logits, and ended
    positions  a look at the logits of all of a prompt's positions
    backend    SglangBackend

Its settings are `lmpool.workers.backends.settings.SglangSettings`. sglang is imported by `engine` only, which is
imported when the settings have been checked; torch by all three, never by this file.
"""
