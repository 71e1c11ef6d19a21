"""The `hf` backend: any causal language model of transformers, in one padded forward a step.

    model     the model: loading, limits, digest of its weights, output head
    forward   one padded forward, logits of the last positions only; which shortcuts give this model right rows
    kv_pool   keys and values of recent prompts, one slot a token, least recently used out first
    batching  which prompts run together, and how much of each
    adapters  LoRA adapters, by peft
    backend   HfBackend

Its settings are `lmpool.workers.backends.settings.HfSettings`. torch and transformers are imported by `backend` and
what it needs, never by this file.
"""
