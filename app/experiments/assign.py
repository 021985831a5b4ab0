"""Who gets which arm: weighted rendezvous hashing over a key, or chance where there is no key.

For each arm the hash of (experiment, salt, arm, key) gives a uniform number u; the arm with the smallest ``-ln(u) / weight``
takes the key. These are exponential clocks with the weights as rates, so an arm wins a share of the keys equal to its share
of the weights. Raising one arm's weight only makes its own clock faster: keys move to it, from the others, and no more of
them than the shares differ. The answer depends on nothing but the arguments, so it is the same after a restart and on
another machine.

    blake2b(digest_size=8, key=salt, person="graftserve-arm"), over experiment, arm and key, each with its length in
    8 bytes before it, little-endian; u = (digest + 1/2) / 2**64
"""

from __future__ import annotations

import math
import random
from hashlib import blake2b

from app.experiments.experiment import Arm, Experiment

_chance = random.SystemRandom()


def choose(experiment: Experiment, key: str | None) -> Arm:
    """The arm of a key; without one, an arm drawn by the weights."""
    arms = [arm for arm in experiment.arms if arm.weight > 0]
    if key is None or not experiment.sticky:
        return _chance.choices(arms, [arm.weight for arm in arms])[0]
    return min(arms, key=lambda arm: -math.log(_uniform(experiment, arm.name, key)) / arm.weight)


def unit_of(experiment: Experiment, key: str) -> str:
    """What is kept of a key: 16 hexadecimal digits that cannot be turned back without the salt and a guess of the key."""
    return _digest(experiment, b"graftserve-unit", key).hex()


def _uniform(experiment: Experiment, arm: str, key: str) -> float:
    digest = int.from_bytes(_digest(experiment, b"graftserve-arm", arm, key), "little")
    return min((digest + 0.5) / 2**64, 1 - 2**-53)  # below 1 also after rounding, so that its logarithm is not 0


def _digest(experiment: Experiment, purpose: bytes, *parts: str) -> bytes:
    hashed = blake2b(digest_size=8, key=bytes.fromhex(experiment.salt), person=purpose)
    for part in (experiment.name, *parts):
        text = part.encode("utf-8", "surrogatepass")
        hashed.update(len(text).to_bytes(8, "little") + text)
    return hashed.digest()
