"""The command line: what it takes, what it says, and the exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest

from blockx import cli
from blockx.config import load_config
from blockx.errors import UsageError
from blockx.jobs.choice import Choice

ROOT = Path(__file__).parents[1]
CONFIG = """\
functions: {path: functions}
jobs:
  - {name: a, function: f, calls: calls.jsonl, results: out/a.jsonl}
  - {name: b, function: f, calls: [1]}
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "functions").mkdir()
    (tmp_path / "functions" / "f.py").write_text("def _(n):\n    return n\n")
    (tmp_path / "calls.jsonl").write_text("1\n")
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path / "config.yaml"


@pytest.fixture
def runs(monkeypatch):
    """What ``app.run`` was asked for, instead of running it."""
    from blockx import app

    asked = []
    monkeypatch.setattr(
        app, "run", lambda loaded, options: asked.append((loaded.file, options)) or 0
    )
    return asked


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {}),
        (["run"], {}),
        (["--fresh", "--quiet"], {"choice": Choice(fresh=True), "quiet": True}),
        (
            ["--retry-failed", "--limit", "7", "--resume-anyway"],
            {"choice": Choice(retry_failed=True, limit=7, resume_anyway=True)},
        ),
        (["run", "--job", "b", "--job", "a"], {"jobs": ("b", "a")}),
    ],
)
def test_run_is_the_verb_if_none_is_given(config, runs, arguments, options):
    at = 1 if arguments[:1] == ["run"] else 0
    arguments = [*arguments[:at], "--config", str(config), *arguments[at:]]
    assert cli.main(arguments) == 0
    assert runs == [(config, cli.RunOptions(**options))]


def test_config_yaml_of_the_working_directory_is_the_default(config, runs, monkeypatch):
    monkeypatch.chdir(config.parent)
    assert cli.main([]) == 0
    assert runs[0][0] == config


def test_jobs_are_chosen_by_name_in_the_order_of_the_file(config):
    loaded = load_config(config, {})
    assert [job.name for job in cli.select_jobs(loaded, [])] == ["a", "b"]
    assert [job.name for job in cli.select_jobs(loaded, ["b", "a"])] == ["a", "b"]
    assert [job.name for job in cli.select_jobs(loaded, ["b"])] == ["b"]
    with pytest.raises(UsageError, match=r"--job c: no such job in .*config.yaml; its jobs: a, b"):
        cli.select_jobs(loaded, ["a", "c"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file; name the configuration with --config"),
        ("jobs: []", "no jobs; add one under the key jobs (name, function, calls)"),
        ("jbos: []", "unknown key jbos; did you mean jobs?"),
        ("a: [", "not valid YAML"),
    ],
)
def test_a_wrong_configuration_is_one_message_and_exit_code_2(config, runs, capsys, text, message):
    if text is None:
        config.unlink()
    else:
        config.write_text(text)
    assert cli.main(["--config", str(config)]) == 2
    out, err = capsys.readouterr()
    assert (out, runs) == ("", [])
    assert err.startswith(f"blockx: {config}:")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fresh", "--retry-failed"], "--fresh begins anew: it goes with none of"),
        (["--where", "index"], "--where 'index': index is no comparison"),
    ],
)
def test_flags_that_make_no_sense_are_exit_code_2(config, runs, capsys, arguments, message):
    assert cli.main([*arguments, "--config", str(config)]) == 2
    assert (runs, message in capsys.readouterr().err) == ([], True)


@pytest.mark.parametrize(
    "arguments",
    [["--nonsense"], ["nonsense"], ["run", "--conf", "x"], ["--limit", "0"], ["--limit", "x"]],
)
def test_a_wrong_command_line_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: blockx" in capsys.readouterr().err


def test_a_bug_of_ours_is_shown_whole_and_says_so(config, monkeypatch, capsys):
    from blockx import app

    def fail(_loaded, _options):
        raise ZeroDivisionError("x")

    monkeypatch.setattr(app, "run", fail)
    assert cli.main(["--config", str(config)]) == 3
    err = capsys.readouterr().err
    assert err.startswith("blockx: Traceback")
    assert err.endswith("internal error: a bug of blockx; please report the lines above\n")


def test_an_interrupt_outside_of_a_run_is_exit_code_130(config, monkeypatch, capsys):
    from blockx import app

    def interrupt(_loaded, _options):
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "run", interrupt)
    assert cli.main(["--config", str(config)]) == 130
    assert capsys.readouterr().err == "blockx: stopped\n"


@pytest.mark.parametrize("arguments", [["check"], ["run", "--check"], ["--check"]])
def test_check_shows_the_effective_configuration_and_runs_nothing(config, runs, capsys, arguments):
    assert cli.main([*arguments, "--config", str(config)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"# effective configuration of {config}\n")
    assert "executor_count: 8" in out
    assert out.endswith("# all right: 2 jobs, 1 functions\n")
    assert runs == []
    assert not (config.parent / "out" / "a.jsonl").exists()


def test_check_tells_all_mistakes_at_once(config, capsys):
    (config.parent / "functions" / "broken.py").write_text("def _(:\n")
    (config.parent / "calls.jsonl").unlink()
    config.write_text(CONFIG.replace("function: f, calls: [1]", "function: g, calls: [1]"))
    assert cli.main(["check", "--config", str(config)]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 3
    assert err[0].startswith("blockx: broken: ")
    assert err[1].startswith("job a: ")
    assert "the call list cannot be opened" in err[1]
    assert err[2] == "job b: no function 'g'"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_is_exit_code_0(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 0
    assert "blockx" in capsys.readouterr().out


@pytest.mark.slow
def test_help_and_mistakes_do_not_load_the_heavy_parts(tmp_path):
    code = (
        "import sys; from blockx.cli import main; main(['--config', 'none.yaml']);"
        "print(sorted(set(sys.modules) & {'numpy', 'aiohttp', 'rich', 'loguru', 'blockx.app'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "[]\n"
    assert done.stderr == "blockx: none.yaml: no such file; name the configuration with --config\n"
