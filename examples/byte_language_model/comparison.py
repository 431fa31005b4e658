"""Do two curves agree to rounding? And how much may rounding make them differ?

Training amplifies rounding: if two float32 programs sum in different orders, their losses differ more at later steps,
so that no fixed bound is right for every number of steps. A control measures the effect: the reference with keys summed
in the opposite order (`attention.packed_in_reverse`). An operation agrees if its difference from the reference is at
most a factor times the control's. Only the first steps, before rounding is amplified, have a fixed bound.

Measured on a CPU, max |difference| from vanilla:

==============================================  =============  ============
attention                                       first 20       all steps
==============================================  =============  ============
300 steps of the default plan
  the control                                   4.8e-7         8.3e-7
  flash in tiles of 64                          4.8e-7         9.5e-7
300 steps, other weights, rows not shuffled
  the control                                   7.2e-7         1.9e-6
  flash                                         4.8e-7         2.6e-6
  flash in tiles of 64                          4.8e-7         3.8e-6
160 steps of the tests' small plan, 2–3 seeds
  the control, sdpa, flash, flash in tiles      0 – 9.5e-7     4.8e-7 – 9.5e-7
  queries 0.1 % too large                       2.7e-5, 4.2e-5 4.2e-5, 7.6e-5
  q, k and v rounded to bfloat16                1.0e-4, 2.2e-4 2.2e-4
  documents not kept apart                      1.2e-2, 1.4e-2 1.3e-2, 1.8e-2
==============================================  =============  ============
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Losses = npt.NDArray[np.float32]  # [steps]

EARLY_STEPS = 20
# Losses are float32 and about 6 at first, so that the smallest possible difference is 4.8e-7. This is ten times that,
# and a fifth of the effect of the smallest mistake that was tried.
EARLY_BOUND = 5e-6
# Operation and control are two samples of the same kind of rounding; the largest of 300 differences varies by a small
# factor between them.
FACTOR = 10.0
# A control that differs by more than this explains nothing.
LATE_BOUND = 1e-3


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The difference of a curve from the reference's, and the allowed difference."""

    early: float  # max |difference| over the first `EARLY_STEPS` steps
    largest: float  # over all steps
    allowed: float  # the largest value that `largest` may have

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference. NaN does not agree."""
        return self.early <= EARLY_BOUND and self.largest <= self.allowed


def difference(losses: Losses, reference: Losses) -> npt.NDArray[np.float64]:
    """|difference| at each step, [steps]."""
    return np.abs(losses.astype(np.float64) - reference.astype(np.float64))


def compare(losses: Losses, reference: Losses, control: Losses) -> Comparison:
    """Compare a curve with the reference's; ``control`` is the reference's curve with other rounding errors."""
    distance = difference(losses, reference)
    rounding = difference(control, reference).max()
    return Comparison(
        early=float(distance[:EARLY_STEPS].max()),
        largest=float(distance.max()),
        allowed=float(np.clip(FACTOR * rounding, EARLY_BOUND, LATE_BOUND)),  # a NaN stays one, and allows nothing
    )
