"""A store behind a table server is the store: its tests, asked through ``backends.blockdb.url: grpc://…``."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blockx.backends.table_files import SqliteFiles
from tests.backends import test_table_ranges, test_tables
from tests.backends.conftest import StorePlace
from tests.backends.harness import Io
from tests.backends.table_service import ServedTables

OF_ITS_FILE = {
    "test_a_damaged_file_fails_the_read_clearly",
    "test_a_full_disk_fails_the_upserts_that_do_not_fit_and_keeps_the_acknowledged",
    "test_a_locked_file_does_not_hold_up_the_end",
    "test_a_locked_file_is_waited_for_and_then_unavailable",
    "test_a_write_goes_on_when_the_lock_is_gone",
    "test_a_write_of_a_cancelled_call_is_not_started",
    "test_another_key_than_the_stores_is_refused_wherever_it_is_declared",
    "test_commits_are_on_disk_before_they_are_acknowledged",
    "test_the_key_is_kept_in_the_file",
}
"""Tests that look into the process that has the file, or open it again."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[StorePlace]:
    path = tmp_path / "data" / "store.sqlite"
    served = ServedTables(path)
    yield StorePlace("grpc", {"url": served.url}, SqliteFiles(path))
    served.stop()


@pytest.fixture
def store(io: Callable[..., Io], place: StorePlace) -> Iterator[Io]:
    service = io(blockdb=place.blockdb)
    yield service
    service.stop()


for module in (test_tables, test_table_ranges):
    for name, test in vars(module).items():
        is_test = name.startswith("test_") and name not in OF_ITS_FILE
        if is_test and "store" in inspect.signature(test).parameters:
            globals()[name] = test
