"""The commands of the serving side: `lmpool up`, `worker` and `trie-worker`, and the process behind them.

Imports all of the serving side; nothing imports it.
"""
