"""Growth rules for one drafter at a time; each file is one rule and meets the engine through :mod:`tree.growth`."""
