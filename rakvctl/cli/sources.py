"""Where the value of an option is from."""

import typer


def is_default(context: typer.Context, name: str) -> bool:
    """Whether the user has said nothing of an option, neither on the command line nor in the environment."""
    return _source(context, name) == "DEFAULT"


def is_typed(context: typer.Context, name: str) -> bool:
    """Whether an option stands on the command line."""
    return _source(context, name) == "COMMANDLINE"


def _source(context: typer.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    return "DEFAULT" if source is None else source.name
