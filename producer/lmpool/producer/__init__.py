"""The client of a pool: `Producer` for asyncio, and `SyncProducer` for programs without asyncio."""

from lmpool.producer.byte_mass import ByteMass, ByteOptions
from lmpool.producer.metrics import ProducerStats
from lmpool.producer.options import GenerateOptions, PositionOptions, SampleOptions
from lmpool.producer.producer import Producer
from lmpool.producer.sync import SyncProducer, SyncTrie
from lmpool.producer.trie import PooledTrie, TrieOptions
from lmpool.protocol.picks import TopK
from lmpool.protocol.query import Continuation, Predictions

__all__ = [
    "ByteMass",
    "ByteOptions",
    "Continuation",
    "GenerateOptions",
    "PooledTrie",
    "PositionOptions",
    "Predictions",
    "Producer",
    "ProducerStats",
    "SampleOptions",
    "SyncProducer",
    "SyncTrie",
    "TopK",
    "TrieOptions",
]
