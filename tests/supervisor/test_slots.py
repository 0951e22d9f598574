"""The slot machine: the full product of situations and events, the throttle, and its invariants."""

import random
from collections.abc import Callable, Sequence
from typing import get_args

import pytest

from blockx.errors import InvalidTransitionError
from blockx.supervisor.slots import (
    BOOT_FAILURES_MAX,
    START_RETRY_MS_MIN,
    ArmTimer,
    ExecutorAttached,
    ExitCause,
    KillProcess,
    KillRequested,
    ProcessExited,
    ProcessStarted,
    RecycleRequested,
    ReportExit,
    Slot,
    SlotCommand,
    SlotEvent,
    SlotLimits,
    SlotState,
    StartFailed,
    StartProcess,
    StartRequested,
    StopRequested,
    TerminateProcess,
    TimerDue,
    describe_exit,
    is_hopeless,
)

LIMITS = SlotLimits(
    restart_delay_ms=1_000,
    max_restarts=2,
    restart_window_ms=60_000,
    backoff_ms=30_000,
    attach_timeout_ms=9_000,
)
PID = 100
OLD_PID = 99


def slot_after(*events: SlotEvent, limits: SlotLimits = LIMITS) -> Slot:
    slot = Slot("exec-0", limits)
    for event in events:
        slot.handle(event)
    return slot


def exited(code: int | None = 1, pid: int = PID, now_ms: int = 0) -> ProcessExited:
    return ProcessExited(pid, code, now_ms)


_UP = (StartRequested(), ProcessStarted(PID))
_ATTACHED = (*_UP, ExecutorAttached(PID))
_CRASH = (*_ATTACHED, exited())

SITUATIONS: dict[str, Sequence[SlotEvent]] = {
    "new": (),
    "starting": (StartRequested(),),
    "pausing": _CRASH,
    "backing off": (
        *_CRASH,
        TimerDue(2),
        StartFailed("x", 0),
        TimerDue(3),
        StartFailed("x", 0),
    ),
    "booting": _UP,
    "attached": _ATTACHED,
    "killed": (*_ATTACHED, KillRequested(PID, "wedged")),
    "recycling": (*_ATTACHED, RecycleRequested(PID, "drained", 500)),
    "stopping": (*_ATTACHED, StopRequested(700)),
    "starting, to be stopped": (StartRequested(), StopRequested(700)),
    "stopped": (*_UP, StopRequested(700), exited(0)),
}

EVENTS: dict[str, SlotEvent] = {
    "StartRequested": StartRequested(),
    "ProcessStarted": ProcessStarted(PID),
    "StartFailed": StartFailed("no memory", 5),
    "ExecutorAttached": ExecutorAttached(PID),
    "ProcessExited": exited(-11, now_ms=5),
    "KillRequested": KillRequested(PID, "silent"),
    "RecycleRequested": RecycleRequested(None, "old", 500),
    "StopRequested": StopRequested(700),
}

ILLEGAL = "illegal"
STALE = "stale"
Outcome = tuple[SlotState, list[SlotCommand]] | str

_WAITING, _RUNNING = SlotState.WAITING, SlotState.RUNNING
_BACKOFF, _STOPPED = SlotState.BACKOFF, SlotState.STOPPED
_LOST = ReportExit(PID, -11, ExitCause.LOST, "", attached=True)


def _outcomes(**by_event: Outcome) -> dict[str, Outcome]:
    """A row of the product; what is not named is a start nobody ordered, or stale."""
    row: dict[str, Outcome] = dict.fromkeys(EVENTS, STALE)
    row |= {"StartRequested": ILLEGAL, "ProcessStarted": ILLEGAL, "StartFailed": ILLEGAL}
    return row | by_event


