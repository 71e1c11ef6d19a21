"""The commands `lmpool adapters list`, `add` and `remove`: which LoRA adapters the workers of a model serve."""

from __future__ import annotations

from typing import Annotated

import typer

from lmpool.producer.cli.options import AsJson, ModelName, Prefix, RedisUrl, Timeout, Waits, run, when_absent
from lmpool.producer.cli.tables import Column, fitting
from lmpool.producer.producer import Producer
from lmpool.terminal import Terminal, say, say_json

adapters_app = typer.Typer(name="adapters", help="The LoRA adapters of a served model.", no_args_is_help=True)

Replicas = Annotated[
    int, typer.Option(min=0, help="Wait until so many replicas of the server have the change, for a failover.")
]
AdapterName = Annotated[str, typer.Argument(help="What requests call the adapter.")]


@adapters_app.command("list")
def list_adapters(
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    timeout: Timeout = 60.0,
    waits: Waits = True,
    as_json: AsJson = False,
) -> None:
    """Show the adapters that requests may name."""

    async def ask() -> dict[str, str]:
        async with Producer(
            model, redis=redis, prefix=prefix, timeout=timeout, when_absent=when_absent(waits)
        ) as producer:
            return await producer.adapters()

    found = run(ask())
    if as_json:
        say_json(found)
        return
    if not found:
        say("the model has no adapters")
        return
    console = Terminal()
    columns = [Column("adapter", sorted(found), 0), Column("revision", [found[name] for name in sorted(found)], 0)]
    console.print(fitting(None, columns, console.width))


@adapters_app.command()
def add(
    name: AdapterName,
    source: Annotated[str, typer.Argument(help="Its folder, or its name on the hub, on the workers' machines.")],
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    replicas: Replicas = 0,
    timeout: Timeout = 60.0,
    waits: Waits = True,
) -> None:
    """Have all workers serve an adapter, or another one instead of that of this name."""

    async def change() -> str:
        async with Producer(
            model, redis=redis, prefix=prefix, timeout=timeout, when_absent=when_absent(waits)
        ) as producer:
            return await producer.add_adapter(name, source, replicas=replicas)

    say(f"{name} is in service, revision {run(change())}")


@adapters_app.command()
def remove(
    name: AdapterName,
    model: ModelName = None,
    redis: RedisUrl = None,
    prefix: Prefix = "lmpool",
    replicas: Replicas = 0,
    timeout: Timeout = 60.0,
    waits: Waits = True,
) -> None:
    """Have no worker serve an adapter any more."""

    async def change() -> None:
        async with Producer(
            model, redis=redis, prefix=prefix, timeout=timeout, when_absent=when_absent(waits)
        ) as producer:
            await producer.remove_adapter(name, replicas=replicas)

    run(change())
    say(f"{name} is not in service any more")
