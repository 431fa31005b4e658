"""`python train.py [--operations vanilla,flash]`: train with each operation and compare the curves.

Works as a script and as a module of its package; the work is in `report.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

import attnops

if __package__:
    from .report import run
    from .training import TrainingPlan
else:  # run by its path, as a script: there is no package to import the siblings from
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from byte_language_model.report import run
    from byte_language_model.training import TrainingPlan

__all__ = ["main", "run"]

PLOT = Path("losses.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script and return its exit status: `run`'s, or 2 after a line about an argument that can't be used."""
    options = _parser().parse_args(arguments)
    if options.cpu_devices:
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    # Checked before the training, not after it.
    if options.plot is not None and not has_matplotlib:
        return _fail(f"--plot {options.plot} needs matplotlib, which is not installed: pip install matplotlib")
    if options.plot is not None and not options.plot.parent.is_dir():
        return _fail(f"--plot {options.plot}: there is no folder {options.plot.parent}")
    try:
        return run(
            TrainingPlan(steps=options.steps, seed=options.seed),
            options.operations,
            plot=options.plot or (PLOT if has_matplotlib else None),
            block=options.block,
        )
    except attnops.UnknownOperationError as error:
        return _fail(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a small language model on the text that ships with Python, once with each operation, "
        "and compare the losses.",
    )
    parser.add_argument("--steps", type=_positive, default=TrainingPlan.steps, help="default %(default)s")
    parser.add_argument(
        "--seed",
        type=int,
        default=TrainingPlan.seed,
        help="seed of the first weights and of the batches; default %(default)s",
    )
    parser.add_argument(
        "--operations",
        type=_names,
        default="vanilla,flash",
        help="names, separated by commas; the others are compared with the first; default %(default)s",
    )
    parser.add_argument("--block", type=_positive, help="queries and keys per tile; default: each operation chooses")
    parser.add_argument(
        "--cpu-devices", type=_positive, help="number of CPU devices of JAX; `ring` shards sequences over them"
    )
    parser.add_argument("--plot", type=Path, help=f"file for the curves; default {PLOT}, if matplotlib is installed")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} must be at least 1")
    return value


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} must be different names, separated by commas: vanilla,flash")
    return names


def _fail(message: object) -> int:
    print(message, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
