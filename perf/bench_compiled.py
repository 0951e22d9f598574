"""What does the compiled build give? The product from the source and compiled, in turns.

    make build/compiled && .venv/bin/python perf/bench_compiled.py [--reps 5] [--works noop,nested,latency,reads]

CPU of all processes of the product during the measured job, without the node of ``reads``: a busy machine disturbs it
less than a rate. ``latency`` is time, of one call at a time. A ratio is the median of those within a repetition.
"""

import argparse
import os
from statistics import median as middle

import bench_reads
import bodies
from harness import COMPILED_VARIABLE, Job, Measures, machine, median, ratios, run_product
from peers import CALLS, run_blockx

READING_CALLS = 5_000
INFLIGHT = 512
WARM_UP_CALLS = 200
WORKS = {
    "noop": "us of CPU a call",
    "nested": "us of CPU a parent",
    "latency": "us at p50",
    "reads": "us of CPU a read",
}
BUILDS = {"source": "0", "compiled": "1"}


def measure(work: str, node_port: int) -> Measures:
    """One run of the product."""
    if work == "reads":
        return {"us": bench_reads.run_blockx(INFLIGHT, node_port, READING_CALLS)["cpu_us"]}
    if work == "latency":
        return {"us": run_blockx(work, CALLS[work], 1)["p50_us"]}
    calls = [f'[{{"block": {n}}}]' for n in range(CALLS[work] + WARM_UP_CALLS)]
    job = Job(work, calls[WARM_UP_CALLS:], calls[:WARM_UP_CALLS])
    done = run_product(bodies.functions(1, ""), job, dispatcher="{task_max_inflight_calls: 1024}")
    return {"us": done.cpu_s * 1e6 / CALLS[work]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--reps", type=int, default=5, help="repetitions (default 5)")
    parser.add_argument("--works", default=",".join(WORKS), help="comma-separated")
    options = parser.parse_args()
    works = options.works.split(",")
    if unknown := set(works) - WORKS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(WORKS)}")
    print(machine())
    with bench_reads.node(batches=True) as port:
        for work in works:
            runs: dict[str, list[Measures]] = {build: [] for build in BUILDS}
            for _ in range(options.reps):
                for build, value in BUILDS.items():
                    os.environ[COMPILED_VARIABLE] = value
                    runs[build].append(measure(work, port))
            found = ratios(runs["compiled"], runs["source"], "us")
            print(
                f"{work:8} {WORKS[work]:20} source {median(runs['source'], 'us'):7.1f}"
                f"  compiled {median(runs['compiled'], 'us'):7.1f}"
                f"  ratio {middle(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
