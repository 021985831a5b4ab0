"""Cost profiles that come with the program: other machines as rooflines, written by :mod:`scheduler.roofline`."""

from pathlib import Path

PROFILES = Path(__file__).resolve().parent
