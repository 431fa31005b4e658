"""Kernels in Gluon on a host without a GPU: each partition of warps is a thread, on numpy arrays.

It implements the subset of Gluon that `attnops_triton.flash.hopper` and `attnops_triton.flash.blackwell` use. Products
and copies run when they are waited for, so that numbers are wrong if a kernel reads a buffer before it is ready, or
overwrites it before it is free. Products in tensor memory run in the order in which they were issued. They raise if
their operands changed after that; their results are NaN until they run. If all partitions wait for barriers, they
raise, since none can arrive any more. Shared memory and tensor memory are NaN at first.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from attnops_triton.language.compat import functions, surroundings
from attnops_triton.language.interpreter import undecorated
from attnops_triton.language.simulated_memory import (
    Pointer,
    Shared,
    TensorMap,
    TensorMemory,
    copy,
    elementwise,
    full,
    load,
    maximum,
    move,
    store,
    tensor,
    where,
)
from attnops_triton.language.source import KernelFunction

if TYPE_CHECKING:
    from attnops.typing import NumpyArray

# Whether products in tensor memory run when they are issued rather than when they are waited for. A GPU may do either.
EAGER: Final = False


class TensorProduct:
    """A product in tensor memory, by Blackwell's tensor cores."""

    def __init__(self, a: Shared, b: Shared, sums: TensorMemory, adds: Any) -> None:
        self.a, self.b, self.sums, self.adds = a.array, b.array, sums.array, bool(adds)
        self.read = (self.a, self.b, *[self.sums] * self.adds)
        self.note()

    def note(self) -> None:
        """Keep a copy of the operands."""
        self.issued = [x.tobytes() for x in self.read]

    def check(self) -> None:
        """Check that the operands are as they were when the product was issued.

        Raises:
            RuntimeError: an operand changed since the product was issued: on a GPU it might have run at once.
        """
        if [x.tobytes() for x in self.read] != self.issued:
            raise RuntimeError("an operand was written after a product that reads it was issued")

    def run(self, later: list[TensorProduct]) -> None:
        """Multiply; ``later`` products may add to its sums."""
        self.check()
        after = [x for x in later if any(np.shares_memory(self.sums, operand) for operand in x.read)]
        for x in after:
            x.check()
        self._multiply()
        for x in after:
            x.note()

    def _multiply(self) -> None:
        product = np.matmul(self.a.astype(np.float32), self.b.astype(np.float32))
        self.sums[...] = self.sums + product if self.adds else product


class Product:
    """A product that runs in the background: it reads its operands when it is waited for."""

    def __init__(self, a: Any, b: Shared, sums: Any, adds: bool) -> None:
        self.a, self.b, self.sums, self.adds = a, b, sums, adds
        self.value: Any = None

    def run(self) -> None:
        """Multiply."""
        a = self.a.array if isinstance(self.a, Shared) else self.a
        product = np.matmul(np.asarray(a, np.float32), np.asarray(self.b.array, np.float32))
        sums = self.sums.value if isinstance(self.sums, Product) else self.sums
        self.value = tensor(product + np.asarray(sums)) if self.adds else tensor(product)


class Barriers:
    """Barriers in shared memory, of arrivals and of bytes copied."""

    def __init__(self, machine: Machine, copies: int) -> None:
        self.machine = machine
        self.each = [SimpleNamespace(count=0, pending=0, bytes=0, phase=0, copies=[]) for _ in range(copies)]

    def index(self, i: Any) -> tuple[Machine, SimpleNamespace]:
        """One of them."""
        return self.machine, self.each[int(i)]


