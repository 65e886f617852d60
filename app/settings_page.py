"""Writes docs/configuration.md from the settings' own definitions, so that the page can't say anything else.

python -m app.settings_page > docs/configuration.md
python -m app.settings_page --check docs/configuration.md
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from app.settings import AppSettings
from kv.exit_status import status_of

_HEAD = """# Settings

<!-- Written by `python -m app.settings_page`; edit app/settings.py or that program instead. -->

What stands under `args` of the application in a file for `serve run` or `serve deploy`, such as those in
[serve_configs/](../serve_configs). Every key may be left out. An unknown key, a value of another type (`"5"` is not
`5`) and a value out of its range are refused when the application is built, all at once, each with what is allowed.
[What goes together](#what-goes-together) is checked once these are right. Of a key given twice Serve keeps the last one
in silence; `app.check` and `app.plan` refuse it.

    python -m app.check serve_configs/local.yaml       check a file, Serve's own keys included
    python -m app.plan serve_configs/llama13b.yaml     and work out what its devices have room for

A changed file is a new deployment: no setting changes in a running worker, and all of them are exchanged
([cluster.md](cluster.md#changing-it)). But those of `moves` change in the controller,
when `user_config` of the deployment ControllerServer names them
([moving-modules.md](moving-modules.md#settings-while-it-runs))."""

_UNITS = {
    "_s": "seconds",
    "_gib": "GiB",
    "_tokens": "tokens",
    "_blocks": "blocks",
    "_pages": "pages",
    "_requests": "requests",
    "_answers": "answers",
    "_threads": "threads",
    "_cpus": "CPUs",
    "_gpus": "GPUs",
    "_groups": "groups",
    "_utilization": "share",
    "replicas": "replicas",
}
"""By the end of a key's name."""

_RULES = """## What goes together

- `engine.kv_cache_gib` and `engine.kv_cache_blocks` exclude each other. A role that gives one takes the other of
  `engine` away.
- `engine.max_batch_tokens` is at least `engine.max_running_requests`: each running request takes one token a step.
- `engine.attention: flash` needs a CUDA device, and `block_tokens` in multiples of 256 where it is given.
- `engine.device: cuda` needs `num_gpus` above 0 for the role; with `num_gpus: 0` a worker stays on the CPU.
- In modes `static` and `balanced`, prefill and decode workers have the same `dtype`, `block_tokens` and
  `max_context_tokens`, since one reads what the other wrote. Where their device or attention differs,
  `engine.block_tokens` must be given.
- `moves.compute_weight` and `moves.memory_weight` are 1 together, and `moves.delta_home` < `moves.delta_heads` ≤
  `moves.delta_layers`: what has come home is not sent away at once."""

_VARIABLES: tuple[tuple[str, str], ...] = (
    (
        "EQUIPOISE_OVERLAY",
        "A YAML file with a mapping in the shape of `args`, merged over them before they are checked: mappings key by "
        "key; anything else, lists and null included, replaces what was there. Read by `app.check`, `app.plan` and the "
        "application's builder. The builder runs in the Ray cluster: set the variable for the command that starts the "
        "cluster (`serve run`, when none is running yet), not for a later `serve deploy`.",
    ),
    (
        "EQUIPOISE_CACHE",
        "Folder for models that were converted (GGUF, PyTorch files) or generated (`random/...`). Default: "
        "`$XDG_CACHE_HOME/equipoise`, else `~/.cache/equipoise`. On every node.",
    ),
    (
        "HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE",
        "The Hugging Face Hub's own: its cache folder, a mirror, the token that opens gated models, and `1` for never "
        "asking the Hub. On every node.",
    ),
    (
        "RAY_AUTH_MODE, RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH",
        "A local cluster that `serve run` starts asks for a token, which Ray 2.60 keeps in `~/.ray/auth_token`. "
        "Commands in another shell, such as `serve status`, send it only with `RAY_AUTH_MODE=token`; without it they "
        "fail with `Missing authentication token`. For "
        "clusters of `ray start`, make it with `ray get-auth-token --generate`, copy it to every node and set "
        "`RAY_AUTH_MODE=token` there. `disabled` switches it off: then whoever reaches Ray's ports can run code on the "
        "cluster.",
    ),
    (
        "TORCH_EXTENSIONS_DIR, CXX",
        "Folder for the kernels of `engine.kernels` (default: `$XDG_CACHE_HOME/torch_extensions`, else "
        "`~/.cache/torch_extensions`), and the compiler that builds them (default: `g++`). On every node.",
    ),
    ("RAY_ADDRESS", "The cluster that `serve run` uses instead of starting one."),
    ("RAY_DASHBOARD_ADDRESS", "The cluster that `serve deploy` and `serve status` talk to."),
    ("RAY_USAGE_STATS_ENABLED", "`0` keeps Ray from reporting its use to its makers. The Makefile sets it."),
    (
        "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION",
        "Share of a node's memory that Ray's object store may take: `store.dram_gib`, and what is under way, must fit.",
    ),
    (
        "RAY_object_spilling_directory",
        "Folder on each node for what does not fit into its object store; `ray start --object-spilling-directory` is "
        "the same. See [disk-tier.md](disk-tier.md#rays-spilling-below-the-dram-tier).",
    ),
    (
        "RAY_SERVE_ENABLE_HA_PROXY",
        "`1`, for every process of the cluster, puts HAProxy, which `ray[serve]` brings, before the ingress replicas "
        "in place of Serve's own proxy: a streamed token costs less on its way "
        "([cluster.md](cluster.md#small-machines)). It listens on all interfaces whatever `http_options.host` says, "
        "and every client seems to come from the proxy's machine: use it with `ingress.api_keys_file` only.",
    ),
    (
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S, RAY_SERVE_METRICS_EXPORT_INTERVAL_MS",
        "How often Serve's controller looks at everything (0.1 s if unset), and how often replicas pass on what they "
        "count (100 ms), though Ray reports it every 10 s. The Makefile and `deploy/` set 0.5 and 2000; for `serve "
        "run` and `ray start` by hand see [cluster.md](cluster.md#small-machines).",
    ),
    (
        "OMP_NUM_THREADS",
        "Not needed: a worker computes on `engine.torch_threads` threads, whatever this says.",
    ),
)


def settings_page() -> str:
    """The whole page, in Markdown, with a newline at its end."""
    tables = [_section(names, model) for names, model in _blocks(AppSettings)]
    variables = ["| variable | what it does |", "| --- | --- |"]
    variables += [f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {does} |" for names, does in _VARIABLES]
    return "\n\n".join([_HEAD, *tables, _RULES, "## Environment variables", "\n".join(variables)]) + "\n"


def _blocks(root: type[BaseModel]) -> list[tuple[list[str], type[BaseModel]]]:
    """(the places where it stands, the model) of each block of settings, the root ("") first, each before its parts."""
    places: dict[type[BaseModel], list[str]] = {root: [""]}

    def visit(model: type[BaseModel], place: str) -> None:
        for name, field in model.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                here = f"{place}.{name}" if place else name
                places.setdefault(inner, []).append(here)
                visit(inner, here)

    visit(root, "")
    return [(names, model) for model, names in places.items()]


def _section(names: Sequence[str], model: type[BaseModel]) -> str:
    title = "At the top" if names == [""] else ", ".join(f"`{name}`" for name in names)
    lines = [f"## {title}", "", _first_sentences(model), "", "| key | default | unit | allowed | meaning |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for key, field in model.model_fields.items():
        cells = (f"`{key}`", _default(field), _unit(key), _allowed(field), field.description or "")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _first_sentences(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split("\n\n")[0].split())


def _unit(key: str) -> str:
    return next((unit for end, unit in _UNITS.items() if key.endswith(end)), "")


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return ""
    return (
        "null"
        if value is None
        else "{}"
        if value == {}
        else f"`{str(value).lower() if value in (True, False) else value}`"
    )


def _allowed(field: FieldInfo) -> str:
    kinds = [part for part in _parts(field.annotation) if part is not type(None)]
    if any(get_origin(part) is Literal for part in kinds):
        return ", ".join(str(value) for part in kinds for value in get_args(part))
    kind = kinds[0]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "a block, see below"
    word = {int: "whole number", float: "number", bool: "true, false", str: "text"}.get(kind, "mapping")
    limits = [limit for item in field.metadata for limit in _limit(item)]
    return " ".join([word, ", ".join(limits)]).strip() + (", or null" if type(None) in _parts(field.annotation) else "")


def _parts(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _limit(item: object) -> Iterator[str]:
    match item:
        case annotated_types.Ge(ge=low):
            yield f"≥ {low:g}" if isinstance(low, int | float) else f"≥ {low}"
        case annotated_types.Gt(gt=low):
            yield f"> {low}"
        case annotated_types.Le(le=high):
            yield f"≤ {high}"
        case annotated_types.MultipleOf(multiple_of=unit):
            yield f"multiple of {unit}"
        case annotated_types.MinLen(min_length=1):
            yield "not empty"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 when `--check` finds that the file is not what would be written."""
    parser = argparse.ArgumentParser(
        prog="python -m app.settings_page",
        description="Write the page of settings to the standard output.",
        epilog="example: python -m app.settings_page > docs/configuration.md",
    )
    parser.add_argument("--check", type=Path, metavar="FILE", help="only say whether FILE is up to date")
    options = parser.parse_args(argv)
    if options.check is None:
        sys.stdout.write(settings_page())
        return 0
    if options.check.is_file() and options.check.read_text(encoding="utf-8") == settings_page():
        return 0
    print(f"{options.check} is out of date: run python -m app.settings_page > {options.check}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(status_of(main))
