"""What each mechanism and each rounding is worth to a trained nano, on held-out text.

`python -m engine.training.effects --work DIR [--before-last-part] [--windows N|all] [--variants NAME …]
[--recall] [--processes 2] [--save] [--json]`. The loss of the same windows with one thing changed, pair by
pair, with standard errors over windows; and, since they tell smaller changes, the divergence from the
unchanged model's distribution and how often the likeliest token stays. It reads the training's float32
weights, of which each rounding can be told apart: those of `training.safetensors`, or those from before the
last part, which have not learnt to bear rounding. `--save` keeps the table in the folder for the model card.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.training.checkpoint_effects import NAMES, Checkpoint, Extent, keep_table, measure_checkpoint
from engine.training.nano import BEFORE_LAST_PART
from engine.training.options import at_least, count_of
from engine.training.paired import Effect


def line(e: Effect) -> str:
    """For people."""
    return (
        f"{e.name:44} {e.nats.value:+.4f} ± {e.nats.error:.4f} nat, divergence {e.divergence.value:.5f} "
        f"± {e.divergence.error:.5f}, same token {e.agreement:.4f}"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.training.effects", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--work", type=Path, required=True, help="the training's folder")
    parser.add_argument("--before-last-part", action="store_true", help=f"the weights of {BEFORE_LAST_PART}/")
    parser.add_argument(
        "--windows", type=count_of, default=64, help="of 1,024 held-out tokens, evenly spread, or all"
    )
    parser.add_argument("--variants", nargs="+", choices=NAMES, default=NAMES, help="these alone")
    parser.add_argument("--recall", action="store_true", help="the indexer's, beside them")
    parser.add_argument("--processes", type=at_least(1), default=2, help="of one thread each")
    parser.add_argument("--save", action="store_true", help="keep the table in the folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    options = parser.parse_args(arguments)
    checkpoint = Checkpoint(options.work, options.before_last_part)
    extent = Extent(tuple(options.variants), options.windows, options.recall)
    table = measure_checkpoint(checkpoint, extent, options.processes)
    if table is None:
        sys.stderr.write(f"{checkpoint.place}: no checkpoint; train first: python -m engine.training.nano\n")
        return 2
    if options.save:
        keep_table(checkpoint, extent, table)
    if options.json:
        print(msgspec.json.encode(table).decode())
    else:
        print(f"after {table.seen:,} tokens", *map(line, table.effects), sep="\n")
        if table.recall is not None:
            print(f"indexer's recall {table.recall.value:.3f} ± {table.recall.error:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
