"""A page pool as lists in plain Python, the contents of its pages, and random operations."""

from __future__ import annotations

from typing import Any

import numpy as np

P, PAGE, R, M, N = 9, 3, 5, 4, 5
OPERATIONS = ("reserve", "release", "truncate", "fork")


class Model:
    """What a pool must do, row by row, and the tokens that each row holds."""

    def __init__(self) -> None:
        self.tables: list[list[int]] = [[] for _ in range(R)]
        self.free = list(range(P - 1, -1, -1))
        self.references = [0] * P
        self.tokens: list[list[int]] = [[] for _ in range(R)]
        self.ok = [True] * R
        self.clock = 0

    def take(self) -> int:
        page = self.free.pop()
        self.references[page] = 1
        return page

    def drop(self, pages: list[int]) -> list[int]:
        freed = []
        for page in pages:
            self.references[page] -= 1
            assert self.references[page] >= 0
            if self.references[page] == 0:
                freed.append(page)
        return freed

    def reserve(self, lengths: list[int]) -> None:
        for r, length in enumerate(lengths):
            more = max(0, -(-length // PAGE) - len(self.tables[r]))
            self.ok[r] = length >= 0 and more <= len(self.free) and more + len(self.tables[r]) <= M
            if self.ok[r]:
                self.tables[r] += [self.take() for _ in range(more)]
                for _ in range(length - len(self.tokens[r])):
                    self.clock += 1
                    self.tokens[r].append(self.clock)

    def release(self, rows: list[bool]) -> None:
        freed = []
        for r in range(R):
            if rows[r]:
                freed += self.drop(self.tables[r])
                self.tables[r], self.tokens[r] = [], []
        self.free += sorted(freed)
        self.ok = [True] * R

    def truncate(self, lengths: list[int]) -> None:
        for r, length in enumerate(lengths):
            self.ok[r] = length >= 0
            if not 0 <= length < len(self.tokens[r]):
                continue
            kept = -(-length // PAGE)
            beyond = self.tables[r][kept:]
            copied = length % PAGE > 0 and self.references[self.tables[r][kept - 1]] > 1
            if copied and not self.free and all(self.references[page] > 1 for page in beyond):
                self.ok[r] = False
                continue
            self.free += self.drop(beyond)
            self.tables[r], self.tokens[r] = self.tables[r][:kept], self.tokens[r][:length]
            if copied:
                self.drop(self.tables[r][-1:])
                self.tables[r][-1] = self.take()

    def fork(self, source: list[int], target: list[int]) -> None:
        self.ok = [True] * R
        for s, t in zip(source, target, strict=True):
            if s == -1 or t == -1 or not 0 <= t < R:
                continue
            self.ok[t] = s != t and 0 <= s < R and self.ok[s]
            if s == t or not 0 <= s < R:
                continue
            self.free += self.drop(self.tables[t])
            self.tables[t], self.tokens[t] = [], []
            full, rest = divmod(len(self.tokens[s]), PAGE)
            self.ok[t] = self.ok[t] and (rest == 0 or len(self.free) > 0)
            if self.ok[t]:
                self.tokens[t] = list(self.tokens[s])
                self.tables[t] = self.tables[s][:full]
                for page in self.tables[t]:
                    self.references[page] += 1
                if rest:
                    self.tables[t].append(self.take())


class Contents:
    """The tokens in the pages, written as `PagePool` tells: by its tables and copies alone."""

    def __init__(self) -> None:
        self.pages = [[0] * PAGE for _ in range(P)]

    def copy(self, source: list[int], target: list[int], references: list[int]) -> None:
        assert all(references[t] > 0 for t in target if t >= 0), "a page is copied that no row holds"
        assert [s >= 0 for s in source] == [t >= 0 for t in target]
        targets = [t for t in target if t >= 0]
        assert len(set(targets)) == len(targets)
        read = [list(self.pages[s]) for s in source]
        for t, tokens in zip(target, read, strict=True):
            if t >= 0:
                self.pages[t] = tokens

    def append(self, table: list[int], references: list[int], first: int, tokens: list[int]) -> None:
        for i, token in enumerate(tokens, first):
            page = table[i // PAGE]
            assert references[page] == 1
            self.pages[page][i % PAGE] = token

    def read(self, table: list[int], length: int) -> list[int]:
        return [self.pages[table[i // PAGE]][i % PAGE] for i in range(length)]


def draw(count: int, seed: int = 0) -> dict[str, Any]:
    """Random operations and their arguments, wrong ones among them."""
    rng = np.random.default_rng(seed)
    operation = rng.choice(4, count, p=[0.4, 0.1, 0.2, 0.3])
    longer = np.where(rng.random((count, R)) < 0.6, 0, rng.integers(-1, M * PAGE + 3, (count, R)))
    shorter = np.where(rng.random((count, R)) < 0.6, M * PAGE, rng.integers(-1, M * PAGE, (count, R)))
    ids = np.where(rng.random((2, count, N)) < 0.3, -1, rng.integers(0, R, (2, count, N)))
    ids = np.where(rng.random((2, count, N)) < 0.03, rng.choice([-7, R, R + 9], (2, count, N)), ids)
    numbers = {
        "lengths": np.where((operation == 0)[:, None], longer, shorter),
        "source": ids[0],
        "target": ids[1],
    }
    return {name: x.astype(np.int32) for name, x in numbers.items()} | {
        "operation": operation.astype(np.int32),
        "rows": rng.random((count, R)) < 0.4,
    }
