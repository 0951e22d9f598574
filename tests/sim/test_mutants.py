"""A few guards are deleted in each whole run of the tests; ``python -m tests.sim.mutate`` deletes all of them."""

import pytest

from tests.sim.mutate import MUTANTS, ROOT, judge

FEW = ("stale attempt", "crossed sub-calls", "a draining call says nothing")


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_the_text_of_a_guard_is_where_the_list_says(mutant) -> None:
    assert mutant.old in (ROOT / mutant.path).read_text()


def test_the_table_of_guards_has_every_guard() -> None:
    table = (ROOT / "blockx/dispatcher/README.md").read_text()
    assert [mutant.name for mutant in MUTANTS if f"| {mutant.name} |" not in table] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_without_its_guard_something_fails(name: str) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    assert judge(mutant, worlds=100)
