"""Whole jobs against a dispatcher that answers in the same thread; the files are compared whole."""

import errno
import json
import os

import pytest

from blockx.dispatcher.commands import EmitResult, ReturnCredit, StopProduction
from blockx.dispatcher.model import CallError, TaskEnd
from blockx.errors import ErrorKind, UsageError
from blockx.jobs import output_file
from blockx.jobs.run import check_jobs

JOB = {
    "name": "j",
    "function": "f",
    "calls": "calls.jsonl",
    "results": "out/results.jsonl",
    "output": "rows.jsonl",
    "failures": "failures.jsonl",
}
COSTS = '"cpu_us":1,"io_us":2,"subcall_us":3,"sleep_us":4,"queue_us":5'
NO_COSTS = '"cpu_us":0,"io_us":0,"subcall_us":0,"sleep_us":0,"queue_us":0'


def ok_line(index, output, function="f", job="j"):
    return (
        f'{{"index":{index},"call_id":"{job}/{index}","function":"{function}","status":"ok",'
        f'"output":{output},"attempts":1,"moves":0,"cached":false,{COSTS}}}\n'
    )


def echo(call):
    """Output = the arguments, as they came."""
    return call.args


def statuses(folder, name="out/results.jsonl"):
    records = [json.loads(line) for line in folder.read(name).splitlines()]
    assert [r["index"] for r in records] == list(range(len(records)))
    return [r["status"] if r["status"] == "ok" else r["error"]["kind"] for r in records]


def test_a_job_leaves_exactly_the_files_of_the_design(folder, fake_dispatch):
    folder.add_function("broken", "def _(:\n")
    folder.write(
        "calls.jsonl",
        '{"args":[115792089237316195423570985008687907853269984665640564039457584007913129639935]}\n'
        "[2.50]\n"
        "[\n"
        '{"function":"nope","args":{"a":1}}\n'
        "5\n",
    )
    answers = {
        0: b'{"v":115792089237316195423570985008687907853269984665640564039457584007913129639935}',
        1: b'[{"a":1.50},{"b":null}]',
        4: CallError(
            ErrorKind.USER_ERROR,
            "ValueError: no",
            stack="Traceback",
            local_vars={"x": "1"},
            reason="why",
        ),
    }
    dispatch = fake_dispatch(lambda call: answers[call.index])
    run = folder.jobs_run(dispatch, JOB)
    assert run.run() == 1
    bad = '{"kind":"invalid_call","message":"calls.jsonl:3: Input data was truncated","stack":"","locals":{}}'
    nope = (
        '{"kind":"function_not_found","message":"no function \'nope\'","stack":"","locals":{},'
        '"args":"[{\\"a\\":1}]"}'
    )
    user = (
        '{"kind":"user_error","message":"ValueError: no","stack":"Traceback","locals":{"x":"1"},'
        '"reason":"why","args":"[5]"}'
    )
    early = f'"attempts":0,"moves":0,"cached":false,{NO_COSTS}}}\n'
    assert folder.read("out/results.jsonl") == (
        ok_line(0, answers[0].decode())
        + ok_line(1, answers[1].decode())
        + f'{{"index":2,"call_id":"j/2","function":"f","status":"failed","error":{bad},{early}'
        + f'{{"index":3,"call_id":"j/3","function":"nope","status":"failed","error":{nope},{early}'
        + '{"index":4,"call_id":"j/4","function":"f","status":"failed",'
        + f'"error":{user},"attempts":1,"moves":0,"cached":false,{COSTS}}}\n'
    )
    assert folder.read("rows.jsonl") == (
        '{"v":115792089237316195423570985008687907853269984665640564039457584007913129639935}\n'
        '{"a":1.50}\n{"b":null}\n'
    )
    assert folder.read("failures.jsonl") == (
        f'{{"function":"nope","args":[{{"a":1}}],"call_id":"j/3","error":{nope}}}\n'
        f'{{"function":"f","args":[5],"call_id":"j/4","error":{user}}}\n'
    )
    assert folder.files() == ["calls.jsonl", "failures.jsonl", "rows.jsonl"]
    [report] = run.reports
    assert report.as_dict() == {
        "name": "j",
        "calls": 5,
        "ok": 2,
        "failed": 3,
        "ran": 3,
        "cached": 0,
        "singleflight": 0,
        "not_run": 2,
        "executed": 3,
        "retries": 0,
        "moves": 0,
        "rows": 3,
        "subcalls": dict.fromkeys(report.as_dict()["subcalls"], 0),
        "rpc": {},
    }
    assert dispatch.log == [
        ("open", "j@r1"),
        ("submit", 1, [0, 1, 4]),
        ("end_production",),
        ("remove", "j@r1"),
    ]
    progress = folder.progress
    assert (progress.produced, progress.total, progress.done, progress.failed) == (5, 5, 5, 3)


