"""A job that was stopped goes on; a finished one is left alone; a changed one is refused, by name."""

import json

import pytest

from blockx.dispatcher.commands import EmitResult, FinishTask, ReturnCredit
from blockx.dispatcher.model import CallCounts, CallError, TaskEnd
from blockx.errors import ErrorKind, UsageError
from blockx.jobs import resume
from blockx.jobs.choice import Choice, Where
from blockx.jobs.run import check_jobs

JOB = {
    "name": "j",
    "function": "f",
    "calls": "calls.jsonl",
    "results": "results.jsonl",
    "output": "rows.jsonl",
    "failures": "failures.jsonl",
}
OUTPUTS = ["failures.jsonl", "results.jsonl", "rows.jsonl"]


class Script:
    """Runs of one job in one folder, each with a dispatcher of its own."""

    def __init__(self, folder, fake_dispatch, calls=6):
        self.folder = folder
        self.fake = fake_dispatch
        self.ran = []
        folder.write("calls.jsonl", "".join(f"[{n}]\n" for n in range(calls)))

    def run(self, *, stop_after=None, failing=(), job=JOB, order=list, **flags):
        """One run; ``stop_after``: that many calls end, then SIGINT comes. (exit code, first line)."""
        self.ran = []
        run = None

        def answer(call):
            self.ran.append(call.index)
            if call.index in failing:
                return CallError(ErrorKind.USER_ERROR, f"ValueError: {call.index}")
            return b'{"n":%b}' % call.args[1:-1]

        dispatch = self.fake(answer, order=order)
        if stop_after is not None:
            dispatch.submit = lambda task_id, batch_id, calls: self._stop_in(
                run, dispatch, calls[:stop_after]
            )
        rows_max = {"batch_max_rows": flags.pop("rows_max", 8_192)}
        section = flags.pop("sections", {})
        run = self.folder.jobs_run(
            dispatch, job, choice=Choice(**flags), stream_build=rows_max, **section
        )
        before = len(self.folder.progress.notices)
        code = run.run()
        self.dispatch, self.report = dispatch, run.reports[0]
        notices = self.folder.notices()[before:]
        return code, notices[0]

    def _stop_in(self, run, dispatch, calls):
        results = [EmitResult("j@r1", dispatch.result(call)) for call in calls]
        dispatch.port.deliver(results)
        run.request_stop("SIGINT")

    def statuses(self):
        records = [json.loads(line) for line in self.folder.read("results.jsonl").splitlines()]
        assert [r["index"] for r in records] == list(range(len(records)))
        return "".join("." if r["status"] == "ok" else "x" for r in records)


@pytest.fixture
def script(folder, fake_dispatch):
    return Script(folder, fake_dispatch)


def outputs(folder):
    return {name: folder.read(name) for name in OUTPUTS}


# ---- stopped and resumed ---------------------------------------------------------------------------


def test_a_stopped_job_goes_on_where_it_was_and_its_outputs_are_as_if_it_had_not_been(
    script, folder
):
    script.run(failing={1}, fresh=True)
    whole, whole_report = outputs(folder), script.report.as_dict()
    script.run(stop_after=3, failing={1}, fresh=True)
    assert folder.files() == ["calls.jsonl", *OUTPUTS]
    assert outputs(folder) == whole  # of the run before
    code, line = script.run(failing={1})
    assert line == (
        "job j: resumed 3 of 6 (stopped by SIGINT); to begin anew:"
        " blockx --config config.yaml --job j --fresh"
    )
    assert (code, script.ran) == (1, [3, 4, 5])
    assert outputs(folder) == whole
    assert script.report.as_dict() == {**whole_report, "resumed": 3}


def test_it_may_be_stopped_again_and_again_and_in_any_order_of_calls(script, folder):
    ran = []
    for _ in range(6):
        script.run(stop_after=1, rows_max=2, order=lambda calls: calls[::-1])
        ran += script.ran
    assert sorted(ran) == [0, 1, 2, 3, 4, 5]
    code, _ = script.run()
    assert (code, script.ran, script.statuses()) == (0, [], "......")


