"""The client side of the command line (filled below)."""
import typer
def register(app: typer.Typer) -> None:
    """Add the commands of this side."""