def test_failures_are_a_call_list_that_fails_the_same_way_again(folder, fake_dispatch):
    folder.write("calls.jsonl", "[1]\n[2]\n")
    failing = fake_dispatch(
        lambda call: CallError(ErrorKind.USER_ERROR, "no") if call.index else b"{}"
    )
    assert folder.jobs_run(failing, JOB).run() == 1
    again = fake_dispatch(echo)
    job = {"name": "again", "calls": "failures.jsonl", "results": "again.jsonl"}
    assert folder.jobs_run(again, job).run() == 0
    assert folder.read("again.jsonl") == ok_line(0, "[2]", job="again")


def test_an_empty_list_leaves_empty_files(folder, fake_dispatch):
    folder.write("calls.jsonl", "\n")
    assert folder.jobs_run(fake_dispatch(echo), JOB).run() == 0
    assert [folder.read(n) for n in ("out/results.jsonl", "rows.jsonl", "failures.jsonl")] == [
        ""
    ] * 3


@pytest.mark.parametrize("memory", [0, 64 * 1024 * 1024])
def test_results_are_in_list_order_whatever_order_calls_end_in(folder, fake_dispatch, memory):
    folder.write("calls.jsonl", "".join(f"[{n}]\n" for n in range(100)))
    dispatch = fake_dispatch(echo, order=lambda calls: calls[::-1])
    run = folder.jobs_run(
        dispatch, JOB, stream_build={"batch_max_rows": 7}, run={"reorder_memory_bytes": memory}
    )
    assert run.run() == 0
    want = "".join(ok_line(n, f"[{n}]") for n in range(100))
    assert folder.read("out/results.jsonl") == want
    assert folder.files() == ["calls.jsonl", "failures.jsonl", "rows.jsonl"]


@pytest.mark.parametrize("memory", [0, 64 * 1024 * 1024])
def test_one_slow_call_does_not_stall_the_job(folder, fake_dispatch, memory):
    """The first stream batch settles last: all others go their way meanwhile, one credit after the other."""
    folder.write("calls.jsonl", "".join(f"[{n}]\n" for n in range(50)))
    dispatch = fake_dispatch(echo, before_batch=lambda batch_id: [] if batch_id == 1 else None)
    end_production = dispatch.end_production

    def settle_first_batch(task_id):
        results = [EmitResult(task_id, dispatch.result(call)) for call in first]
        dispatch.port.deliver([*results, ReturnCredit(task_id, 1)])
        end_production(task_id)

    first = []
    submit = dispatch.submit

    def remember_first(task_id, batch_id, calls):
        if batch_id == 1:
            first.extend(calls)
        submit(task_id, batch_id, calls)

    dispatch.submit, dispatch.end_production = remember_first, settle_first_batch
    run = folder.jobs_run(
        dispatch, JOB, stream_build={"batch_max_rows": 5}, run={"reorder_memory_bytes": memory}
    )
    assert run.run() == 0
    assert [entry[1] for entry in dispatch.log if entry[0] == "submit"] == list(range(1, 11))
    assert folder.read("out/results.jsonl") == "".join(ok_line(n, f"[{n}]") for n in range(50))


def test_no_more_stream_batches_are_out_than_there_are_credits(folder, fake_dispatch):
    folder.write("calls.jsonl", "[1]\n" * 10)
    run = None
    out = []

    def before_batch(batch_id):
        out.append(batch_id)
        if len(out) == 3:  # all credits are out, and none comes back
            run.request_stop("SIGINT")
        return []

    dispatch = fake_dispatch(echo, before_batch=before_batch)
    run = folder.jobs_run(
        dispatch, JOB, stream_build={"batch_max_rows": 1, "max_outstanding_batches": 3}
    )
    run.run()
    assert out == [1, 2, 3]


