"""Benchmarks of operations and peers: each is checked against the oracle, and timed only if it is right."""

from attnops_testing.bench.caches import CacheCase, reading
from attnops_testing.bench.case import Case, Refused, packed_documents
from attnops_testing.bench.contenders import find, operation
from attnops_testing.bench.machine import (
    default_memory_limit,
    describe_machine,
    installed_versions,
    one_line,
    peak_rss,
)
from attnops_testing.bench.measure import Measurement, in_turns, measure
from attnops_testing.bench.peers import PEERS, missing_peers
from attnops_testing.bench.program import Contender, Ready
from attnops_testing.bench.tokens import Tokens, ragged

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
    "in_turns",
    "installed_versions",
    "measure",
    "missing_peers",
    "one_line",
    "operation",
    "packed_documents",
    "peak_rss",
    "ragged",
    "reading",
]
