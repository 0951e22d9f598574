"""Functions that attack: each ends as its sample says, and main, the neighbours and the executors go on.

Three runs of the whole product over the corpus of the audit: in restricted mode with all samples, in open mode and in a
sandbox with those that must be contained while they run. Every other call is a neighbour that must come out right; then
their probes run as a job, hence a task, of their own. No sample of the corpus needs the sandbox of the operating system
to be contained: what does is refused by the audit, and in open mode not promised.
"""

import contextlib
import json
from pathlib import Path

import pytest

from tests.e2e.conftest import Product, base_folder, need_spawn_mode

SAMPLES = {
    sample["id"]: sample
    for sample in map(
        json.loads,
        (Path(__file__).parents[1] / "audit" / "data" / "corpus.jsonl").read_text().splitlines(),
    )
}
CONTAINED = [name for name, sample in SAMPLES.items() if sample["expect"] == "contained"]
HONEST = [name for name, sample in SAMPLES.items() if sample["expect"] == "ok"]
REFUSED = [name for name, sample in SAMPLES.items() if sample["expect"] == "reject"]
PROBES = [name for name in CONTAINED if "probe" in SAMPLES[name]]

BUDGET_MS = 400
STALL_MS = BUDGET_MS + 1_100
"""The least that the configuration takes for this budget."""
NEIGHBOUR = "def _(n):\n    return {'n': n, 'third': str(Decimal(1) / Decimal(3))}\n"
HELPERS = {
    "neighbour": NEIGHBOUR,
    "child": "def _(p):\n    return [p]\n",
    "adder": "def _(p):\n    return {'sum': p['left'] + p['right']}\n",
    "self": "def _(p):\n    return function.call('self', p)\n",
}

ENDS = {
    "user-error": {"user_error", "load_error", "subcall_failed", "subcall_cycle"},
    "deadline": {"deadline_exceeded"},
    "wedge": {"executor_wedged"},
    "oom": {"memory_exceeded", "executor_lost"},
    "crash": {"executor_lost"},
    "bad-output": {"output_not_serializable", "output_too_large"},
    "harmless": {"ok"},
    "isolated": {"ok"},
}
"""Outcome of the corpus -> status or error kind of the call."""
OTHER_ENDS = {
    "native-crash": {"deadline_exceeded", "user_error"},  # Python 3.12 counts C recursion
    "module-level": {"ok"},  # a sub-call while the module loads is charged to the loading call
    "swallow-cancel": {
        "user_error"
    },  # Python itself minds a generator that goes on when it is closed
    "memory": {"user_error", "memory_exceeded", "deadline_exceeded"},  # as the machine's memory is
}
"""Kind of sample -> further ends that contain it as well."""


def name_of(sample_id):
    return sample_id.replace("-", "_")


def run(product: Product, mode, chosen):
    """Everything in one run; returns how each sample ended, by its id, and the run."""
    calls = []
    for number, sample_id in enumerate(chosen):
        sample = SAMPLES[sample_id]
        args = sample.get("args", [{"id": "1", "rows": []}])
        calls.append({"function": name_of(sample_id), "args": args})
        calls.append({"function": "neighbour", "args": [number]})
    sources = {name_of(sample_id): SAMPLES[sample_id]["source"] for sample_id in chosen}
    probes = {f"{name_of(name)}_probe": SAMPLES[name]["probe"] for name in PROBES}
    product.write(
        NEIGHBOUR,
        calls,
        config=(
            f"functions: {{mode: {mode}}}\n"
            f"dispatcher: {{call_deadline_ms: {BUDGET_MS}, scheduler_stall_timeout_ms: {STALL_MS},"
            " share_results: false}\n"
            "backends: {blockdb: {memory: {t: t.jsonl}}}"
        ),
        children={**HELPERS, **sources, **probes},
    )
    (product.folder / "t.jsonl").write_text('{"id": 1}\n')
    (product.folder / "probes.jsonl").write_text(
        "".join(
            json.dumps({"function": name, "args": [1]}) + "\n"
            for name in [*probes, *probes, "neighbour", "neighbour"]
        )
    )
    config = product.folder / "config.yaml"
    text = config.read_text()
    head = "worker: {default_max_attempts: 1, executor_memory_limit_bytes: 700000000, executor_max_restarts: 100,"
    text = text.replace("worker: {", f"{head} ", 1).replace(
        "report:",
        "  - {name: probes, function: neighbour, calls: probes.jsonl, results: probes_out.jsonl, after: [case]}\n"
        "report:",
    )
    config.write_text(text)
    ended = product.run()
    return dict(zip(chosen, ended.lines()[::2], strict=True)), ended