def test_jobs_run_one_after_the_other_and_a_later_one_reads_what_an_earlier_wrote(
    folder, fake_dispatch
):
    folder.write("calls.jsonl", "[{}]\n")
    dispatches = []

    class Fresh:
        """A new fake for each task."""

        def keep_pins(self, task_id, pins, on_pins):
            dispatches.append(fake_dispatch(lambda call: call.args[1:-1]))

        def __getattr__(self, name):
            return getattr(dispatches[-1], name)

    second = {"name": "second", "function": "f", "calls": "rows.jsonl", "results": "second.jsonl"}
    run = folder.jobs_run(Fresh(), JOB, second)
    check_jobs(run_loaded(folder, second), run_loaded(folder, second).config.jobs, folder.view())
    assert run.run() == 0
    assert [report.name for report in run.reports] == ["j", "second"]
    assert folder.read("second.jsonl") == ok_line(0, "{}", job="second")
    assert folder.notices() == [
        "job j: new, calls.jsonl -> out/results.jsonl, rows.jsonl, failures.jsonl",
        "job second: new, rows.jsonl -> second.jsonl",
    ]


def run_loaded(folder, second):
    return folder.loaded(JOB, second)


# ---- stopping --------------------------------------------------------------------------------------


def stop_in_batch(folder, fake_dispatch, times):
    """A run of which the first stream batch is half done when it is stopped."""
    folder.write("calls.jsonl", "[1]\n" * 6)
    folder.write("rows.jsonl", "of an earlier run")
    run = None

    def before_batch(batch_id):
        for _ in range(times):
            run.request_stop("SIGINT")
        return []

    dispatch = fake_dispatch(echo, before_batch=before_batch)
    run = folder.jobs_run(
        dispatch,
        JOB,
        {**JOB, "name": "later"},
        stream_build={"batch_max_rows": 3, "max_outstanding_batches": 1},
    )
    return run, dispatch


def test_a_stopped_job_leaves_nothing_and_later_jobs_do_not_run(folder, fake_dispatch):
    run, dispatch = stop_in_batch(folder, fake_dispatch, 1)
    run.run()
    assert run.was_stopped
    assert [(r.name, r.complete) for r in run.reports] == [("j", False)]
    assert dispatch.log[-3:] == [("end_production",), ("cancel", True), ("remove", "j@r1")]
    assert folder.files() == ["calls.jsonl", "rows.jsonl"]
    assert [file.name for file in (folder.path / "out").iterdir()] == ["results.jsonl.journal"]
    assert folder.read("rows.jsonl") == "of an earlier run"


def test_a_second_stop_waits_for_nothing(folder, fake_dispatch):
    run, dispatch = stop_in_batch(folder, fake_dispatch, 2)
    dispatch.finish = lambda *_: None  # calls that never end
    run.run()
    assert run.was_stopped
    assert dispatch.log[-3:] == [("cancel", True), ("cancel", False), ("remove", "j@r1")]
    assert folder.files() == ["calls.jsonl", "rows.jsonl"]


def test_a_stop_is_heard_while_a_list_of_nothing_but_bad_lines_is_read(folder, fake_dispatch):
    folder.write("calls.jsonl", "[\n" * 1_000)
    run = folder.jobs_run(fake_dispatch(echo), JOB, stream_build={"batch_max_rows": 1})
    say = folder.progress.say

    def say_and_stop(sentence):
        say(sentence)
        if sentence.startswith("job j: new"):
            run.request_stop("SIGINT")

    folder.progress.say = say_and_stop
    run.run()
    assert run.was_stopped
    assert folder.progress.produced == 1


def test_after_the_grace_time_running_calls_are_cancelled(folder, fake_dispatch):
    folder.write("calls.jsonl", "[1]\n")
    run = None
    dispatch = fake_dispatch(echo, before_batch=lambda _batch_id: run.request_stop("SIGINT") or [])
    finish = dispatch.finish
    dispatch.finish = lambda end, error=None: (
        finish(end, error) if dispatch.log[-1] == ("cancel", False) else None
    )
    run = folder.jobs_run(dispatch, JOB, run={"grace_ms": 1})
    run.run()
    assert run.was_stopped
    assert [e for e in dispatch.log if e[0] == "cancel"] == [("cancel", True), ("cancel", False)]


