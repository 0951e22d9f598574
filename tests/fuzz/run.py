"""A target under a coverage-guided fuzzer: python -m tests.fuzz.run TARGET [--seconds 600] [--corpus DIR]

Needs atheris (pip install atheris). Ends with the input that broke the target, if one did, in a file of the
current folder: put it into ``REMEMBERED`` of ``test_targets.py`` when the bug is mended.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["blockx", "tests.fuzz.targets"]):
    from tests.fuzz.targets import SEEDS, SOURCE_SEEDS, TARGETS

INPUT_BYTES_MAX = 8_192


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--corpus", help="folder in which interesting inputs are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="blockx-fuzz-") as scratch:
        folder = Path(options.corpus or scratch)
        bytes_seeds = [*SEEDS, *(seed[4:] for seed in SEEDS)]
        seeds = SOURCE_SEEDS if options.target == "audit" else bytes_seeds
        for number, seed in enumerate(seeds):
            (folder / f"seed-{number}").write_bytes(seed)
        settings = [
            f"-max_total_time={options.seconds}",
            f"-max_len={INPUT_BYTES_MAX}",
            "-report_slow_units=60",
            str(folder),
        ]
        atheris.Setup([sys.argv[0], *settings], TARGETS[options.target])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
