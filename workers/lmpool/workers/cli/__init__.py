"""The commands of the serving side: `lmpool up`, `worker` and `trie-worker`, and the processes that they run.

This folder imports all of the serving side, and no other folder imports it.
"""
