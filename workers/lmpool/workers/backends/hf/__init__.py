"""The `hf` backend: any causal language model of transformers, in one padded forward a step.

    settings      HfSettings: what to load and how much of the machine to use
    loading       the model, its limits and the errors of loading it
    revision      a digest of the weights
    forward       one padded forward, logits of the last position only
    self_check    which shortcuts give this model right rows, tried at load
    prefix_slots  which prefixes the KV pool holds, least recently used out first
    kv_pool       keys and values of recent prompts, one slot a token
    batching      which prompts run together
    backend       HfBackend

torch and transformers are imported by `backend` and what it needs, never by this file or `settings`.
"""
