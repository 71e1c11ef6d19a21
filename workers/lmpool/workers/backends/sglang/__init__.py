"""The `sglang` backend: SGLang's own event loop in a thread, touched at two places only.

    settings   SglangSettings: what to load and how much of the machine to use
    options    the settings as SGLang's own options
    launch     from the settings to an engine that runs, and the errors on the way
    scheduler  making SGLang's scheduler and ending it; what changes from release to release
    seams      the two places: requests in, logits out
    engine     the thread that the event loop runs in
    backend    SglangBackend

sglang is imported by `scheduler` and `seams`, which `engine` needs; torch by these, `launch` and `backend`. This file,
`settings` and `options` need neither.
"""
