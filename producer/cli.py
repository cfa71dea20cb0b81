"""`hsprod`: parse, call, print."""
from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")     # spinning threads of two processes on few cores: 50x slower steps

import typer

from common import logs, service
from common.settings import as_command
from producer import config

app = typer.Typer(no_args_is_help=True, help="Run a target model and stream its hidden states to trainers.", pretty_exceptions_enable=False)


def serve(settings: config.Serve) -> None:
    """Answer prompts with the target, stream its hidden states, measure the acceptance of checkpoints sent back."""
    logs.setup(settings.log_level)
    stop = service.Stop()
    stop.on_signals()
    from producer import daemon                     # seconds of imports: a stop ends them
    daemon.serve(settings, stop)


def generate(settings: config.Generate) -> None:
    """Answer a prompt, printing as it is decoded; with a drafter, faster and the same. Exit code 1: --compare found another text in float32."""
    logs.setup("WARNING")
    from producer import writing
    raise typer.Exit(writing.run(settings))


def bench(settings: config.Bench) -> None:
    """What a drafter is worth here, in time: token rates, the pieces of a cycle, the speedup and what it loses. How well it drafts: hsprod eval."""
    logs.setup("WARNING")
    from producer import bench as benchmark
    benchmark.run(settings)


def evaluate(settings: config.Eval) -> None:
    """How well a drafter drafts: acceptance on your prompts, by category and slot, real and simulated. What it is worth in time: hsprod bench.
    Exit code 1: something in it cannot be right."""
    logs.setup("WARNING")
    from producer import eval_report
    raise typer.Exit(eval_report.run(settings))


def status(settings: config.Status) -> None:
    """What this box's producer is doing."""
    from common import status as screen
    from producer import seen
    path = settings.state_dir / "status.json"
    screen.show(lambda: [path] if path.exists() else [], "hsprod serve", seen.rows, as_json=settings.json, watch=settings.watch)


def forget(settings: config.Forget) -> None:
    """Keep no samples for a trainer that never comes back. A running producer does it at once; nothing else ever lets go of one."""
    from producer import forgetting
    print(forgetting.forget(settings.state_dir, settings.name))


def keygen(settings: config.Keys) -> None:
    """Make this box's CURVE key pair and print the public key, for `hstrain trust`."""
    from protocol import keys
    print(keys.generate(settings.keys))


def allow(settings: config.Allow) -> None:
    """Let a trainer connect, by the public key that its `hstrain keygen` printed. A running producer sees it at once."""
    from protocol import keys
    print("allowed" if keys.allow(settings.keys, settings.key, settings.comment) else "was allowed already")


def doctor(settings: config.Doctor) -> None:
    """Whether this box can serve with these options: what is wrong, and the command that mends it. Exit code 1: something is."""
    from producer import doctor as checks
    raise typer.Exit(checks.show(settings))


app.command("keygen")(as_command(config.Keys, "HSPROD", keygen))
app.command("allow")(as_command(config.Allow, "HSPROD", allow))
app.command("serve")(as_command(config.Serve, "HSPROD", serve))
app.command("generate")(as_command(config.Generate, "HSPROD", generate))
app.command("eval")(as_command(config.Eval, "HSPROD", evaluate))
app.command("bench")(as_command(config.Bench, "HSPROD", bench))
app.command("status")(as_command(config.Status, "HSPROD", status))
app.command("doctor")(as_command(config.Doctor, "HSPROD", doctor))
app.command("forget")(as_command(config.Forget, "HSPROD", forget))


def main() -> None:
    service.run(app)
