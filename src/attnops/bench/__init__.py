"""Operations and peers side by side: each is checked against the oracle, and only what is right is timed."""

from attnops.bench.caches import CacheCase, reading
from attnops.bench.case import Case, Refused, packed_documents
from attnops.bench.contenders import find, operation
from attnops.bench.machine import default_memory_limit, describe_machine, peak_rss
from attnops.bench.measure import Measurement, measure
from attnops.bench.peers import PEERS, missing_peers
from attnops.bench.program import Contender, Ready
from attnops.bench.tokens import Tokens, ragged

__all__ = [
    "PEERS",
    "CacheCase",
    "Case",
    "Contender",
    "Measurement",
    "Ready",
    "Refused",
    "Tokens",
    "default_memory_limit",
    "describe_machine",
    "find",
    "measure",
    "missing_peers",
    "operation",
    "packed_documents",
    "peak_rss",
    "ragged",
    "reading",
]