PRODUCT: dict[str, dict[str, Outcome]] = {
    "new": _outcomes(
        StartRequested=(_WAITING, [StartProcess()]),
        StopRequested=(_STOPPED, []),
    ),
    "starting": _outcomes(
        ProcessStarted=(_RUNNING, [ArmTimer(1, 9_000)]),
        StartFailed=(_WAITING, [ArmTimer(1, 1_000)]),
        StopRequested=(_WAITING, []),
    ),
    "pausing": _outcomes(StopRequested=(_STOPPED, [])),
    "backing off": _outcomes(StopRequested=(_STOPPED, [])),
    "booting": _outcomes(
        ExecutorAttached=(_RUNNING, []),
        ProcessExited=(
            _WAITING,
            [ReportExit(PID, -11, ExitCause.LOST, "", attached=False), ArmTimer(2, 1_000)],
        ),
        KillRequested=(_RUNNING, [KillProcess(PID)]),
        RecycleRequested=(_RUNNING, [TerminateProcess(PID), ArmTimer(2, 500)]),
        StopRequested=(_RUNNING, [TerminateProcess(PID), ArmTimer(2, 700)]),
    ),
    "attached": _outcomes(
        ExecutorAttached=(_RUNNING, []),
        ProcessExited=(_WAITING, [_LOST, ArmTimer(2, 1_000)]),
        KillRequested=(_RUNNING, [KillProcess(PID)]),
        RecycleRequested=(_RUNNING, [TerminateProcess(PID), ArmTimer(2, 500)]),
        StopRequested=(_RUNNING, [TerminateProcess(PID), ArmTimer(2, 700)]),
    ),
    "killed": _outcomes(
        ExecutorAttached=(_RUNNING, []),
        # It died of its own signal before ours came: nobody may say that we killed it.
        ProcessExited=(_WAITING, [_LOST, ArmTimer(2, 1_000)]),
        StopRequested=(_RUNNING, []),
    ),
    "recycling": _outcomes(
        ExecutorAttached=(_RUNNING, []),
        ProcessExited=(
            _WAITING,
            [
                ReportExit(PID, -11, ExitCause.RECYCLED, "drained", attached=True),
                StartProcess(),
            ],
        ),
        KillRequested=(_RUNNING, [KillProcess(PID)]),
        StopRequested=(_RUNNING, [TerminateProcess(PID), ArmTimer(3, 700)]),
    ),
    "stopping": _outcomes(
        ExecutorAttached=(_RUNNING, []),
        ProcessExited=(
            _STOPPED,
            [ReportExit(PID, -11, ExitCause.STOPPED, "the pool stops", attached=True)],
        ),
        KillRequested=(_RUNNING, [KillProcess(PID)]),
        StopRequested=(_RUNNING, [TerminateProcess(PID), ArmTimer(3, 700)]),
    ),
    "starting, to be stopped": _outcomes(
        ProcessStarted=(_RUNNING, [KillProcess(PID)]),
        StartFailed=(_STOPPED, []),
        StopRequested=(_WAITING, []),
    ),
    "stopped": _outcomes(StopRequested=(_STOPPED, [])),
}


def test_the_product_is_complete() -> None:
    assert list(PRODUCT) == list(SITUATIONS)
    assert all(set(row) == set(EVENTS) for row in PRODUCT.values())
    assert {type(event) for event in EVENTS.values()} | {TimerDue} == set(get_args(SlotEvent))


@pytest.mark.parametrize("event", list(EVENTS))
@pytest.mark.parametrize("situation", list(SITUATIONS))
def test_every_event_in_every_situation(situation: str, event: str) -> None:
    slot = slot_after(*SITUATIONS[situation])
    state, stale = slot.state, slot.stale_events
    expected = PRODUCT[situation][event]
    if expected == ILLEGAL:
        with pytest.raises(InvalidTransitionError, match="exec-0"):
            slot.handle(EVENTS[event])
        expected = (state, [])
    else:
        commands = slot.handle(EVENTS[event])
        if expected == STALE:
            assert slot.stale_events == stale + 1
            expected = (state, [])
        else:
            assert slot.stale_events == stale
        assert commands == expected[1]
    assert slot.state is expected[0]
    every_invariant_holds(slot)


