"""The `hf` backend: any causal language model of transformers, in one padded forward a step.

    backend   HfBackend
    batching  the prompts of a batch, and how many tokens of each
    forward   one padded forward, and the pool of keys and values of recent prompts that it reuses
    model     the model: loading, checks of its rows, limits, digest of its weights, output head
    adapters  LoRA adapters, loaded by peft

Its settings are `lmpool.workers.backends.settings.HfSettings`. torch and transformers are imported by `backend` and
what it needs, never by this file.
"""