def test_a_dispatcher_that_is_gone_ends_the_run_with_its_error(folder, fake_dispatch):
    folder.write("calls.jsonl", "[1]\n")
    run = None
    dispatch = fake_dispatch(
        echo, before_batch=lambda _batch_id: run.fail(RuntimeError("actor died")) or []
    )
    run = folder.jobs_run(dispatch, JOB)
    with pytest.raises(RuntimeError, match="actor died"):
        run.run()
    assert folder.files() == ["calls.jsonl"]


# ---- early ends ------------------------------------------------------------------------------------


def test_fail_fast_gives_every_call_a_record_and_failures_hold_what_is_left(folder, fake_dispatch):
    folder.write("calls.jsonl", "".join(f"[{n}]\n" for n in range(5)))
    dispatch = None

    def before_batch(batch_id):
        if batch_id == 2:  # the core stops the task by itself
            error = CallError(ErrorKind.USER_ERROR, "ValueError: no")
            dispatch.answer = lambda _call: error
            return
        return

    dispatch = fake_dispatch(echo, before_batch=before_batch)
    submit = dispatch.submit

    def submit_then_stop(task_id, batch_id, calls):
        submit(task_id, batch_id, calls)
        if batch_id == 2:
            dispatch.port.deliver([StopProduction(task_id, "fail_fast")])
            dispatch.finish(TaskEnd.STOPPED)

    dispatch.submit = submit_then_stop
    run = folder.jobs_run(
        dispatch,
        {**JOB, "failure_policy": "fail_fast"},
        stream_build={"batch_max_rows": 1, "max_outstanding_batches": 1},
    )
    assert run.run() == 1
    assert not run.was_stopped
    assert statuses(folder) == ["ok", "user_error", *["task_cancelled"] * 3]
    left = [json.loads(line)["args"] for line in folder.read("failures.jsonl").splitlines()]
    assert left == [[1], [2], [3], [4]]
    counts = run.reports[0].calls
    assert (counts.calls, counts.ok, counts.failed, counts.ran, counts.not_run) == (5, 1, 4, 2, 3)


def test_fail_fast_also_stops_at_a_call_that_is_never_dispatched(folder, fake_dispatch):
    folder.write("calls.jsonl", "[0]\n[\n[2]\n")
    dispatch = fake_dispatch(echo)
    run = folder.jobs_run(
        dispatch,
        {**JOB, "failure_policy": "fail_fast"},
        stream_build={"batch_max_rows": 1, "max_outstanding_batches": 1},
    )
    assert run.run() == 1
    assert statuses(folder) == ["ok", "invalid_call", "task_cancelled"]
    assert [entry[0] for entry in dispatch.log] == [
        "open",
        "submit",
        "end_production",
        "cancel",
        "remove",
    ]


def test_above_its_share_of_failures_a_job_stops_at_a_call_that_is_never_dispatched(
    folder, fake_dispatch
):
    folder.write("calls.jsonl", "[\n[1]\n[2]\n[\n[\n[5]\n")
    job = {
        **JOB,
        "failure_policy": "stop_above_ratio",
        "failure_ratio_max": 0.5,
        "failure_calls_min": 2,
    }
    batches = {"batch_max_rows": 1, "max_outstanding_batches": 1}
    run = folder.jobs_run(fake_dispatch(echo), job, stream_build=batches)
    assert run.run() == 1
    invalid = "invalid_call"
    assert statuses(folder) == [invalid, "ok", "ok", invalid, invalid, "task_cancelled"]


def test_a_job_whose_outputs_grow_past_the_limit_leaves_none(folder, fake_dispatch):
    folder.write("calls.jsonl", "[1]\n[2]\n")
    dispatch = None

    def before_batch(_batch_id):
        dispatch.finish(TaskEnd.OUTPUT_BYTES_EXCEEDED)
        return []

    dispatch = fake_dispatch(echo, before_batch=before_batch)
    run = folder.jobs_run(dispatch, JOB, dispatcher={"max_collected_output_bytes": 1_000})
    assert run.run() == 1
    assert folder.files() == ["calls.jsonl"]
    assert run.reports[0].error == (
        "results passed dispatcher.max_collected_output_bytes (1,000); outputs are discarded"
    )