@pytest.mark.parametrize("situation", list(SITUATIONS))
@pytest.mark.parametrize(
    "old",
    [
        ExecutorAttached(OLD_PID),
        exited(0, OLD_PID),
        KillRequested(OLD_PID, "x"),
        RecycleRequested(OLD_PID, "x", 500),
        TimerDue(77),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_of_an_older_process_or_timer_change_nothing(situation: str, old: SlotEvent) -> None:
    slot = slot_after(*SITUATIONS[situation])
    before = slot.state, slot.pid, slot.attached, slot.boot_failures, slot.stale_events
    assert slot.handle(old) == []
    after = slot.state, slot.pid, slot.attached, slot.boot_failures, slot.stale_events - 1
    assert after == before


@pytest.mark.parametrize(
    ("situation", "timer_seq", "expected"),
    [
        ("pausing", 2, (_WAITING, [StartProcess()])),
        ("backing off", 4, (_WAITING, [StartProcess()])),
        ("booting", 1, (_RUNNING, [KillProcess(PID)])),
        ("attached", 1, STALE),
        ("killed", 1, STALE),
        ("recycling", 2, (_RUNNING, [KillProcess(PID)])),
        ("stopping", 2, (_RUNNING, [KillProcess(PID)])),
    ],
)
def test_a_due_timer_does_what_it_was_armed_for(
    situation: str, timer_seq: int, expected: Outcome
) -> None:
    slot = slot_after(*SITUATIONS[situation])
    stale = slot.stale_events
    commands = slot.handle(TimerDue(timer_seq))
    if expected == STALE:
        expected = (slot.state, [])
        assert slot.stale_events == stale + 1
    assert (slot.state, commands) == expected
    assert slot.handle(TimerDue(timer_seq)) == [], "a timer fires once"


def test_a_killed_process_is_replaced_at_once_and_the_report_comes_first() -> None:
    slot = slot_after(*SITUATIONS["killed"])
    assert slot.handle(exited(-9)) == [
        ReportExit(PID, -9, ExitCause.KILLED, "wedged", attached=True),
        StartProcess(),
    ]


def test_a_drained_process_that_is_killed_all_the_same_was_recycled() -> None:
    slot = slot_after(*SITUATIONS["recycling"], KillRequested(PID, "it closed its connection"))
    assert slot.handle(exited(-9)) == [
        ReportExit(PID, -9, ExitCause.RECYCLED, "drained", attached=True),
        StartProcess(),
    ]


def test_a_killed_process_with_unknown_exit_code_counts_as_killed() -> None:
    slot = slot_after(*SITUATIONS["killed"])
    assert slot.handle(exited(None))[0] == ReportExit(
        PID, None, ExitCause.KILLED, "wedged", attached=True
    )


def test_a_process_that_does_not_attach_in_time_is_killed_for_it() -> None:
    slot = slot_after(*_UP, TimerDue(1))
    assert slot.handle(exited(-9))[0] == ReportExit(
        PID, -9, ExitCause.KILLED, "did not connect within 9000 ms", attached=False
    )
    assert slot.boot_failures == 1
    assert slot.last_failure == "did not connect within 9000 ms"


def test_an_urgent_stop_kills_what_a_patient_one_left() -> None:
    slot = slot_after(*SITUATIONS["stopping"])
    assert slot.handle(StopRequested(0)) == [KillProcess(PID)]
    assert slot.handle(exited(-9)) == [
        ReportExit(PID, -9, ExitCause.STOPPED, "the pool stops", attached=True)
    ]


def crash(slot: Slot, now_ms: int, *, code: int = 1) -> list[SlotCommand]:
    """From WAITING with a start ordered: one life that attaches and is lost."""
    slot.handle(ProcessStarted(PID))
    slot.handle(ExecutorAttached(PID))
    return slot.handle(exited(code, now_ms=now_ms))[1:]


def resume(slot: Slot) -> None:
    assert slot.handle(TimerDue(slot._timer_seq)) == [StartProcess()]


def test_more_than_max_restarts_within_the_window_back_off_once_and_start_afresh() -> None:
    slot = slot_after(StartRequested())
    pauses = []
    for now_ms in (0, 10, 20, 30, 40, 50):
        [timer] = crash(slot, now_ms)
        assert isinstance(timer, ArmTimer)
        pauses.append((timer.delay_ms, slot.state))
        resume(slot)
    pause, back_off = (1_000, _WAITING), (30_000, _BACKOFF)
    assert pauses == [pause, pause, back_off, pause, pause, back_off]


def test_restarts_outside_the_window_are_forgotten() -> None:
    slot = slot_after(StartRequested())
    states = []
    for now_ms in (0, 10, 60_000, 60_009, 60_010):
        crash(slot, now_ms)
        states.append(slot.state)
        resume(slot)
    # At 60,000 the first is a whole window old; at 60,009 the second is not, at 60,010 neither.
    assert states == [_WAITING, _WAITING, _WAITING, _BACKOFF, _WAITING]


def test_kills_count_against_the_window_and_recycles_do_not() -> None:
    def lives(end: Callable[[Slot], object], code: int) -> list[SlotState]:
        slot = slot_after(StartRequested())
        states = []
        for now_ms in range(3):
            slot.handle(ProcessStarted(PID))
            slot.handle(ExecutorAttached(PID))
            end(slot)
            slot.handle(exited(code, now_ms=now_ms))
            states.append(slot.state)
        return states

    assert lives(lambda slot: slot.handle(KillRequested(PID, "wedged")), -9) == [
        _WAITING,
        _WAITING,
        _BACKOFF,
    ]
    assert lives(lambda slot: slot.handle(RecycleRequested(PID, "old", 1)), 0) == [_WAITING] * 3


def test_without_a_restart_delay_a_lost_process_is_replaced_at_once_but_a_failed_start_waits() -> (
    None
):
    limits = SlotLimits(restart_delay_ms=0, max_restarts=9, restart_window_ms=1, backoff_ms=1)
    slot = slot_after(StartRequested(), limits=limits)
    assert crash(slot, 0) == [StartProcess()]
    assert slot.handle(StartFailed("no memory", 0)) == [
        ArmTimer(slot._timer_seq, START_RETRY_MS_MIN)
    ]


def test_the_pool_is_hopeless_when_no_slot_gets_to_its_attach() -> None:
    failing, fine = slot_after(StartRequested()), slot_after(*_ATTACHED)
    for count in range(BOOT_FAILURES_MAX):
        assert not is_hopeless([failing]), count
        failing.handle(ProcessStarted(PID))
        failing.handle(exited(78))
        resume(failing)
    assert is_hopeless([failing])
    assert failing.last_failure == "exit code 78"
    assert not is_hopeless([failing, fine])
    failing.handle(ProcessStarted(PID))
    failing.handle(ExecutorAttached(PID))
    assert not is_hopeless([failing])


def test_a_pool_that_stops_is_not_hopeless() -> None:
    failing = slot_after(StartRequested())
    failing.boot_failures = BOOT_FAILURES_MAX
    failing.handle(StopRequested(0))
    assert not is_hopeless([failing])


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (None, "exit code unknown"),
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-11, "signal SIGSEGV"),
        (-40, "signal 40"),
    ],
)
def test_exit_codes_are_described_in_words(code: int | None, text: str) -> None:
    assert describe_exit(code) == text


