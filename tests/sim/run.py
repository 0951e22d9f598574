"""Run a range of worlds: ``python -m tests.sim.run --seeds 1000 --start 0``; exit code 1 if one failed.

A failing world prints the command that replays it. ``--stop`` ends at the first; ``--random 20`` adds that
many seeds from a random, printed start, so that continuous integration sees new worlds each time.
"""

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable

from loguru import logger

from tests.sim.world import World


def run(seeds: Iterable[int], *, stop: bool) -> tuple[int, list[int], Counter[str]]:
    """How many worlds ran, which failed, and what happened in them."""
    done, failed = 0, []
    seen: Counter[str] = Counter()
    for seed in seeds:
        done += 1
        world = World(seed)
        try:
            world.run()
        except Exception:  # noqa: BLE001 whatever a world dies of, the others are run, too
            failed.append(seed)
            sys.stdout.write(traceback.format_exc(limit=-3))
            sys.stdout.write(
                f"seed {seed} failed; replay it: SIM_SEED={seed} python -m pytest -x tests/sim\n\n"
            )
            if stop:
                break
        seen.update(world.counts)
        seen.update(world.core.counters)
        seen.update(world.adapter.counters)
        seen["calls"] += sum(len(job.results) for job in world.jobs)
    return done, failed, seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=300)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="what happened, by name")
    options = parser.parse_args()
    logger.remove()
    began = time.monotonic()
    seeds = list(range(options.start, options.start + options.seeds))
    if options.random:
        start = 1_000_000 + time.monotonic_ns() % 1_000_000_000
        sys.stdout.write(f"{options.random} more worlds from seed {start}\n")
        seeds += range(start, start + options.random)
    done, failed, seen = run(seeds, stop=options.stop)
    seconds = time.monotonic() - began
    sys.stdout.write(
        f"{done} worlds, {seen['calls']:,} calls, {seen['turns']:,} turns in {seconds:.0f} s "
        f"({done / seconds:.0f} worlds/s); failed: {failed or 'none'}\n"
    )
    if options.verbose:
        for name, count in sorted(seen.items()):
            sys.stdout.write(f"{count:10,} {name}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