def test_calls_that_were_given_up_by_the_stop_are_not_finished(script, folder):
    def cancelled(run, dispatch, calls):
        error = CallError(ErrorKind.TASK_CANCELLED, "the task was cancelled")
        dispatch.answer = lambda _call: error
        dispatch.port.deliver([EmitResult("j@r1", dispatch.result(call)) for call in calls])
        run.request_stop("SIGINT")

    script._stop_in = cancelled
    script.run(stop_after=4)
    code, line = script.run()
    assert line.startswith("job j: resumed 0 of 6")
    assert (code, script.statuses()) == (0, "......")


def test_a_killed_run_is_called_killed(script, folder):
    script.run(stop_after=3)
    journal = folder.path / "results.jsonl.journal"
    data = journal.read_bytes()
    journal.write_bytes(data[: data.rindex(b"E\x00\x00\x00")])  # no word about the end
    assert script.run()[1].startswith("job j: resumed 3 of 6 (killed); ")


def test_damaged_bytes_at_the_end_are_told_and_run_again(script, folder):
    script.run(stop_after=3)
    journal = folder.path / "results.jsonl.journal"
    journal.write_bytes(journal.read_bytes()[:-5])
    code, line = script.run()
    assert "damaged bytes at the journal's end dropped" in line
    assert (code, script.ran, script.statuses()) == (0, [3, 4, 5], "......")


def test_malformed_lines_are_judged_anew_in_each_run(script, folder):
    folder.write("calls.jsonl", "[0]\n[\n[2]\n[3]\n")
    script.run(stop_after=2)
    code, line = script.run()
    assert line.startswith("job j: resumed 2 of 4")
    assert (code, script.ran, script.statuses()) == (1, [3], ".x..")


def test_fresh_begins_anew(script):
    script.run(stop_after=3)
    code, line = script.run(fresh=True)
    assert line.startswith("job j: new (--fresh), calls.jsonl -> ")
    assert (code, script.ran) == (0, [0, 1, 2, 3, 4, 5])


def test_pinned_blocks_are_handed_out_and_in(script):
    script.run(stop_after=0)

    def stop_with_pins(run, dispatch, calls):
        dispatch.on_pins("dev", {"latest": [7, "0xa"]})
        dispatch.on_pins("dev", {"9": [9, "0xb"]})
        run.request_stop("SIGINT")

    script._stop_in = stop_with_pins
    script.run(stop_after=0)
    assert script.dispatch.pins == {}
    script.run()
    assert script.dispatch.pins == {"dev": {"latest": [7, "0xa"], "9": [9, "0xb"]}}


def test_fail_fast_stops_at_a_failure_of_the_earlier_run(script, folder):
    job = {**JOB, "failure_policy": "fail_fast"}
    script.run(stop_after=2, failing={1}, job=job)
    code, _ = script.run(job=job, rows_max=1)
    assert (code, script.statuses()) == (1, ".xxxxx")
    assert script.ran == []


def test_a_job_over_its_output_limit_leaves_nothing_to_resume(script, folder, fake_dispatch):
    dispatch = fake_dispatch(lambda _call: b"{}")
    dispatch.end_production = lambda task_id: dispatch.finish(TaskEnd.OUTPUT_BYTES_EXCEEDED)
    assert folder.jobs_run(dispatch, JOB).run() == 1
    assert script.run()[1].startswith("job j: new, ")


def test_without_a_journal_nothing_is_left_and_nothing_resumed(script, folder):
    off = {"run": {"journal": False}}
    script.run(stop_after=3, sections=off)
    assert not (folder.path / "results.jsonl.journal").exists()
    code, line = script.run(sections=off)
    assert (code, script.ran) == (0, [0, 1, 2, 3, 4, 5])
    assert line.startswith("job j: new, ")


def test_a_job_without_files_has_its_journal_beside_the_configuration(script, folder):
    job = {"name": "j", "function": "f", "calls": "calls.jsonl"}
    script.run(stop_after=3, job=job)
    assert (folder.path / "j.journal").exists()
    assert script.run(job=job)[1].startswith("job j: resumed 3 of 6")
    assert script.ran == [3, 4, 5]


