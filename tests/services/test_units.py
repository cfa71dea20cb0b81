"""The unit files and what they name: commands, options, metrics; and systemd's own judgement where systemd-analyze is there."""
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import producer.cli
import trainer.cli
from common import exporter
from common.errors import EXIT_USER
from producer.seen import SEEN as PRODUCER
from trainer.seen import SEEN as TRAINER

FOLDER = Path(__file__).parents[2] / "systemd"
UNITS = {"hsprod.service": producer.cli.app, "hstrain@.service": trainer.cli.app}
MOST = {"hsprod.service": 2.5, "hstrain@.service": 2.5}
SINCE_254 = re.compile(r"Unknown key(?: name)? '(RestartSteps|RestartMaxDelaySec)' in section")
needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not here (apt install systemd): units are parsed only")


def unit(name: str) -> dict[str, list[str]]:
    """[Service]: key -> its values in order, as systemd reads them."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in (FOLDER / name).read_text().splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def parameters(app: typer.Typer, command: str) -> list:
    return typer.main.get_command(app).commands[command].params


@pytest.mark.parametrize("name, app", UNITS.items())
def test_the_command_and_its_options_exist(name, app):
    [line] = unit(name)["ExecStart"]
    program, command, *words = shlex.split(line)
    assert program == f"/opt/hsdraft/bin/{name.split('.')[0].rstrip('@')}"
    options = {option for p in parameters(app, command) for option in p.opts}
    assert {word for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize("name, app, command, prefix", [("hsprod.env", producer.cli.app, "serve", "HSPROD_"), ("hstrain.env", trainer.cli.app, "run", "HSTRAIN_")])
def test_the_examples_set_options_that_exist_and_none_twice(name, app, command, prefix):
    lines = [line.lstrip("#") for line in (FOLDER / name).read_text().splitlines() if re.match(r"#?[A-Z_]+=", line)]
    named = [line.partition("=")[0] for line in lines]
    variables = {p.envvar for p in parameters(app, command)}
    ours = [variable for variable in named if variable.startswith(prefix)]
    assert set(ours) <= variables and len(named) == len(set(named)) and len(ours) > 3
    given = {variable: line.partition("=")[2] for variable, line in zip(named, lines, strict=True) if variable in variables}
    context = typer.main.get_command(app).commands[command].make_context(command, [w for p in parameters(app, command) if p.envvar in given
                                                                                  for w in (p.opts[0], given[p.envvar])])
    assert all(str(context.params[p.name]) == given[p.envvar] or float(context.params[p.name]) == float(given[p.envvar])
               for p in parameters(app, command) if p.envvar in given)


@pytest.mark.parametrize("name", UNITS)
def test_a_hang_is_ended_a_mistake_is_not_repeated_and_the_rest_comes_back(name):
    service = {key: values[-1] for key, values in unit(name).items()}
    assert (service["Type"], service["Restart"], service["RestartPreventExitStatus"]) == ("notify", "on-failure", str(EXIT_USER))
    assert service["WatchdogSec"] == "10min" and service["StateDirectory"] == "hsdraft"
    assert {"RestartSec", "RestartSteps", "RestartMaxDelaySec", "TimeoutStartSec", "TimeoutStopSec"} <= set(service)
    assert service["SupplementaryGroups"] == "render video" and {"/dev/kfd rw", "char-drm rw"} <= set(unit(name)["DeviceAllow"])


def installed(name: str, tmp_path: Path) -> Path:
    """The unit as it would be installed, with a program that is here; a systemd before 254 is not asked about what it does not know."""
    path = tmp_path / name
    path.write_text(re.sub(r"/opt/hsdraft/bin/\w+", sys.executable, (FOLDER / name).read_text()))
    return path


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_systemd_finds_nothing_wrong(name, tmp_path):
    done = subprocess.run(["systemd-analyze", "verify", str(installed(name, tmp_path))], capture_output=True, text=True)
    said = [line for line in (done.stdout + done.stderr).splitlines() if name.split("@")[0] in line]
    version = int(re.search(r"systemd (\d+)", subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True).stdout)[1])
    assert [line for line in said if not (version < 254 and SINCE_254.search(line))] == [] and done.returncode == 0


@needs_systemd
@pytest.mark.parametrize("name", UNITS)
def test_exposure(name, tmp_path):
    done = subprocess.run(["systemd-analyze", "security", "--offline=true", "--no-pager", str(installed(name, tmp_path))], capture_output=True, text=True)
    assert float(re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)[1]) <= MOST[name], done.stdout


def test_every_relaxation_has_its_reason_beside_it():
    """The first line of each group of settings under the two `needs` headings, and of every setting that opens something."""
    for name in UNITS:
        lines = (FOLDER / name).read_text().splitlines()
        for opened in ("SupplementaryGroups=", "MemoryDenyWriteExecute=no", "ProcSubset=all", "RestrictAddressFamilies=", "IPAddressAllow=",
                       "UMask=", "SystemCallFilter=@system-service"):
            at = next(i for i, line in enumerate(lines) if line.startswith(opened))
            assert any(lines[k].startswith("#") for k in (at - 1, at - 2)), (name, opened)


def test_the_dashboard_asks_for_numbers_that_are_exported():
    board = json.loads((FOLDER / "grafana.json").read_text())
    asked = {metric for panel in board["panels"] for target in panel["targets"] for metric in re.findall(r"(?:hsprod|hstrain)_[a-z_]+", target["expr"])}
    said = {family.name + ("_total" if family.number.kind == "counter" else "") for seen in (PRODUCER, TRAINER) for family in exporter.families({}, seen)}
    assert asked and asked <= said, asked - said
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places) and len({p["id"] for p in board["panels"]}) == len(places)
