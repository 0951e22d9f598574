"""Worlds by seed. ``SIM_SEED=17 pytest tests/sim`` replays one; ``make sim`` runs a range."""

import os

import pytest

from tests.sim.world import World

SEEDS = [int(os.environ["SIM_SEED"])] if "SIM_SEED" in os.environ else list(range(40))


@pytest.mark.sim
@pytest.mark.parametrize("seed", SEEDS)
def test_in_any_world_each_call_ends_once_as_the_plain_model_says(seed: int) -> None:
    World(seed).run()


@pytest.mark.sim
def test_the_same_seed_makes_the_same_world() -> None:
    worlds = [World(11) for _ in range(2)]
    for world in worlds:
        world.run()
    histories = [(w.now_ms, w.counts, w.core.counters, w.adapter.counters) for w in worlds]
    assert histories[0] == histories[1]
    assert [j.results for j in worlds[0].jobs] == [j.results for j in worlds[1].jobs]
