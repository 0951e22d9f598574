"""What happens when the calls of one job need more memory than there is?

    perf/limits.sh 2 600M -- python perf/bench_memory.py [--calls 200] [--hold 20] [--limit 160]

A function keeps ``--hold`` MB for good in every tenth of its calls, as a forgotten cache does; each executor
may have ``--limit`` MB. Printed: how the calls ended, how many executors were recycled or killed, and the
highest memory of the group (of all processes where there is no group). Exit code 0 when every call ended once
and succeeded: the guard replaces an executor that has grown before the kernel's limit hits anybody.
"""

import argparse
import sys
import threading
from pathlib import Path

import psutil
from harness import Job, machine, product

KEEPER = """\
KEPT = []


def _(n):
    if n % 10 == 0:
        KEPT.append(bytearray(b"x") * ({hold} << 20))
    return n
"""
SAMPLE_S = 0.05


def peak_mb(pid: int, ended: threading.Event) -> float:
    """The highest sum of PSS of a process and its descendants, in MB, until ``ended``."""
    highest, root = 0, psutil.Process(pid)
    while not ended.wait(SAMPLE_S):
        total = 0
        try:
            for process in [root, *root.children(recursive=True)]:
                lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
                total += next((int(x.split()[1]) for x in lines if x.startswith("Pss:")), 0)
        except (OSError, psutil.NoSuchProcess):
            continue
        highest = max(highest, total)
    return highest / 1_024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--hold", type=int, default=20, help="MB kept by every tenth call")
    parser.add_argument("--limit", type=int, default=160, help="MB an executor may have")
    options = parser.parse_args()
    print(machine())
    worker = (
        f"{{executor_count: 2, executor_memory_limit_bytes: {options.limit << 20},"
        " executor_restart_delay_ms: 0}"
    )
    job = Job("keeper", [f"[{n}]" for n in range(options.calls)])
    functions = {"keeper": KEEPER.format(hold=options.hold)}
    with product(functions, job, worker=worker) as (process, folder):
        ended = threading.Event()
        peaks: list[float] = []
        watcher = threading.Thread(target=lambda: peaks.append(peak_mb(process.pid, ended)))
        watcher.start()
        output, _ = process.communicate()
        ended.set()
        watcher.join()
        results = (folder / "measured-results.jsonl").read_text().splitlines()
    print(output.strip())
    ok = sum('"status":"ok"' in line for line in results)
    print(
        f"\n{ok} of {options.calls} calls succeeded; {options.calls // 10 * options.hold} MB were kept by calls, "
        f"the processes never had more than {peaks[0]:,.0f} MB"
    )
    sys.exit(0 if ok == len(results) == options.calls else 1)


if __name__ == "__main__":
    main()
