"""The version of the installed distribution."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version


def version() -> str:
    """The distribution's version, or ``0+source`` when the code runs from a folder that was never installed."""
    try:
        return installed_version("graftserve")
    except PackageNotFoundError:
        return "0+source"
