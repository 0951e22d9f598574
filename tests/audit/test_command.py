"""The command: verdicts as text and as JSON, exit codes, files that are none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from blockx import cli

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture
def files(tmp_path):
    (tmp_path / "good.py").write_text("def _(p):\n    return Table('t').get_row(p), math.pi\n")
    (tmp_path / "bad.py").write_text("import os\n\ndef _(p):\n    return p._x\n")
    return tmp_path


def audit(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "blockx.audit", *map(str, arguments)],
        capture_output=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )


def test_accepted_files_are_exit_code_0_and_their_reach_is_told(files):
    done = audit("good.py", cwd=files)
    assert done.returncode == 0
    assert done.stdout.decode().splitlines() == ["good.py: accepted", "  tables: t"]


def test_a_refused_file_is_exit_code_1_with_a_line_a_finding(files):
    done = audit("good.py", "bad.py", cwd=files)
    assert done.returncode == 1
    lines = done.stdout.decode().splitlines()
    assert "bad.py: refused, 2 findings" in lines
    assert [line for line in lines if line.startswith("bad.py:1:8: import: import of os")]
    assert [line for line in lines if line.startswith("bad.py:4:12: private-attribute: ")]
    assert "  imports: os" in lines


def test_json_is_a_list_of_verdicts(files):
    done = audit("--json", "good.py", "bad.py", cwd=files)
    good, bad = json.loads(done.stdout)
    assert good == {"file": "good.py", "verdict": "accepted", "findings": []}
    assert (bad["file"], bad["verdict"], len(bad["findings"])) == ("bad.py", "refused", 2)
    assert bad["findings"][0].keys() == {"rule", "line", "column", "message"}
    assert (bad["findings"][0]["rule"], bad["findings"][0]["line"]) == ("import", 1)
    assert done.returncode == 1


def test_a_folder_is_all_its_functions(files):
    (files / "sub").mkdir()
    (files / "sub" / "c.py").write_text("x = 1\n")
    (files / "notes.txt").write_text("no function")
    done = audit("--json", files)
    assert [Path(v["file"]).name for v in json.loads(done.stdout)] == ["bad.py", "good.py", "c.py"]


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe",
        b"x = 1\0",
        b"# coding: utf-7\n",
        b"x = '\xed\xa0\x80'\n",
        "x = '\u202e'".encode(),
        b"x = " + b"(" * 5_000,
        b"#" * 1_000_000,
        b"x = 1\rimport os",
        b"if 1:\n\tx\n        y\n",
        b"\xef\xbb\xbf\xef\xbb\xbf",
    ],
)
def test_what_is_no_source_is_refused_with_a_reason(files, data):
    (files / "odd.py").write_bytes(data)
    done = audit("odd.py", cwd=files)
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"odd.py: refused, 1 finding\nodd.py" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["none.py"],
        ["good.py", "none.py"],
        ["empty"],
        ["pipe.py"],
        ["a\0b.py"],
        [],
        ["--no", "good.py"],
    ],
)
def test_what_cannot_be_read_is_exit_code_2(files, arguments):
    (files / "empty").mkdir()
    os.mkfifo(files / "pipe.py")
    if any("\0" in argument for argument in arguments):
        assert cli.main(["audit", *arguments]) == 2  # no process can be given such a name
        return
    done = audit(*arguments, cwd=files)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"Traceback" not in done.stderr
    assert done.stderr


def test_a_file_name_that_is_no_text_is_shown_as_far_as_it_is(files):
    (files / os.fsdecode(b"\xff.py")).write_text("x = 1")
    done = audit(files)
    assert done.returncode == 1
    assert b"?.py: accepted" in done.stdout


def test_blockx_audit_is_the_same_command(files, capsys):
    assert cli.main(["audit", str(files / "good.py")]) == 0
    assert cli.main(["audit", "--json", str(files / "bad.py")]) == 1
    assert cli.main(["audit", str(files / "none.py")]) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{files / 'good.py'}: accepted\n")
    assert "none.py: No such file or directory" in captured.err


def test_check_shows_the_verdicts_in_restricted_mode(files, capsys):
    (files / "functions").mkdir()
    (files / "functions" / "f.py").write_text((files / "good.py").read_text())
    config = files / "config.yaml"
    config.write_text(
        "functions: {path: functions, mode: restricted}\njobs:\n  - {name: a, function: f, calls: [[1]]}\n"
    )
    assert cli.main(["check", "--config", str(config)]) == 0
    out = capsys.readouterr().out
    assert "\n# f: accepted\n#   tables: t\n# all right: 1 jobs, 1 functions\n" in out
    (files / "functions" / "g.py").write_text("import os\n")
    assert cli.main(["check", "--config", str(config)]) == 2
    assert "g: LoadError: refused by the audit: functions/g.py, line 1" in capsys.readouterr().err
