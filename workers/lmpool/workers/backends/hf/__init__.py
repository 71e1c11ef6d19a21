"""The `hf` backend: serves any causal language model of transformers, with one padded forward per step.

    backend   HfBackend
    batching  choice of the prompts of a batch, and of the number of tokens of each prompt
    forward   one padded forward, and the KV pool, which matches prompts' prefixes with cached keys and values
    model     the model: loading, checks of its rows, limits, digest of its weights, output head
    adapters  LoRA adapters, loaded by peft

The settings of this backend are `lmpool.workers.backends.settings.HfSettings`. Importing this package does not import
torch or transformers; importing `backend` does.
"""
