"""Singleflight: equal calls of a task run once; one leads, the others follow and share its outcome.

Pure functions over calls; they move no call and order nothing. ``task.flights[key]`` is the leader of a
key; a ``Flight`` exists only while somebody follows it. Everything here is O(1), so that a million equal
calls cost no more than a million others.

Two waits are refused, since nobody could ever end them:

- *Crossed sub-calls*: A waits for B's sub-call while B waits for A's. Before a sub-call follows, the
  chain leader -> its root -> what that root's lowest sub-call follows -> ... is walked; if it comes to
  the sub-call's own root, it runs itself (``would_wait_for_itself``). A root call that is about to
  follow has no sub-calls and leads nothing, so nothing can wait for it: it needs no walk.
- *Waiting for a place*: a sub-call never follows a root call that is READY, since that one needs a place
  on an executor, and all places may be taken by calls that wait like this. The sub-call takes the lead
  instead (sub-calls need no place).
"""

from blockx.dispatcher.model import Call, CallState, Flight, root_of


def leader_of(call: Call) -> Call | None:
    """Whom the call follows; None if no one."""
    flight = call.flight
    return None if flight is None or flight.leader is call else flight.leader


def follow(call: Call, leader: Call) -> None:
    """A READY call waits for the outcome of an equal one."""
    flight = leader.flight
    if flight is None:
        flight = leader.flight = Flight(leader)
    call.flight = flight
    (flight.roots if call.parent is None else flight.subcalls)[call.call_id] = call


def unfollow(call: Call) -> None:
    """It waits no more; no effect on a call that follows no one."""
    flight = call.flight
    if flight is not None and flight.leader is not call:
        del (flight.roots if call.parent is None else flight.subcalls)[call.call_id]
        call.flight = None


def take_lead(call: Call, old: Call) -> None:
    """Lead all who follow ``old`` (the call itself may be one of them); ``old`` leads no more."""
    unfollow(call)
    call.task.flights[call.key] = call
    flight, old.flight = old.flight, None
    if flight is not None:
        flight.leader = call
        call.flight = flight


def heir_of(leader: Call) -> Call | None:
    """Who leads next: sub-calls first (see above), then in the order of arrival."""
    flight = leader.flight
    if flight is None:
        return None
    for followers in (flight.subcalls, flight.roots):
        for follower in followers.values():
            return follower
    return None


def subcall_heir_of(leader: Call) -> Call | None:
    """The first sub-call that follows; None if there is none."""
    flight = leader.flight
    if flight is not None:
        for follower in flight.subcalls.values():
            return follower
    return None


def disband(leader: Call) -> list[Call]:
    """The flight is over: its followers, first come first, follow no one now."""
    flight, leader.flight = leader.flight, None
    if flight is None:
        return []
    followers = [*flight.subcalls.values(), *flight.roots.values()]
    for follower in followers:
        follower.flight = None
    return followers


def would_wait_for_itself(call: Call, leader: Call) -> bool:
    """Whether the leader, through others, waits for the root under which the sub-call runs.

    Terminates: waits form no circle before this one, since each was checked like this.
    """
    own_root = root_of(call)
    waits_for: Call | None = leader
    while waits_for is not None:
        root = root_of(waits_for)
        if root is own_root:
            return True
        lowest = root
        while lowest.child is not None:
            lowest = lowest.child
        waits_for = leader_of(lowest)
    return False


def needs_place(leader: Call) -> bool:
    """Whether the leader must be admitted before it can go on."""
    return leader.parent is None and leader.state is CallState.READY
