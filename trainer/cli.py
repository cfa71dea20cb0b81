"""`hstrain`: parse, call, print."""
from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")     # spinning threads of two processes on few cores: 50x slower steps

import typer

from common import logs, service
from common.errors import UserError
from common.settings import as_command
from trainer import config

app = typer.Typer(no_args_is_help=True, help="Train DFlash drafters on a stream of hidden states.", pretty_exceptions_enable=False)


def run(settings: config.Run) -> None:
    """Receive the stream, train an arm on it, have its checkpoints' real acceptance measured. Re-running resumes."""
    logs.setup(settings.log_level)
    stop = service.Stop()
    stop.on_signals()
    from trainer import daemon  # seconds of imports: a stop ends them
    daemon.run(settings, stop)


def sweep(settings: config.Sweep) -> None:
    """Train several arms with several seeds on one stream, each run a process, all options of hstrain run theirs. Re-running goes on."""
    options = settings.options or []
    each = run_settings(options)
    stop = service.Stop()
    stop.on_signals()
    from trainer import sweep_screen
    raise typer.Exit(sweep_screen.show(settings, each, options, stop))


def run_settings(words: list[str]) -> config.Run:
    """What `hstrain run` would make of these words.  click's own error, as on its command line."""
    from trainer.sweep import OWN
    command = typer.main.get_command(app).commands["run"]
    context = command.make_context("hstrain run", list(words))
    if given := [f"--{name.replace('_', '-')}" for name in OWN
                 if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"]:
        raise UserError(f"{', '.join(given)}: a sweep gives each run its own; use --arms, --seeds and --sweep-dir")
    return config.Run(**context.params)


def report(settings: config.Report) -> None:
    """Acceptance of runs, and which arm beats which: tables, a picture, a page, JSON."""
    from trainer import report as reports
    reports.show(settings)


def status(settings: config.Status) -> None:
    """What this box's trainer is doing."""
    from common import status as screen
    from trainer import seen
    screen.show(lambda: sorted((settings.state_dir / "status").glob("*.json")), "hstrain run", seen.rows, as_json=settings.json, watch=settings.watch)


def doctor(settings: config.Doctor) -> None:
    """Whether this box can train with these options: what is wrong, and the command that mends it. Exit code 1: something is."""
    from trainer import doctor as checks
    raise typer.Exit(checks.show(settings))


def arms() -> None:
    """The arms, the question each asks, and the arm it is compared with."""
    from trainer import arms_screen
    arms_screen.show()


def memory(settings: config.Memory) -> None:
    """What a training step needs on a card, by part, before anything is loaded, and what would fit. Exit code 1: this does not."""
    from trainer import memory_screen
    raise typer.Exit(memory_screen.show(settings))


def export(settings: config.Export) -> None:
    """A drafter for z-lab's code, vLLM, SGLang, speculators or llama.cpp, with what the engine will make of it and how to run it."""
    from trainer import export as exporting
    exporting.run(settings)


def import_(settings: config.Import) -> None:
    """A drafter of z-lab's, speculators' or llama.cpp's format as one of ours."""
    from trainer import imported
    imported.run(settings)


def keygen(settings: config.Keys) -> None:
    """Make this box's CURVE key pair and print the public key, for `hsprod allow`."""
    from protocol import keys
    print(keys.generate(settings.keys))


def trust(settings: config.Trust) -> None:
    """Name the one producer that this box trusts, by the public key that its `hsprod keygen` printed."""
    from protocol import keys
    keys.set_producer(settings.keys, settings.key)


app.command("export")(as_command(config.Export, "HSTRAIN", export))
app.command("import")(as_command(config.Import, "HSTRAIN", import_))
app.command("keygen")(as_command(config.Keys, "HSTRAIN", keygen))
app.command("trust")(as_command(config.Trust, "HSTRAIN", trust))
app.command("run")(as_command(config.Run, "HSTRAIN", run))
app.command("sweep", context_settings={"ignore_unknown_options": True})(as_command(config.Sweep, "HSTRAIN", sweep))
app.command("report")(as_command(config.Report, "HSTRAIN", report))
app.command("status")(as_command(config.Status, "HSTRAIN", status))
app.command("doctor")(as_command(config.Doctor, "HSTRAIN", doctor))
app.command("arms")(arms)
app.command("memory")(as_command(config.Memory, "HSTRAIN", memory))


def main() -> None:
    service.run(app)
