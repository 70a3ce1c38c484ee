"""`k3 keys` and `k3 usage`: the API keys of this machine's server, which may be running, and what they have used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from openk3.terminal import AsJson, print_json

if TYPE_CHECKING:
    from openk3.serve.state.database import Database

keys_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Make, list and revoke the server's API keys."
)


@contextmanager
def _state() -> Iterator[Database]:
    """The database of this machine's server, which may be running."""
    from openk3.serve.state.server import default_state_folder, open_database

    database = open_database(default_state_folder())
    try:
        yield database
    finally:
        database.close()


_LIMITS = "Limits"


@keys_app.command("create")
def keys_create(
    name: Annotated[str, typer.Argument(help="Whose key it is, for you to tell them apart.")],
    requests_per_minute: Annotated[
        int | None, typer.Option("--requests-per-minute", min=1, help="None: no limit.", rich_help_panel=_LIMITS)
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option("--tokens-per-minute", min=1, help="Prompts and replies.", rich_help_panel=_LIMITS)
    ] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option("--tokens-per-day", min=1, help="Since midnight UTC.", rich_help_panel=_LIMITS)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it. It is shown this once: only a hash is kept.

    From the first key on the API asks everybody for one, also a server that
    is running.

      [cyan]k3 keys create "Ada's laptop"[/cyan]
      [cyan]k3 keys create trial --requests-per-minute 10 --tokens-per-day 100000[/cyan]
    """
    from openk3.serve.keys.store import KeyStore

    with _state() as database:
        key, text = KeyStore(database).create(
            name,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            tokens_per_day=tokens_per_day,
        )
    print_json(key.to_json() | {"key": text}) if as_json else typer.echo(text)


@keys_app.command("list")
def keys_list(as_json: AsJson = False) -> None:
    """List the keys, the revoked ones too, without their secrets."""
    from openk3.serve.keys.report import keys_text
    from openk3.serve.keys.store import KeyStore

    with _state() as database:
        keys = KeyStore(database).list()
    print_json({"keys": [key.to_json() for key in keys]}) if as_json else typer.echo(keys_text(keys))


@keys_app.command("revoke")
def keys_revoke(key_id: Annotated[str, typer.Argument(help="The id, as k3 keys list shows it.")]) -> None:
    """Make a key worthless, at once and for good."""
    from openk3.serve.keys.store import KeyStore

    with _state() as database:
        if not KeyStore(database).revoke(key_id):
            raise ValueError(f"there is no key {key_id!r} that works: k3 keys list shows their ids")
    typer.echo(f"{key_id} is revoked")


def usage(
    days: Annotated[int, typer.Option("--days", min=1, max=3660, help="How many, today included.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Show what each key has used: requests and tokens by day, endpoint and model.

    [cyan]k3 usage --days 7[/cyan]
    [cyan]k3 usage --json | jq '[.usage[].completion_tokens] | add'[/cyan]
    """
    from openk3.serve.keys.ledger import Ledger
    from openk3.serve.keys.report import usage_text
    from openk3.serve.keys.store import KeyStore

    with _state() as database:
        ledger = Ledger(database)
        rows, names = ledger.rows(days=days), {key.id: key.name for key in KeyStore(database).list()}
        ledger.close()
    if as_json:
        print_json({"usage": [{"key": row.owner or None, **row.to_json()} for row in rows]})
    else:
        typer.echo(usage_text(rows, names))
