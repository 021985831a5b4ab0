"""Measurements, run from the repository's root: ``python -m bench.forward``, ``python -m bench.load``. Not in the wheel."""
