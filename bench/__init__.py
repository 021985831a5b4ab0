"""Measurements, run from the repository's root: ``python -m bench.forward``, ``python -m bench.decode``. Not in the wheel."""
