"""The four states: the full product of state and target."""

import itertools

import pytest

from blockx.dispatcher.cache import ResultCache
from blockx.dispatcher.model import Call, CallState, Task
from blockx.dispatcher.state import Story
from blockx.dispatcher.transitions import LEGAL, move
from blockx.errors import InvalidTransitionError
from tests.builders import function_ref, task_spec

READY, RUNNING, WAITING, DONE = CallState
DIAGRAM = {
    (READY, RUNNING),
    (READY, DONE),
    (RUNNING, READY),
    (RUNNING, WAITING),
    (RUNNING, DONE),
    (WAITING, RUNNING),
    (WAITING, READY),
    (WAITING, DONE),
}
PRODUCT = list(itertools.product(CallState, CallState))


def call_in(state: CallState) -> Call:
    task = Task(task_spec(), ResultCache(0))
    return Call("t/0", 1, task, 0, function_ref(), b"[]", b"k", 5_000, state=state)


@pytest.mark.parametrize(("now", "to"), PRODUCT, ids=[f"{a.name}-{b.name}" for a, b in PRODUCT])
def test_a_move_is_legal_exactly_if_it_is_in_the_diagram(now: CallState, to: CallState) -> None:
    call, story = call_in(now), Story()
    if (now, to) in DIAGRAM:
        move(call, to, "test", story)
        assert call.state is to
        assert story.of("t/0") == [("t/0", "test", now, to)]
    else:
        with pytest.raises(InvalidTransitionError):
            move(call, to, "test", story)
        assert call.state is now
        assert story.of("t/0") == []


def test_the_table_names_every_state() -> None:
    assert set(LEGAL) == set(CallState)


def test_an_illegal_move_tells_the_story_of_its_call_only() -> None:
    call, story = call_in(READY), Story()
    move(call, RUNNING, "bound", story)
    story.tell.append(("t/1", "other", READY, DONE))
    move(call, DONE, "completed", story)
    with pytest.raises(InvalidTransitionError) as raised:
        move(call, RUNNING, "bound", story)
    assert str(raised.value) == (
        "t/0: DONE -> RUNNING on bound; story: bound: READY -> RUNNING; completed: RUNNING -> DONE"
    )


def test_the_story_is_one_ring_that_forgets_the_oldest_moves() -> None:
    story = Story(moves_max=3)
    for n in range(5):
        story.tell.append((f"t/{n}", "bound", READY, RUNNING))
    assert [m[0] for m in story.tell] == ["t/2", "t/3", "t/4"]