def test_a_second_run_of_the_same_job_is_refused_before_anything_runs(script, folder):
    from blockx.jobs.journal import Journal

    held = Journal.open(folder.path / "results.jsonl.journal")
    loaded = folder.loaded(JOB)
    with pytest.raises(UsageError, match="another run is at work on this job"):
        check_jobs(loaded, loaded.config.jobs, folder.view())
    code, _ = script.run()
    assert (code, script.report.complete) == (1, False)
    assert "another run is at work" in script.report.error
    held.close()


# ---- finished --------------------------------------------------------------------------------------


def test_a_finished_job_is_skipped_and_keeps_its_numbers_and_its_exit_code(script, folder):
    script.run(failing={2})
    first = script.report.as_dict()
    code, line = script.run()
    assert line == (
        "job j: finished, 1 calls failed; to run it again:"
        " blockx --config config.yaml --job j --retry-failed"
    )
    assert (code, script.ran, script.report.as_dict()) == (1, [], first)
    script.run(fresh=True)
    assert script.run() == (
        0,
        "job j: finished, all calls are ok; to run it again:"
        " blockx --config config.yaml --job j --fresh",
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda f: f.add_function("f", "def _(*args):\n    return 1\n"),
            "function f has changed",
        ),
        (lambda f: f.write("calls.jsonl", "[0]\n[7]\n"), "the call list has changed"),
        (lambda f: (f.path / "rows.jsonl").unlink(), "rows.jsonl is missing"),
        (lambda f: f.write("rows.jsonl", "mine\n"), "rows.jsonl was changed"),
    ],
)
def test_a_finished_job_begins_anew_when_something_has_changed_and_says_what(
    script, folder, change, why
):
    script.run()
    change(folder)
    code, line = script.run()
    assert line.startswith(f"job j: new (since the finished run {why}), ")
    assert code == 0
    assert script.ran[:2] == [0, 1]


def test_a_function_that_a_call_reached_counts_as_much_as_the_one_of_the_list(script, folder):
    folder.add_function("child", "def _():\n    return 1\n")
    digest = folder.view().get("child").digest

    def reach_and_stop(run, dispatch, calls):
        dispatch.port.reached("child", digest)
        dispatch.port.deliver([EmitResult("j@r1", dispatch.result(call)) for call in calls])
        run.request_stop("SIGINT")

    script._stop_in = reach_and_stop
    script.run(stop_after=2)
    folder.add_function("other", "def _():\n    return 2\n")  # nobody reached it
    folder.add_function("child", "def _():\n    return 2\n")
    code, line = script.run()
    assert code == 1
    assert line == (
        "job j: not resumed: 2 of 6 calls are finished (stopped by SIGINT), but function child has changed;"
        " to keep them and go on with what is now: blockx --config config.yaml --job j --resume-anyway;"
        " to begin anew: blockx --config config.yaml --job j --fresh"
    )
    code, line = script.run(resume_anyway=True)
    assert line.startswith(
        "job j: resumed 2 of 6 (stopped by SIGINT, function child has changed); "
    )
    assert (code, script.ran) == (0, [2, 3, 4, 5])


# ---- a changed list --------------------------------------------------------------------------------


def test_the_first_finished_call_that_has_changed_is_named_by_its_line(script, folder):
    script.run(stop_after=3)
    folder.write("calls.jsonl", "[0]\n\n[1]\n[7]\n[3]\n[4]\n[5]\n")
    code, line = script.run()
    assert (code, script.ran) == (1, [])
    assert "but the call list has changed, first at calls.jsonl:4 (call 2); to keep" in line
    code, line = script.run(resume_anyway=True)
    assert (code, script.ran) == (0, [2, 3, 4, 5])
    assert '{"n":7}' in folder.read("rows.jsonl")


def test_lines_behind_the_last_finished_call_may_change(script, folder):
    script.run(stop_after=3)
    folder.write("calls.jsonl", "[0]\n[1]\n[2]\n[9]\n")
    code, line = script.run()
    assert line.startswith("job j: resumed 3 of 4")
    assert (code, script.ran) == (0, [3])
    assert folder.read("rows.jsonl") == '{"n":0}\n{"n":1}\n{"n":2}\n{"n":9}\n'