def test_a_full_disk_fails_its_job_alone(folder, fake_dispatch, monkeypatch):
    folder.write("calls.jsonl", "[1]\n")
    dispatch = fake_dispatch(echo)
    run = folder.jobs_run(dispatch, JOB)

    fsync = os.fsync

    def full(fd):
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".partial"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(output_file.os, "fsync", full)
    assert run.run() == 1
    assert folder.files() == ["calls.jsonl"]
    assert run.reports[0].error == (
        f"{folder.path}/out/results.jsonl: cannot be written: No space left on device (errno 28);"
        " free the disk or name another file, then run again"
    )
    assert dispatch.log[-1] == ("remove", "j@r1")


def test_what_vanished_since_the_check_fails_its_job_alone(folder, fake_dispatch):
    gone = {"name": "gone", "function": "f", "calls": "none.jsonl"}
    folder.write("calls.jsonl", "[1]\n")
    run = folder.jobs_run(fake_dispatch(echo), gone, JOB)
    assert run.run() == 1
    [first, second] = run.reports
    assert first.error == (
        f"{folder.path}/none.jsonl: the call list cannot be opened: No such file or directory"
    )
    assert second.is_right


# ---- sentences -------------------------------------------------------------------------------------


def test_what_gives_no_row_is_said_once_a_function(folder, fake_dispatch):
    folder.write("calls.jsonl", "[1]\n[2]\n[3]\n[4]\n[5]\n")
    answers = [b"3", b"null", b"[]", b'[{"a":1},2]', b'"x"']
    run = folder.jobs_run(fake_dispatch(lambda call: answers[call.index]), JOB)
    assert run.run() == 0
    assert folder.read("rows.jsonl") == ""
    assert run.reports[0].rows == 0
    assert folder.notices()[1:] == [
        "job j: f returned 3, which gives no row; return a dict, a list of dicts, or None"
    ]


def test_a_function_that_does_not_load_is_said_once_and_lines_that_are_no_calls_are_counted(
    folder, fake_dispatch
):
    folder.add_function("broken", "def _(:\n")
    folder.write("calls.jsonl", '{"function":"broken","args":1}\n' * 3 + "[\n{\n")
    run = folder.jobs_run(fake_dispatch(echo), JOB, stream_build={"batch_max_rows": 1})
    assert run.run() == 1
    _first, load, malformed = folder.notices()
    assert load.startswith("job j: broken does not load, its calls fail: ")
    assert malformed.startswith("job j: 2 malformed lines in the call list;")


def test_files_of_an_earlier_run_are_named_in_the_first_line(folder, fake_dispatch):
    folder.write("rows.jsonl", "")
    run = folder.jobs_run(
        fake_dispatch(lambda _call: b"{}"),
        {"name": "j", "function": "f", "calls": [1], "output": "rows.jsonl"},
    )
    assert run.run() == 0
    assert folder.notices() == [
        "job j: new, 1 calls in the configuration -> rows.jsonl, replaces rows.jsonl"
    ]


# ---- before anything runs --------------------------------------------------------------------------


def test_mistakes_that_can_be_known_are_all_told_before_anything_runs(folder):
    folder.write("file", "")
    folder.write("calls.jsonl", "")
    (folder.path / "folder.jsonl").mkdir()
    loaded = folder.loaded(
        {"name": "a", "function": "g", "calls": "none.jsonl", "results": "file/r.jsonl"},
        {"name": "b", "function": "f", "calls": "calls.jsonl", "output": "folder.jsonl"},
    )
    with pytest.raises(UsageError) as caught:
        check_jobs(loaded, loaded.config.jobs, folder.view())
    base = folder.path
    assert str(caught.value).splitlines() == [
        "job a: no function 'g'",
        f"job a: {base}/none.jsonl: the call list cannot be opened: No such file or directory",
        f"{base}/file/r.jsonl: cannot be written: a part of its folder's path is a file; name another"
        " file, or see to the folder's permissions",
        f"{base}/folder.jsonl: cannot be written: it is a folder; name a file in it",
    ]
    assert folder.files() == ["calls.jsonl", "file"]
