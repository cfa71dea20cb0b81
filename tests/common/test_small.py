"""Files that are whole or absent, metrics that survive a kill, settings that stand once, imports that go one way."""
import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from common import files, metrics
from common.settings import as_command, option

ROOT = Path(__file__).parents[2]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    files.write_whole(path, b"old")
    def full(_fd):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        files.write_whole(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"] and path.read_bytes() == b"old"


def test_a_torn_row_is_cut_and_a_redone_step_replaces_its_row(tmp_path):
    path = tmp_path / "m.jsonl"
    log = metrics.Metrics(path)
    log.write("step", 1, loss=2.0)
    log.write("step", 2, loss=1.5)
    log.close()
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
    assert [row["loss"] for row in metrics.read(path)] == [2.0, 1.5]
    log = metrics.Metrics(path)
    log.write("step", 2, loss=1.25)
    log.close()
    assert [row["loss"] for row in metrics.read(path, "step")] == [2.0, 1.25]


def test_an_option_reaches_its_field_from_flag_environment_and_default():
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        disk_budget: float = option(5.0, "GB on disk.", min=1)
        name: str = option("a", "A name.")
    seen = []
    def run(settings: Settings) -> None:
        """Says what it does."""
        seen.append(settings)
    app = typer.Typer()
    app.command()(as_command(Settings, "HSX", run))
    runner = CliRunner()
    for words, env in (([], {}), (["--disk-budget", "7"], {}), ([], {"HSX_DISK_BUDGET": "9"})):
        assert runner.invoke(app, words, env=env).exit_code == 0
    assert [s.disk_budget for s in seen] == [5.0, 7.0, 9.0]
    assert runner.invoke(app, ["--disk-budget", "0"]).exit_code == 2
    shown = runner.invoke(app, ["--help"], env={"COLUMNS": "120"}).output
    assert "GB on disk" in shown and "HSX_DISK_BUDGET" in shown and "5.0" in shown and "Says what it does" in shown


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


def test_imports_go_one_way():
    allowed = {"common": {"common"}, "protocol": {"common", "protocol"}, "producer": {"common", "protocol", "producer"},
               "trainer": {"common", "protocol", "trainer"}}
    for package, may in allowed.items():
        for path in (ROOT / package).rglob("*.py"):
            ours = {name.split(".")[0] for name in imported(path)} & set(allowed)
            assert ours <= may, f"{path.relative_to(ROOT)} imports {ours - may}"
            if package in ("protocol", "trainer"):
                assert not any(name.split(".")[0] == "transformers" for name in imported(path)), path


def test_the_wire_needs_no_torch():
    code = ("import sys, pathlib, importlib\n"
            "for p in pathlib.Path('protocol').glob('*.py'): importlib.import_module('protocol.' + p.stem)\n"
            "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