class Machine:
    """A program on a streaming multiprocessor."""

    def __init__(self, program: int) -> None:
        self.program = program
        self.changed = threading.Condition()
        self.running = threading.local()
        self.failures: list[BaseException] = []
        # The number of partitions that have not ended, and of those that wait because nothing has changed since they
        # looked.
        self.partitions = 1
        self.waiting: set[int] = set()
        self.issued: list[TensorProduct] = []

    def wake(self) -> None:
        """Let those that wait look again; the caller holds the lock."""
        self.waiting.clear()
        self.changed.notify_all()

    def wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until ``is_over()`` is true.

        Raises:
            TimeoutError: all other partitions wait too, or have ended.
            RuntimeError: another partition failed.
        """
        with self.changed:
            while not is_over():
                if self.failures:
                    raise RuntimeError("another partition failed")
                self.waiting.add(threading.get_ident())
                if len(self.waiting) == self.partitions:
                    raise TimeoutError("a partition waits for a barrier that no other arrives at")
                self.changed.wait()
            if self.failures:
                raise RuntimeError("another partition failed")

    def products(self) -> list[Product]:
        """Those of this partition that were not waited for."""
        if not hasattr(self.running, "products"):
            self.running.products = []
        found: list[Product] = self.running.products
        return found

    def copies(self) -> list[Callable[[], None]]:
        """The copies from shared memory of this partition that were not waited for."""
        if not hasattr(self.running, "copies"):
            self.running.copies = []
        found: list[Callable[[], None]] = self.running.copies
        return found

    def copy(self, target: TensorMap, corner: list[Any], source: Shared) -> None:
        """See Gluon's ``async_store``."""
        self.copies().append(functools.partial(copy, target, corner, source, add=False))

    def add(self, target: TensorMap, corner: list[Any], source: Shared) -> None:
        """See Gluon's ``async_atomic_add``."""
        self.copies().append(functools.partial(copy, target, corner, source, add=True))

    def wait_for_copies(self, outstanding: int) -> None:
        """See Gluon's ``store_wait``."""
        copies = self.copies()
        while len(copies) > outstanding:
            copies.pop(0)()

    def warp_specialize(self, calls: list[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
        """Run partitions until all have ended."""

        def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            try:
                with np.errstate(all="ignore"):
                    function(*arguments)
            except BaseException as error:
                with self.changed:
                    self.failures.append(error)
            finally:
                with self.changed:
                    self.partitions -= 1
                    self.wake()

        self.partitions = len(calls)
        threads = [threading.Thread(target=run, args=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.partitions = 1
        if self.failures:
            raise self.failures[0]

    def multiply(self, a: Any, b: Shared, sums: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        """See Gluon's ``warpgroup_mma``."""
        product = Product(a, b, sums, use_acc)
        self.products().append(product)
        return product

    def wait_for_products(self, outstanding: int, deps: list[Any]) -> Any:
        """See Gluon's ``warpgroup_mma_wait``."""
        products = self.products()
        while len(products) > outstanding:
            products.pop(0).run()
        found = tuple(x.value if isinstance(x, Product) else x for x in deps)
        return found if len(found) > 1 else found[0]

    def issue(
        self,
        a: Shared,
        b: Shared,
        sums: TensorMemory,
        *,
        use_acc: Any,
        mbarriers: list[tuple[Machine, SimpleNamespace]],
    ) -> None:
        """See Gluon's ``tcgen05_mma``."""
        with self.changed:  # otherwise another partition may run an earlier product while this one is copied
            product = TensorProduct(a, b, sums, use_acc)
            used = (x for before in self.issued for x in (*before.read, before.sums))
            if not product.adds and not any(np.shares_memory(product.sums, x) for x in used):
                product.sums[...] = np.nan  # it may run at once
            self.issued.append(product)
            for barrier in mbarriers:
                self._arrive_after(product, barrier)

    def commit(self, barrier: tuple[Machine, SimpleNamespace]) -> None:
        """See Gluon's ``tcgen05_commit``."""
        with self.changed:
            self._arrive_after(self.issued[-1] if self.issued else None, barrier)

    def _arrive_after(self, product: TensorProduct | None, barrier: tuple[Machine, SimpleNamespace]) -> None:
        """Arrive at a barrier once a product and those before it have run; whoever waits for the barrier runs them."""

        def arrive() -> None:
            while product in self.issued:
                self.issued.pop(0).run(self.issued)
            _arrive(barrier)

        barrier[1].copies.append(arrive)
        if EAGER:
            while barrier[1].copies:
                barrier[1].copies.pop(0)()
        self.wake()

    def language(self) -> dict[str, Any]:
        """The objects that kernels refer to, by their names."""
        from triton import language as tl
        from triton.experimental.gluon import language as gl

        replaced = dict(
            program_id=lambda axis: tensor(np.int32(self.program)), load=load, store=store, where=where,
            full=lambda shape, value, dtype, layout=None: tensor(full(shape, value, dtype)),
            arange=lambda start, stop, layout=None: tensor(np.arange(start, stop, dtype=np.int32)),
            minimum=lambda a, b: tensor(np.minimum(a, b)), maximum=maximum,
            reduce=lambda x, axis, combine: combine(x, axis), convert_layout=lambda x, layout: x,
            static_range=range, multiple_of=lambda x, n: x, warp_specialize=self.warp_specialize, barrier=lambda: None,
            inline_asm_elementwise=move,
            allocate_shared_memory=lambda dtype, shape, layout: Shared(full(shape, np.nan, dtype)),
            **{name: elementwise(getattr(np, name)) for name in ("exp2", "log2", "exp", "log", "abs", "sqrt", "sin",
                                                                  "cos", "floor", "ceil")},
        )  # fmt: skip
        language = SimpleNamespace(**vars(tl) | vars(gl) | replaced)
        barriers = SimpleNamespace(
            allocate_mbarrier=lambda batch: Barriers(self, batch),
            init=_init,
            wait=_wait,
            arrive=_arrive,
            expect=_expect,
        )
        maps = SimpleNamespace(
            async_load=_async_load, async_store=self.copy,
            async_atomic_add=self.add, store_wait=self.wait_for_copies,
        )  # fmt: skip
        return {
            "tl": language, "gl": language, "tma": maps, "mbarrier": barriers, "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait_for_products, "fence_async_shared": lambda: None,
            "TensorMemoryLayout": lambda block, col_stride: None, "tcgen05_mma": self.issue,
            "tcgen05_commit": self.commit,
            "allocate_tensor_memory": lambda dtype, shape, layout: TensorMemory(full(shape, np.nan, dtype)),
            "pause": lambda: time.sleep(0.2),  # by which tests hold a partition up
            "largest": lambda x, axis: tensor(np.fmax.reduce(x, axis)),
            "total": lambda x, axis: tensor(np.sum(x, axis)),
        }  # fmt: skip


def simulate(
    kernel: KernelFunction,
    integers: tuple[int, ...],
    programs: int,
    arrays: list[NumpyArray],
    results: list[NumpyArray],
) -> None:
    """Run a kernel, which writes to ``results``.

    Raises:
        TimeoutError: all partitions wait.
    """
    blocks = dict(kernel.blocks)
    values: dict[str, Any] = {
        name: TensorMap(x, blocks[name]) if name in blocks else Pointer(x.reshape(-1))
        for name, x in zip(kernel.pointers, (*arrays, *results), strict=True)
    }
    values |= {name: tensor(np.int32(x)) for name, x in zip(kernel.integers, integers, strict=True)}
    given, outer = kernel.arguments(values), surroundings(kernel)
    with np.errstate(all="ignore"):
        for program in range(programs):
            found = functions(kernel.name, kernel.text, outer | Machine(program).language())
            found[kernel.name](*(undecorated(x, found) for x in given))


def _async_load(source: TensorMap, corner: list[Any], barrier: tuple[Machine, SimpleNamespace], result: Shared) -> None:
    machine, state = barrier

    def copy() -> None:
        result.array[...] = 0
        for i, elements in source.rows(corner):
            result.array[i] = source.array[elements]
        state.bytes -= result.array.nbytes
        _settle(machine, state)

    with machine.changed:
        state.copies.append(copy)
        machine.wake()


def _init(barrier: tuple[Machine, SimpleNamespace], count: int) -> None:
    barrier[1].count = barrier[1].pending = count


def _arrive(barrier: tuple[Machine, SimpleNamespace]) -> None:
    machine, state = barrier
    with machine.changed:
        state.pending -= 1
        _settle(machine, state)


def _expect(barrier: tuple[Machine, SimpleNamespace], size: int) -> None:
    machine, state = barrier
    with machine.changed:
        state.bytes += size
        state.pending -= 1
        _settle(machine, state)


def _settle(machine: Machine, state: SimpleNamespace) -> None:
    if state.pending < 0:
        raise RuntimeError("a barrier had more arrivals than it counts in a phase")
    if state.pending == 0 and state.bytes == 0 and not state.copies:
        state.phase, state.pending = state.phase + 1, state.count
        machine.wake()


def _wait(barrier: tuple[Machine, SimpleNamespace], parity: Any) -> None:
    """Wait for the end of the phase with this parity; the phase before the first one counts as ended."""
    machine, state = barrier

    def is_over() -> bool:
        while state.copies:
            state.copies.pop(0)()
        return bool(state.phase % 2 != int(parity))

    machine.wait(is_over)
