"""`vla-fleet keys`: who may connect to the gateway, and as what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fleet.cli.options import AsJson, echo_json


class _NamesOrCommand(TyperGroup):
    """`keys NAME...` is short for `keys make NAME...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        short = args and args[0] not in (*self.commands, "--help")
        return super().parse_args(ctx, ["make", *args] if short else args)


app = typer.Typer(
    name="keys",
    help="Who may connect to the gateway, and as what: `keys NAME...` makes keys.",
    cls=_NamesOrCommand,
    no_args_is_help=True,
    rich_markup_mode=None,
)
Teaches = Annotated[
    list[str] | None,
    typer.Option(
        metavar="script|beside|demonstrations|none",
        show_default=False,
        help="What is learned from it by its own word, without a lease of the fleet: what its scripted operator did, "
        "what a person beside it did, whole demonstrations; may stand several times. Default: nothing for a new key.",
    ),
]
Directory = Annotated[Path, typer.Option("--keys", help="Key directory of the gateway.")]
_HERE = Path("keys")


@app.command()
def make(
    names: Annotated[list[str], typer.Argument(help="Names of robots and processes that may connect.")],
    directory: Directory = _HERE,
    role: Annotated[
        str,
        typer.Option(
            help="What they are: edge (a robot), trainer, evaluator, demonstrator, thinker, console or teleoperator; "
            "default: what a name begins with, else a robot.",
            show_default=False,
        ),
    ] = "",
    teaches: Teaches = None,
) -> None:
    """Make CURVE keys for the gateway and for NAMES; existing ones stay, and get what --teaches says."""
    from wire.transport.keys import GATEWAY, check_role, check_teaching, make_keys

    rights = check_teaching(teaches) if teaches else None
    elsewhere = make_keys(directory, [GATEWAY])
    elsewhere += make_keys(directory, names, check_role(role) if role else None, rights)
    made = ", ".join(name for name in [GATEWAY, *names] if name not in elsewhere)
    if made:
        typer.echo(f"keys of {made} are in {directory}; give each machine its own .key_secret only.")
    for name in elsewhere:
        typer.echo(
            f"'{name}' has a key whose secret is not in {directory}: it stays as it is. To replace it: "
            f"`vla-fleet keys revoke {name} --keys {directory}`, then make it anew."
        )


@app.command()
def token(
    robot: Annotated[str, typer.Argument(help="Name that the robot gets.")],
    directory: Directory = _HERE,
    minutes: Annotated[float, typer.Option(min=0.1, help="For so long it can be used, once.")] = 60.0,
    teaches: Teaches = None,
) -> None:
    """Print a token by which a robot joins: `vla-fleet edge --join TOKEN --gateway tcp://HOST:PORT` on its computer."""
    from wire.identity.join_tokens import make_token
    from wire.transport.keys import check_teaching

    typer.echo(make_token(directory, robot, minutes, teaches=check_teaching(teaches or ())))


@app.command()
def join(
    token: Annotated[str, typer.Argument(help="What `keys token` printed on the gateway's machine.")],
    gateway: Annotated[str, typer.Option(help="The gateway, tcp://HOST:PORT.")],
    directory: Annotated[Path, typer.Option("--keys", help="Key directory of this computer.")] = _HERE,
) -> None:
    """Make this computer's own key and have it filed, for a robot that something else starts, such as ROS 2 or Ray."""
    from wire.identity.enrolment import join_fleet

    typer.echo(f"'{join_fleet(directory, token, gateway)}' has its key in {directory}.")


@app.command("list")
def list_keys(directory: Directory = _HERE, json: AsJson = False) -> None:
    """Who may connect, who may join, and whose key was revoked."""
    from wire.identity.join_tokens import open_tokens
    from wire.transport.keys import records

    filed, revoked, tokens = records(directory), records(directory, "revoked"), open_tokens(directory)
    if json:
        waiting = [{"name": one.name, "role": one.role, "expires": one.expires} for one in tokens]
        echo_json({"keys": filed, "tokens": waiting, "revoked": revoked})
        return
    if not (filed or revoked or tokens):
        typer.echo(f"there are no keys in {directory}; `vla-fleet keys NAME...` makes some.")
        return
    rows: list[Sequence[str]] = [
        (one.name, one.role, ",".join(sorted(one.may_teach)), f"made {one.made:%Y-%m-%d %H:%M}", one.public)
        for one in filed
    ]
    rows += [
        (one.name, one.role, ",".join(one.teaches), f"may join until {one.expires:%Y-%m-%d %H:%M}", "")
        for one in tokens
    ]
    rows += [(one.name, one.role, "", "revoked", one.public) for one in revoked]
    for name, role, teaches, state, public in rows:
        typer.echo(f"{name:24} {role:13} {state:32} {teaches or '-':22} {public}".rstrip())


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name that the key is filed under.")], directory: Directory = _HERE
) -> None:
    """Take a key back for good: a gateway that runs cuts its connections within a second."""
    from wire.errors import storage_errors
    from wire.transport import keys

    with storage_errors("revoking a key", directory):
        record = keys.revoke(directory, name)
    typer.echo(
        f"the key of '{name}' ({record.role}, {record.public}) is revoked; `vla-fleet keys {name}` makes a new one."
    )
