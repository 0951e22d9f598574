"""A task's functions: what a folder becomes, what a bad file does, what later edits do."""

import os
import threading
from hashlib import sha256
from pathlib import Path

import pytest

from blockx.errors import UsageError
from blockx.functions import view as view_module
from blockx.functions.view import FunctionView, PinnedFunction


def write(folder: Path, **sources: str | bytes) -> Path:
    for name, source in sources.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.encode() if isinstance(source, str) else source)
    return folder


def test_a_function_is_its_path_digest_source_and_entry(tmp_path):
    source = "def _(p):\r\n    return p\r\n"
    view = FunctionView(write(tmp_path, erc20__balance_of=source, plain="def plain(): ..."))
    digest = sha256(source.encode()).hexdigest()
    assert view.ids() == ["erc20/balance_of", "plain"]
    assert view.get("erc20/balance_of") == PinnedFunction(
        "erc20/balance_of", digest, source, "_", None
    )
    assert view.source(digest) == source
    assert view.get("erc20") is None
    assert view.source("0" * 64) is None
    assert view.check_all() == []


class Judge:
    """Refuses what holds the word ``bad``; remembers what it was asked."""

    def __init__(self):
        self.asked = []

    def judge(self, function_id, source):
        self.asked.append(function_id)
        return ("", "LoadError: refused") if "bad" in source else (f"token of {function_id}", None)


def test_a_judge_is_asked_about_every_source_before_any_is_parsed(tmp_path, monkeypatch):
    folder = write(tmp_path, good="def _(): ...", bad="bad (", none=b"\xff", wrong="def _(")
    judge = Judge()
    monkeypatch.setattr(view_module, "resolve_entry", lambda *_: pytest.fail("parsed"))
    view = FunctionView(folder, judge)
    assert judge.asked == ["bad", "good", "wrong"]
    assert view.get("bad").error == "LoadError: refused"  # never parsed
    monkeypatch.undo()
    good = view.get("good")
    assert (good.audit, good.error, good.entry) == ("token of good", None, "_")
    assert "SyntaxError" in view.get("wrong").error
    assert "not UTF-8" in view.get("none").error


def test_the_source_of_a_refused_function_is_given_to_nobody(tmp_path):
    source = "bad = 1"
    view = FunctionView(write(tmp_path, f=source), Judge())
    assert view.source(sha256(source.encode()).hexdigest()) is None


def test_edits_after_the_start_change_nothing(tmp_path):
    view = FunctionView(write(tmp_path, f="def _(): return 1"))
    write(tmp_path, f="def _(): return 2", g="def _(): ...")
    pinned = view.get("f")
    assert pinned is not None
    assert pinned.source == "def _(): return 1"
    assert view.get("g") is None


def test_a_bad_file_fails_its_function_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(view_module, "SOURCE_BYTES_MAX", 1_000)
    write(
        tmp_path,
        good="def _(): ...",
        syntax="def _(:",
        late="return 1\ndef _(): ...",
        latin=b"def _():\n    return '\xe9'",
        large="#" * 1_001,
    )
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.py")
    view = FunctionView(tmp_path)
    assert view.check_all() == [
        ("dangling", f"LoadError: {tmp_path}/dangling.py: No such file or directory"),
        ("large", f"LoadError: {tmp_path}/large.py has more than 1,000 bytes; move data out of it"),
        (
            "late",
            "SyntaxError: 'return' outside function (functions/late.py, line 1, column 1)",
        ),
        (
            "latin",
            f"LoadError: {tmp_path}/latin.py, line 2: not UTF-8 (invalid continuation byte); "
            "save it as UTF-8",
        ),
        ("pipe", f"LoadError: {tmp_path}/pipe.py is no regular file"),
        ("syntax", "SyntaxError: invalid syntax (functions/syntax.py, line 1, column 7): def _(:"),
    ]
    good = view.get("good")
    assert good is not None
    assert good.error is None


def test_a_file_name_that_is_no_text_is_reported_under_a_readable_id(tmp_path):
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.py")).write_text("def _(): ...")
    assert FunctionView(tmp_path).check_all() == [
        ("caf\ufffd", "LoadError: the file's name is not UTF-8; rename it")
    ]


def test_hidden_files_caches_and_package_files_are_no_functions(tmp_path):
    write(tmp_path, f="def _(): ...", deep__f="def _(): ...")
    for name in ("__init__.py", ".hidden.py", "notes.txt"):
        (tmp_path / name).write_text("")
    for name in (".git", "__pycache__"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text("")
    assert FunctionView(tmp_path).ids() == ["deep/f", "f"]


def test_a_loop_of_links_ends_and_a_linked_folder_counts(tmp_path):
    folder = write(tmp_path / "functions", f="def _(): ...")
    (folder / "again").symlink_to(folder)
    write(tmp_path / "shared", g="def _(): ...")
    (folder / "lib").symlink_to(tmp_path / "shared")
    assert FunctionView(folder).ids() == ["f", "lib/g"]


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        ({"FUNCTION_FILES_MAX": 1}, "has more than 1 .py files; name a folder"),
        ({"FOLDER_BYTES_MAX": 20}, "have more than 20 bytes together; name a folder"),
    ],
)
def test_a_folder_beyond_a_limit_is_refused(tmp_path, monkeypatch, limit, text):
    for name, value in limit.items():
        monkeypatch.setattr(view_module, name, value)
    with pytest.raises(UsageError, match=text):
        FunctionView(write(tmp_path, f="def _(): ...", g="def _(): ..."))


def test_a_missing_folder_says_what_to_do(tmp_path):
    with pytest.raises(UsageError) as refused:
        FunctionView(tmp_path / "functions")
    assert str(refused.value) == (
        f"functions.path: {tmp_path}/functions is no folder; "
        "make it and put one .py file a function in it"
    )


def test_suggestions_are_the_namesake_first_and_then_what_is_written_alike(tmp_path):
    view = FunctionView(
        write(tmp_path, erc20__transfer="", transfers="", other="", nft__Transfer="")
    )
    assert view.suggest("transfer") == ["erc20/transfer", "nft/Transfer", "transfers"]
    assert view.suggest("othr") == ["other"]
    assert view.suggest("zzzzzzz") == []


def test_unknown_names_without_end_do_not_cost_a_search_each(tmp_path, monkeypatch):
    monkeypatch.setattr(view_module, "_SUGGESTED_IDS_MAX", 2)
    view = FunctionView(write(tmp_path, other=""))
    assert [view.suggest(name) for name in ("othr", "othe", "ther", "othr")] == [
        ["other"],
        ["other"],
        [],
        ["other"],
    ]


def test_two_threads_get_the_same_function(tmp_path):
    view = FunctionView(write(tmp_path, **{f"f{n}": f"def _(): return {n}" for n in range(50)}))
    start, seen = threading.Barrier(2), []

    def ask() -> None:
        start.wait(10)
        seen.append([view.get(function_id) for function_id in view.ids()])

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert all(a is b for a, b in zip(*seen, strict=True))