def test_a_list_that_is_shorter_than_what_is_finished_is_refused(script, folder):
    script.run(stop_after=3)
    folder.write("calls.jsonl", "[0]\n[1]\n")
    code, line = script.run()
    assert code == 1
    assert "the call list has only 2 calls now, and call 2 is finished" in line
    code, _ = script.run(resume_anyway=True)
    assert (code, folder.read("rows.jsonl")) == (0, '{"n":0}\n{"n":1}\n')


def test_a_changed_list_is_known_again_in_the_run_after(script, folder):
    script.run(stop_after=3)
    folder.write("calls.jsonl", "[0]\n[1]\n[7]\n[3]\n[4]\n[5]\n")
    script.run(stop_after=1, resume_anyway=True)
    assert script.ran == [2]
    code, line = script.run()
    assert line.startswith("job j: resumed 3 of 6 (stopped by SIGINT); ")
    assert (code, script.ran) == (0, [3, 4, 5])


def test_another_default_function_or_kind_of_output_leaves_only_the_new_beginning(script, folder):
    folder.add_function("g", "def _(*args):\n    return {}\n")
    script.run(stop_after=3)
    for job, why in (
        ({**JOB, "function": "g"}, "the job's function was f, and is g"),
        ({**JOB, "output": "rows.csv"}, "output is of another kind of file"),
    ):
        code, line = script.run(job=job, resume_anyway=True)
        assert code == 1
        assert f"but {why}; to begin anew: " in line


def test_calls_of_the_configuration_resume_like_those_of_a_file(script, folder):
    job = {**JOB, "calls": [[0], [1], [2]]}
    script.run(stop_after=1, job=job)
    assert script.run(job=job)[1].startswith("job j: resumed 1 of 3")
    assert script.ran == [1, 2]


# ---- the flags -------------------------------------------------------------------------------------


def test_failed_calls_run_again_and_are_merged_by_index(script, folder):
    script.run(failing={1, 4})
    assert script.statuses() == ".x..x."
    code, line = script.run(failing={4}, retry_failed=True)
    assert line.startswith("job j: resumed 6 of 6 (finished, 2 failed calls); ")
    assert (code, script.ran, script.statuses()) == (1, [1, 4], "....x.")
    assert len(folder.read("failures.jsonl").splitlines()) == 1
    code, _ = script.run(retry_failed=True)
    assert (code, script.ran, script.statuses()) == (0, [4], "......")
    assert script.run(retry_failed=True) == (0, "job j: finished, no call failed")


def test_failed_calls_may_run_again_with_a_mended_function(script, folder):
    script.run(failing={1})
    folder.add_function("f", "def _(*args):\n    return {'mended': True}\n")
    code, line = script.run(retry_failed=True)
    assert "(finished, 1 failed calls; function f has changed)" in line
    assert (code, script.ran, script.statuses()) == (0, [1], "......")


def test_a_retry_that_is_stopped_loses_nothing(script, folder):
    script.run(failing={1, 4})
    whole = outputs(folder)
    script.run(stop_after=1, retry_failed=True)
    assert script.ran == [1]
    assert outputs(folder) == whole
    code, _ = script.run(retry_failed=True)
    assert (code, script.ran, script.statuses()) == (0, [4], "......")


def test_only_failed_leaves_the_rest_for_later(script, folder):
    script.run(stop_after=3, failing={1})
    code, _ = script.run(only_failed=True)
    assert (code, script.ran, script.report.left) == (0, [1], 3)
    assert not (folder.path / "results.jsonl").exists()
    code, _ = script.run()
    assert (code, script.ran, script.statuses()) == (0, [3, 4, 5], "......")