@pytest.fixture(scope="module")
def products():
    """The ``product`` fixture for a whole module: ``run`` waits for the end, so nothing is left to reap."""
    with contextlib.ExitStack() as folders:

        def make(spawn_mode="process"):
            need_spawn_mode(spawn_mode)
            folder = folders.enter_context(base_folder()) / "p"
            return Product(folder, environment={"EXECUTOR_SPAWN_MODE": spawn_mode})

        yield make


@pytest.fixture(scope="module")
def open_run(products):
    return run(products(), "open", CONTAINED)


@pytest.fixture(scope="module")
def sandbox_run(products):
    return run(products("sandbox"), "open", CONTAINED)


@pytest.fixture(scope="module")
def restricted_run(products):
    return run(products(), "restricted", [*CONTAINED, *HONEST, *REFUSED])


def end_of(record):
    return record["status"] if record["status"] == "ok" else record["error"]["kind"]


def is_refused(record):
    return "refused by the audit" in record.get("error", {}).get("message", "")


def expected_ends(sample):
    outcomes = sample["outcome"].split("-or-")
    return set().union(*(ENDS[outcome] for outcome in outcomes), OTHER_ENDS.get(sample["kind"], ()))


@pytest.mark.parametrize("sample_id", CONTAINED)
def test_in_open_mode_each_sample_ends_as_it_must(open_run, sample_id):
    record = open_run[0][sample_id]
    assert end_of(record) in expected_ends(SAMPLES[sample_id]), record


@pytest.mark.parametrize("sample_id", CONTAINED)
def test_in_a_sandbox_each_sample_ends_as_it_must(sandbox_run, sample_id):
    record = sandbox_run[0][sample_id]
    assert end_of(record) in expected_ends(SAMPLES[sample_id]), record


@pytest.mark.parametrize("sample_id", CONTAINED)
def test_in_restricted_mode_each_sample_ends_as_it_must_or_is_refused(restricted_run, sample_id):
    record = restricted_run[0][sample_id]
    ends = expected_ends(SAMPLES[sample_id])
    assert is_refused(record) or end_of(record) in ends, record


@pytest.mark.parametrize("sample_id", HONEST)
def test_honest_functions_run_in_restricted_mode(restricted_run, sample_id):
    record, sample = restricted_run[0][sample_id], SAMPLES[sample_id]
    if "Table(" in sample["source"]:  # written for stubs: here a key is a dict
        assert record["error"]["message"].startswith("TypeError: Table('t'): a key is a dict")
        return
    assert record["status"] == "ok", record
    assert record["output"] == sample.get("result", record["output"])


@pytest.mark.parametrize("sample_id", REFUSED)
def test_escapes_do_not_run_in_restricted_mode(restricted_run, sample_id):
    assert is_refused(restricted_run[0][sample_id]), restricted_run[0][sample_id]


@pytest.mark.parametrize("mode", ["open_run", "sandbox_run", "restricted_run"])
def test_main_and_all_neighbours_are_unharmed(request, mode):
    _, ended = request.getfixturevalue(mode)
    assert ended.code == 1, ended.text
    assert "Traceback" not in ended.text
    third = "0.3333333333333333333333333333"
    neighbours = ended.lines()[1::2]
    assert [r.get("output") for r in neighbours] == [
        {"n": number, "third": third} for number in range(len(neighbours))
    ]


@pytest.mark.parametrize("mode", ["open_run", "sandbox_run", "restricted_run"])
def test_another_task_finds_nothing_of_them(request, mode):
    _, ended = request.getfixturevalue(mode)
    records = ended.lines("probes_out.jsonl")
    for name, record in zip([*PROBES, *PROBES], records, strict=False):
        probe = SAMPLES[name]
        if name == "pub-task-state-1":  # its state is the task's: it counts on
            assert record["output"] >= probe["probe_result"]
        elif not is_refused(record):
            assert record["output"] == probe["probe_result"], (name, record)
    assert [record["status"] for record in records[-2:]] == ["ok", "ok"]
