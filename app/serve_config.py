"""A Serve configuration file, checked before Serve sees it.

Serve drops keys that it doesn't know in silence, at nearly every level; so a misspelt `route_prefx` is a default that
no one asked for. Here every key of the file is held against Serve's own schema, and `args` against our settings.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from app.overlay import OVERLAY_VARIABLE
from app.ray_service import PLACE, is_kubernetes, serve_config_in
from app.settings import AppSettings, load_settings
from app.settings_error import SettingsError, shown
from app.yaml_mapping import parse_yaml, read_text

IMPORT_PATH = "app.builder:build"
"""What an application of ours names as its `import_path`."""
GRPC_SERVICER = "app.grpc_api.servicer.add_to_server"
"""What `grpc_options.grpc_servicer_functions` names for our service."""
_GENERATED_SERVICER = "app.grpc_api.inference_pb2_grpc.add_InferenceServicer_to_server"
CONTROLLER = "ControllerServer"
"""The deployment whose `user_config` has settings of `moves`."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A configuration file that holds: its content, and the settings of its one application of ours."""

    content: dict[str, Any]
    settings: AppSettings


def read_serve_config(path: str | Path, overlay_path: str | Path | None = None) -> ServeConfig:
    """Reads and checks a file for `serve run` or `serve deploy`, or the configuration in a RayService of KubeRay.

    Args:
        path: the YAML file.
        overlay_path: merged over the application's args, see settings.load_settings.

    Raises: SettingsError, with everything that is wrong: no YAML, keys or values that Serve does not know, not exactly
    one application with our import path, settings that can't be used.
    """
    name = str(path)
    text = read_text(Path(path), name, "name a Serve configuration file")
    content = parse_yaml(text, name)
    if not isinstance(content, dict) or not is_kubernetes(content):
        return _checked(_mapping(content, name), overlay_path)
    mapping = _mapping(serve_config_in(content, text, name), f"{name}: {PLACE}")
    try:
        return _checked(mapping, overlay_path)
    except SettingsError as error:
        raise SettingsError([f"{PLACE}: {line}" for line in error.problems]) from error


def _checked(content: dict[str, Any], overlay_path: str | Path | None) -> ServeConfig:
    problems = [*unknown_keys(content, ServeDeploySchema), *_servicer_problems(content)]
    try:
        ServeDeploySchema.model_validate(content)
    except ValidationError as error:
        problems += [f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors()]
        raise SettingsError(problems) from error
    ours = [application for application in content["applications"] if application["import_path"] == IMPORT_PATH]
    if len(ours) != 1:
        given = ", ".join(repr(application["import_path"]) for application in content["applications"]) or "none"
        problems.append(
            f"applications: {len(ours)} have import_path {IMPORT_PATH}, and exactly one must (given: {given})"
        )
        raise SettingsError(problems)
    try:
        settings = load_settings(ours[0].get("args"), overlay_path)
    except SettingsError as error:
        raise SettingsError(problems + [f"args: {line}" for line in error.problems]) from error
    problems += _problems_of_deployments(ours[0], settings)
    problems += _problems_of_live_settings(ours[0], settings)
    if problems:
        raise SettingsError(problems)
    return ServeConfig(content, settings)


def deployments_in(mode: str) -> list[str]:
    """Names of the deployments that an application has in a mode."""
    workers = ["MonolithicServer"] if mode == "monolithic" else ["PrefillServer", "DecodeServer"]
    return ["Ingress", "ControlServer", *([CONTROLLER] if mode == "balanced" else []), *workers]


def _problems_of_deployments(application: Mapping[str, Any], settings: AppSettings) -> Iterator[str]:
    """Serve would refuse the whole application for one that there is not, when it is deployed."""
    there = deployments_in(settings.mode)
    for deployment in application.get("deployments") or ():
        if deployment["name"] not in there:
            yield (
                f"deployments: {deployment['name']!r} is none of an application in mode '{settings.mode}', which has "
                f"{', '.join(there)}; take the entry away, or change the mode"
            )


def _problems_of_live_settings(application: Mapping[str, Any], settings: AppSettings) -> Iterator[str]:
    """Of what the controller of moves would refuse while it runs."""
    for deployment in application.get("deployments") or ():
        given = deployment.get("user_config")
        if deployment["name"] != CONTROLLER or given is None:
            continue
        try:
            settings.moves.controller().changed(given)
        except ValueError as error:
            yield f"deployments: user_config of {CONTROLLER}: {error}"


def unknown_keys(content: Mapping[str, Any], schema: type[BaseModel], place: str = "") -> Iterator[str]:
    """A line for each key, at any depth, that the schema lacks. Free mappings such as `args` are passed over."""
    names = dict(schema.model_fields)
    names |= {field.alias: field for field in schema.model_fields.values() if field.alias}
    for key, value in content.items():
        here = f"{place}.{key}" if place else str(key)
        if key not in names:
            near = difflib.get_close_matches(str(key), list(names), n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"allowed here: {', '.join(sorted(names))}"
            yield f"{here}: unknown key, which Serve would drop in silence; {hint}"
            continue
        inner = next(_models_in(names[key].annotation), None)
        if inner is None:
            continue
        if isinstance(value, Mapping):
            yield from unknown_keys(value, inner, here)
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield from unknown_keys(item, inner, f"{here}.{i}")


def _servicer_problems(content: Mapping[str, Any]) -> Iterator[str]:
    options = content.get("grpc_options")
    named = options.get("grpc_servicer_functions") if isinstance(options, Mapping) else None
    if isinstance(named, list) and _GENERATED_SERVICER in named:
        yield (
            f"grpc_options.grpc_servicer_functions: {_GENERATED_SERVICER} loses the end of some streams that clients "
            f"leave, and their answers are made for nobody; name {GRPC_SERVICER} in its place"
        )


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _mapping(content: Any, path: str) -> dict[str, Any]:
    if content is None:
        raise SettingsError([f"{path} is empty, and a Serve configuration is a mapping with `applications`"])
    if not isinstance(content, dict):
        raise SettingsError([f"{path} holds {shown(content)}, and a Serve configuration is a mapping"])
    if "applications" not in content and (ours := sorted(content.keys() & AppSettings.model_fields.keys())):
        raise SettingsError(
            [
                f"{path} has no `applications`, but settings of ours at its top ({', '.join(ours)}): it looks like an "
                f"overlay. Check a whole configuration with it: {OVERLAY_VARIABLE}={path} python -m app.check "
                "serve_configs/llama13b.yaml"
            ]
        )
    return content
