"""Steps that several kernels have: the denominator, the weights in the backward pass, the gradients of scores."""

from __future__ import annotations

from attnops_triton.flash.plan import LOG2E
from attnops_triton.flash.tile import TileWriter
from attnops_triton.language.source import number


def write_denominator(tile: TileWriter) -> None:
    """Write ``factor``, the reciprocal of the denominator, and add the sinks to ``m`` and ``l``.

    Also writes ``seen``: True for rows that are not fully masked. The other rows have a factor of 0.
    """
    write, plan, scoring = tile.write, tile.plan, tile.plan.scoring
    unit = number(plan.score_unit * LOG2E)
    # The sum decides: a NaN score always makes the sum NaN, but not always the maximum.
    write("seen = l != 0.0", "m = tl.where(seen, m, 0.0)")
    factor = 1 / (1 - scoring.dropout_prob)
    if scoring.sinks:
        write(
            f"given = tl.load({tile.base('sinks', '1')})",
            f"sink = tl.minimum(given * {number(1 / plan.score_unit)}, 3e38)",
            "m_new = tl.maximum(m, sink)",
            f"alpha = tl.exp2((m - m_new) * {unit})",
            f"l = l * alpha + tl.exp2((sink - m_new) * {unit})",
            'l = tl.where((given == given) & (given < float("inf")), l, float("nan"))',
            f"factor = {number(factor)} * alpha",
            "m = m_new",
        )
    else:
        write(f"factor = {number(factor)}")
    write("l = tl.where(seen, l, 1.0)", "factor = tl.where(seen, factor / l, 0.0)")


def recompute_weights(tile: TileWriter, masked: bool, edge: bool, lse: str = "") -> bool:
    """Write ``p`` from the products ``s``. Returns whether ``ok``, the mask of the tile, was written.

    Args:
        tile: the tile.
        masked: whether the mask is applied.
        edge: whether keys beyond the last are masked.
        lse: the name of the variable with the logsumexp to base 2, which broadcasts to the tile; empty if ``m`` and
            ``log2_sum`` hold it.
    """
    scoring, write = tile.plan.scoring, tile.write
    has_ok = masked and tile.allowed(edge)
    if has_ok and scoring.has_fully_masked_tokens and scoring.has_cap_or_bias:
        # Fully masked tokens may hold NaN. Their derivatives would be NaN too, and 0 · NaN is NaN.
        write("s = tl.where(ok, s, 0.0)")
    tile.apply_cap_and_bias()
    if has_ok:
        write('s = tl.where(ok, s, float("-inf"))')
    if lse:
        write(f"p = tl.exp2(s * {number(tile.plan.score_unit * LOG2E)} - {lse})")
    else:
        tile.weights("m", "log2_sum")
    return has_ok


def score_gradients(tile: TileWriter, has_ok: bool, subtract: bool = True) -> None:
    """Write ``ds``, the gradient of the scores, from ``p``, ``dp`` and, with dropout, ``keep``.

    Args:
        tile: the tile.
        has_ok: whether ``ok`` was written.
        subtract: whether to subtract ``delta`` from ``dp``; False if that was done before.
    """
    scoring, write = tile.plan.scoring, tile.write
    by_query = tile.broadcast("q")
    if scoring.dropout_prob:
        write(f"dp = tl.where(keep, dp * {number(1 / (1 - scoring.dropout_prob))}, 0.0)")
    write(f"ds = p * (dp - delta{by_query})" if subtract else "ds = p * dp")
    if has_ok and scoring.has_fully_masked_tokens:
        write("ds = tl.where(ok, ds, 0.0)")