def every_invariant_holds(slot: Slot) -> None:
    assert (slot.pid is not None) == (slot.state is _RUNNING), slot.story
    assert not slot._start_ordered or slot.state is _WAITING, slot.story
    if slot.state is _WAITING:
        assert slot._start_ordered != slot._timer_armed, slot.story
    if slot.state is _BACKOFF:
        assert slot._timer_armed, slot.story
    if slot.state is _STOPPED:
        assert not slot._timer_armed, slot.story
    assert len(slot._restarts_ms) <= slot.limits.max_restarts, slot.story


@pytest.mark.parametrize("seed", list(range(50)))
def test_in_any_world_the_invariants_hold_and_a_stopped_slot_comes_to_rest(seed: int) -> None:
    rng = random.Random(seed)
    slot, now_ms, pid, reports = Slot("exec-0", LIMITS), rng.randrange(10**9), 100, 0
    pending: list[SlotCommand] = slot.handle(StartRequested())
    for step in range(300):
        now_ms += rng.randrange(5_000)
        starts = [command for command in pending if isinstance(command, StartProcess)]
        reports += sum(isinstance(command, ReportExit) for command in pending)
        assert len(starts) <= 1
        if starts and rng.random() < 0.8:
            pid += 1
            event: SlotEvent = ProcessStarted(pid)
        elif starts:
            event = StartFailed("no memory", now_ms)
        else:
            event = rng.choice(
                [
                    ExecutorAttached(pid - rng.randrange(2)),
                    ProcessExited(pid - rng.randrange(2), rng.choice([0, -9, None]), now_ms),
                    KillRequested(pid - rng.randrange(2), "wedged"),
                    RecycleRequested(rng.choice([None, pid]), "old", 500),
                    TimerDue(slot._timer_seq - rng.randrange(2)),
                    StopRequested(rng.choice([0, 500])) if step > 250 else TimerDue(0),
                ]
            )
        pending = slot.handle(event)
        every_invariant_holds(slot)
    slot.handle(StopRequested(0))
    if slot._start_ordered:
        slot.handle(StartFailed("no memory", now_ms))
    if slot.pid is not None:
        pending = slot.handle(ProcessExited(slot.pid, -9, now_ms))
        reports += sum(isinstance(command, ReportExit) for command in pending)
    assert slot.state is _STOPPED
    assert reports == pid - 100, "each process is reported once"
    every_invariant_holds(slot)
