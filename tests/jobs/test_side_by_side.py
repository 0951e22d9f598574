"""Which job starts when: in turn, side by side, after others."""

import threading

import pytest

from blockx.config import waits_for
from blockx.jobs.report import JobProgress

WAIT_S = 20


class Dispatches:
    """A dispatcher of its own for each task; jobs named in ``together`` must be open at the same time."""

    def __init__(self, fake_dispatch, together=()):
        self.fake = fake_dispatch
        self.order = []
        self.by_task = {}
        self.meeting = threading.Barrier(len(together)) if together else None
        self.together = together

    def keep_pins(self, task_id, pins, on_pins):
        name = task_id.partition("@")[0]
        self.order.append(name)
        if name in self.together:
            self.meeting.wait(WAIT_S)
        self.by_task[task_id] = self.fake(lambda _call: b"{}")

    def open(self, task, view, port):
        self.by_task[task.task_id].open(task, view, port)

    def __getattr__(self, name):
        return lambda task_id, *rest: getattr(self.by_task[task_id], name)(task_id, *rest)


def job(name, **keys):
    return {"name": name, "function": "f", "calls": [1], "results": f"{name}.jsonl", **keys}


@pytest.mark.parametrize(
    ("parallel", "after", "waits"),
    [
        (False, {}, {"a": set(), "b": {"a"}, "c": {"a", "b"}}),
        (True, {}, {"a": set(), "b": set(), "c": set()}),
        (False, {"b": []}, {"a": set(), "b": set(), "c": {"a", "b"}}),
        (True, {"a": ["c"]}, {"a": {"c"}, "b": set(), "c": set()}),
    ],
)
def test_a_job_waits_for_those_it_names_or_for_all_before_it(folder, parallel, after, waits):
    jobs = [
        job(name, **({"after": after[name]} if name in after else {})) for name in ("a", "b", "c")
    ]
    assert waits_for(folder.loaded(*jobs, parallel=parallel).config) == waits


def test_jobs_side_by_side_run_at_the_same_time_and_report_in_their_order(folder, fake_dispatch):
    dispatches = Dispatches(fake_dispatch, together=("a", "b"))
    run = folder.jobs_run(dispatches, job("a"), job("b"), parallel=True)
    assert run.run() == 0
    assert [report.name for report in run.reports] == ["a", "b"]
    assert folder.read("a.jsonl").count("\n") == folder.read("b.jsonl").count("\n") == 1


def test_after_holds_a_job_back_until_the_others_have_ended(folder, fake_dispatch):
    dispatches = Dispatches(fake_dispatch)
    jobs = [job("last", after=["b", "a"]), job("a"), job("b", after=["a"])]
    run = folder.jobs_run(dispatches, *jobs, parallel=True)
    assert run.run() == 0
    assert dispatches.order == ["a", "b", "last"]
    assert [report.name for report in run.reports] == ["last", "a", "b"]


def test_a_stop_reaches_all_jobs_and_keeps_waiting_ones_from_starting(folder, fake_dispatch):
    dispatches = Dispatches(fake_dispatch)
    run = folder.jobs_run(dispatches, job("a"), job("b", after=["a"]), parallel=True)
    open_task = dispatches.open

    def stop_then_open(task, view, port):
        run.request_stop("SIGINT")
        open_task(task, view, port)
        dispatches.by_task[task.task_id].submit = lambda *_: None

    dispatches.open = stop_then_open
    run.run()
    assert run.was_stopped
    assert [(report.name, report.complete) for report in run.reports] == [("a", False)]


def test_a_bug_in_one_job_ends_the_run_with_its_story(folder, fake_dispatch):
    dispatches = Dispatches(fake_dispatch)
    dispatches.open = None
    run = folder.jobs_run(dispatches, job("a"), job("b"), parallel=True)
    with pytest.raises(TypeError):
        run.run()


def test_a_chosen_job_does_not_wait_for_one_that_was_not_chosen(folder, fake_dispatch):
    from blockx.jobs.run import JobsRun
    from blockx.jobs.runner import JobTools

    loaded = folder.loaded(job("a"), job("b", after=["a"]))
    tools = JobTools(
        loaded=loaded,
        view_factory=folder.view,
        dispatch=Dispatches(fake_dispatch),
        run_id="r1",
    )
    run = JobsRun(tools, loaded.config.jobs[1:], folder.progress)
    assert run.run() == 0
    assert [report.name for report in run.reports] == ["b"]


def test_progress_of_jobs_side_by_side_is_their_sum():
    progress = JobProgress()
    first, second, third = progress.part(), progress.part(), progress.part()
    progress.gather()
    assert progress.job_name == ""
    first.start_job("a", 20)
    second.start_job("b", 10)
    first.produced, first.done, first.failed, first.total = 5, 4, 1, 9
    second.produced, second.done, second.total = 3, 2, 4
    second.say("hello")
    progress.gather()
    numbers = (progress.job_name, progress.produced, progress.done, progress.failed, progress.total)
    assert numbers == ("2 jobs", 8, 6, 1, None)
    assert (progress.started_ns, list(progress.notices)) == (10, ["hello"])
    third.start_job("c", 30)
    third.total = 1
    progress.gather()
    assert (progress.job_name, progress.total) == ("3 jobs", 14)
