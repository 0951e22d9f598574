"""Random worlds: real core, fake executors, faults; each is one seed, and the failure names it.

``SIM_SEED=17 pytest tests/dispatcher/test_random_world.py`` runs that one alone.
"""

import os

import pytest

from tests.dispatcher.world import World

SEEDS = [int(os.environ["SIM_SEED"])] if "SIM_SEED" in os.environ else list(range(100))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_call_ends_exactly_once_in_any_world(seed: int) -> None:
    world = World(seed).submit(tasks=1 + seed % 3, calls=10)
    world.run(steps_max=20_000)
    assert world.outcomes() == dict.fromkeys(world.submitted, 1)
    assert sorted(world.credits) == sorted(world.batches)
    assert sum(end.calls.calls for end in world.finished.values()) == len(world.submitted)
    assert world.core.state.parked == {}
    if not world.program.cycles:
        assert world.wrong() == {}


def test_the_same_seed_makes_the_same_history() -> None:
    worlds = [World(5).submit(tasks=2, calls=12) for _ in range(2)]
    for world in worlds:
        world.run(steps_max=20_000)
    assert worlds[0].past == worlds[1].past


def test_a_world_without_faults_runs_each_call_as_the_model_says() -> None:
    world = World(3)
    world.fault_rate = world.cancel_rate = 0.0
    world.program.cycles = False
    world.submit(tasks=2, calls=30)
    world.run(steps_max=20_000)
    assert world.wrong() == {}
    assert {r.attempts for r in world.results.values()} <= {0, 1}