def test_a_limited_run_leaves_its_records_for_a_look_and_the_next_one_goes_on(script, folder):
    code, _ = script.run(limit=2)
    assert (code, script.ran, script.report.left) == (0, [0, 1], 4)
    assert [name for name in folder.files() if "jsonl" in name] == [
        "calls.jsonl",
        *(f"{name}.partial" for name in OUTPUTS),
    ]
    assert folder.read("rows.jsonl.partial") == '{"n":0}\n{"n":1}\n'
    script.run(where=Where("index>3"))
    assert script.ran == [4, 5]
    code, line = script.run()
    assert line.startswith("job j: resumed 4 of 6 (some calls were left out)")
    assert (code, script.ran, script.statuses()) == (0, [2, 3], "......")
    assert folder.files() == ["calls.jsonl", *OUTPUTS]


def test_a_limit_does_not_read_the_whole_list(script, folder):
    script.run(limit=2, rows_max=2)
    assert script.folder.progress.produced == 2
    assert script.report.left == 4


def test_an_expression_about_the_status_runs_finished_calls_again(script, folder):
    script.run(failing={5})
    code, _ = script.run(where=Where("status==ok and index<2"), failing={5})
    assert (code, script.ran, script.statuses()) == (1, [0, 1], ".....x")


def test_failed_calls_of_no_run_are_a_mistake(script):
    code, line = script.run(retry_failed=True)
    assert code == 1
    assert line.startswith("job j: there is no earlier run of which calls could have failed")


def test_of_a_job_with_all_calls_ok_only_outputs_are_kept(script):
    script.run()
    code, line = script.run(where=Where("status==ok"))
    assert code == 1
    assert "of such a job only the outputs are kept; to run it anew: " in line


# ---- numbers ---------------------------------------------------------------------------------------


def test_sub_calls_of_a_stopped_run_are_counted(script, folder):
    def stop(run, dispatch, calls):
        dispatch.end_production = lambda task_id: None
        dispatch.cancel = lambda task_id, drain: dispatch.port.deliver(
            [
                *(EmitResult("j@r1", dispatch.result(call)) for call in calls),
                ReturnCredit("j@r1", 1),
                FinishTask("j@r1", TaskEnd.CANCELLED, None, dispatch.calls, CallCounts(calls=7)),
            ]
        )
        run.request_stop("SIGINT")

    script._stop_in = stop
    script.run(stop_after=2)
    script.run()
    assert script.report.subcalls.calls == 7
    assert (script.report.calls.calls, script.report.calls.ran) == (6, 6)


def test_at_most_so_many_calls_of_a_job_are_in_flight(script, folder, fake_dispatch):
    groups = []
    run = None
    dispatch = fake_dispatch(lambda _call: b"{}")

    def submit(_task_id, _batch_id, calls):
        groups.append([call.index for call in calls])
        if len(groups) == 2:
            run.request_stop("SIGINT")

    dispatch.submit = submit
    run = folder.jobs_run(dispatch, {**JOB, "max_inflight": 2})
    run.run()
    assert groups == [[0], [1]]
    assert script.run(job={**JOB, "max_inflight": 2})[0] == 0
    assert script.statuses() == "......"


def test_a_call_that_fails_while_the_job_is_being_stopped_runs_again(script):
    """The dispatcher retries nothing for a task that is ending: its executor may have died by chance."""

    def lose(run, dispatch, calls):
        run.request_stop("SIGINT")
        error = CallError(ErrorKind.EXECUTOR_LOST, "its process ended")
        dispatch.answer = lambda _call: error
        dispatch.port.deliver([EmitResult("j@r1", dispatch.result(call)) for call in calls])

    script._stop_in = lose
    script.run(stop_after=2)
    code, _ = script.run()
    assert (code, script.statuses()) == (0, "......")


@pytest.mark.parametrize(
    ("started", "typed"),
    [
        ("/somewhere/blockx.py", "python blockx.py"),
        ("/site-packages/blockx/__main__.py", "python -m blockx"),
        ("/usr/bin/blockx", "blockx"),
    ],
)
def test_what_to_type_begins_as_the_run_was_started(
    monkeypatch: pytest.MonkeyPatch, started: str, typed: str
) -> None:
    monkeypatch.setattr("sys.argv", [started])
    assert resume._program() == typed
