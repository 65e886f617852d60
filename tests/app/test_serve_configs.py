from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.build_app import build_app
from ray.serve.schema import ServeDeploySchema

from app import check
from app.builder import build
from app.serve_config import GRPC_SERVICER, IMPORT_PATH, deployments_in, read_serve_config, unknown_keys
from app.settings import SettingsError

FOLDER = Path(__file__).parents[2] / "serve_configs"
FILES = sorted(FOLDER.glob("*.yaml"))
OVERLAYS = sorted((FOLDER / "overlays").glob("*.yaml"))
MEASURED = sorted((FOLDER.parent / "load_tests" / "overlays").glob("*.yaml"))
OF_MOVES = [path for path in MEASURED if path.name.startswith(("moves-", "cycle-", "short-memory", "nothing-pays"))]
FOR_TWO_CORES = FOLDER / "overlays" / "cpu-tiny.yaml"


@pytest.fixture(autouse=True)
def _no_overlay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EQUIPOISE_OVERLAY", raising=False)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_shipped_file_holds(path: Path) -> None:
    config = read_serve_config(path)
    options = config.content["http_options"]
    if options["host"] != "127.0.0.1":
        assert config.settings.ingress.api_keys_file, "open to other machines without asking for a key"


def test_what_the_files_name_can_be_imported() -> None:
    module, _, function = IMPORT_PATH.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    module, _, function = GRPC_SERVICER.rpartition(".")
    assert callable(getattr(importlib.import_module(module), function))
    assert all(_servicers(path) in ([], [GRPC_SERVICER]) for path in FILES)


def _servicers(path: Path) -> list[str]:
    options = read_serve_config(path).content.get("grpc_options", {})
    named: list[str] = options.get("grpc_servicer_functions", [])
    return named


def test_the_named_files_are_there() -> None:
    assert {path.name for path in FILES} >= {
        "local.yaml",
        "local-monolithic.yaml",
        "local-2p1d.yaml",
        "local-balanced.yaml",
        "llama13b.yaml",
        "opt13b.yaml",
    }


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_every_overlay_goes_over_the_local_file(overlay: Path) -> None:
    assert (
        read_serve_config(FOLDER / "local.yaml", overlay).settings != read_serve_config(FOLDER / "local.yaml").settings
    )


@pytest.mark.parametrize("overlay", sorted(set(MEASURED) - set(OF_MOVES)), ids=lambda path: path.name)
def test_every_overlay_of_a_measurement_holds(overlay: Path) -> None:
    base = "local-2p1d.yaml" if overlay.name.startswith("zipf") else "local.yaml"
    settings = read_serve_config(FOLDER / base, overlay).settings
    assert settings.engine.dtype == "bfloat16"
    assert settings.store.share_prefixes == (not re.search("local|alone", overlay.name))
    if overlay.name.startswith("zipf"):  # which compare two ways to dispatch
        assert (settings.ingress.dispatch.policy == "load_aware") == settings.store.share_prefixes


@pytest.mark.parametrize("overlay", OF_MOVES, ids=lambda path: path.name)
def test_where_moves_are_measured_nothing_moves_by_itself(overlay: Path) -> None:
    loaded = read_serve_config(FOLDER / "local-balanced.yaml", overlay)
    moves = loaded.settings.moves
    assert not moves.automatic or moves.rho >= 1e6
    (application,) = loaded.content["applications"]
    assert not any(deployment["user_config"] for deployment in application["deployments"])  # which would stand over it


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_one_overlay_brings_every_file_onto_two_cores(path: Path) -> None:
    settings = read_serve_config(path, FOR_TWO_CORES).settings
    roles = [settings.role(role) for role in settings.roles]
    assert sum(role.replicas * role.num_gpus for role in roles) == 0
    cpus = sum(role.replicas * role.num_cpus for role in roles) + settings.ingress.replicas * settings.ingress.num_cpus
    assert cpus <= 2
    assert all(settings.engine_for(role).device == "cpu" for role in settings.roles)


def test_local_files_fit_two_cores() -> None:
    for path in FILES:
        if path.name.startswith("local"):
            settings = read_serve_config(path).settings
            roles = [settings.role(role) for role in settings.roles]
            assert sum(role.replicas * role.num_cpus for role in roles) + settings.ingress.num_cpus <= 2


def _at(content: Any, *keys: str | int) -> Any:
    for key in keys:
        content = content[key]
    return content


def _put(*keys: str | int, value: Any = 1) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        _at(content, *keys[:-1])[keys[-1]] = value

    return change


@pytest.fixture
def full() -> dict[str, Any]:
    """A file with something at every level that Serve knows."""
    content: dict[str, Any] = yaml.safe_load((FOLDER / "local.yaml").read_text())
    content["grpc_options"] = {"port": 9000, "grpc_servicer_functions": []}
    content["logging_config"] = {"log_level": "INFO"}
    content["applications"][0]["deployments"] = [
        {
            "name": "Ingress",
            "ray_actor_options": {"num_cpus": 0, "runtime_env": {"env_vars": {"ANY": "1"}}},
            "user_config": {"any": {"thing": 1}},
            "autoscaling_config": {"min_replicas": 1, "max_replicas": 2},
            "request_router_config": {"request_router_kwargs": {"any": 1}},
        }
    ]
    assert list(unknown_keys(content, ServeDeploySchema)) == []
    ServeDeploySchema.model_validate(content)
    return content


_APP = ("applications", 0)
_DEPLOYMENT = ("applications", 0, "deployments", 0)


@pytest.mark.parametrize(
    ("keys", "hint"),
    [
        (("proxy_lokation",), "proxy_location"),
        (("http_options", "prot"), "port"),
        (("grpc_options", "grpc_servicer_function"), "grpc_servicer_functions"),
        (("logging_config", "loglevel"), "log_level"),
        ((*_APP, "route_prefx"), "route_prefix"),
        ((*_DEPLOYMENT, "max_ongoing_request"), "max_ongoing_requests"),
        ((*_DEPLOYMENT, "ray_actor_options", "num_cpu"), "num_cpus"),
        ((*_DEPLOYMENT, "autoscaling_config", "min_replica"), "min_replicas"),
        ((*_DEPLOYMENT, "request_router_config", "request_router_clas"), "request_router_class"),
    ],
)
def test_an_unknown_key_is_found_at_every_level(full: dict[str, Any], keys: tuple[str | int, ...], hint: str) -> None:
    _put(*keys)(full)
    (line,) = unknown_keys(full, ServeDeploySchema)
    assert line.startswith(".".join(map(str, keys)) + ": unknown key")
    assert f"did you mean '{hint}'?" in line


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (_put("http_options", "prot"), "http_options.prot"),
        (_put("http_options", "port", value="x"), "http_options.port"),
        (
            _put(
                "grpc_options",
                "grpc_servicer_functions",
                value=["app.grpc_api.inference_pb2_grpc.add_InferenceServicer_to_server"],
            ),
            "name app.grpc_api.servicer.add_to_server in its place",
        ),
        (_put(*_APP, "args", "engin"), "args: engin: unknown key"),
        (_put(*_APP, "args", "mode", value="balance"), "args: mode: given str 'balance'"),
        (
            _put(*_APP, "deployments", value=[{"name": "ControllerServer", "user_config": {"roh": 2}}]),
            "deployments: user_config of ControllerServer: 'roh' is no setting of moves",
        ),
        (_put(*_APP, "import_path", value="other:build"), "(given: 'other:build')"),
        (lambda content: content.pop("applications"), "applications"),
    ],
)
def test_a_file_that_does_not_hold_is_refused(
    full: dict[str, Any], change: Callable[[dict[str, Any]], None], part: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(full))
    read_serve_config(path)
    change(full)
    path.write_text(yaml.safe_dump(full))
    with pytest.raises(SettingsError) as raised:
        read_serve_config(path)
    assert any(part in line for line in raised.value.problems)


def test_problems_of_serve_and_of_ours_are_told_together(full: dict[str, Any], tmp_path: Path) -> None:
    bad = copy.deepcopy(full)
    _put("http_options", "prot")(bad)
    _put(*_APP, "args", "engin")(bad)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(bad))
    with pytest.raises(SettingsError) as raised:
        read_serve_config(tmp_path / "config.yaml")
    assert len(raised.value.problems) == 2


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "can't be read"),
        ("[1]", "mapping"),
        ("a: [", "not YAML"),
        ("# nothing\n", "is empty"),
        ("engine: {device: cpu}\n", "looks like an overlay.*EQUIPOISE_OVERLAY="),
    ],
)
def test_what_is_no_configuration_is_refused_by_name(content: str | None, part: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError, match=part):
        read_serve_config(path)


def test_the_command_says_what_is_wrong_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([str(FOLDER / "local.yaml")]) == 0
    assert "mode static" in capsys.readouterr().out
    path = tmp_path / "config.yaml"
    path.write_text((FOLDER / "local.yaml").read_text().replace("http_options", "http_option"))
    assert check.main([str(path)]) == 2
    assert "did you mean 'http_options'?" in capsys.readouterr().err


def test_a_key_given_twice_is_refused_with_its_lines(tmp_path: Path) -> None:
    text = (FOLDER / "local.yaml").read_text()
    path = tmp_path / "config.yaml"
    path.write_text(text + "http_options: {port: 9000}\n")
    first = text.splitlines().index("http_options:") + 1
    last = len(text.splitlines()) + 1
    with pytest.raises(SettingsError, match=f"http_options: given twice, in line {first} and in line {last};"):
        read_serve_config(path)


def _with_keys_file(folder: Path) -> tuple[str, Path]:
    content = yaml.safe_load((FOLDER / "local.yaml").read_text())
    keys = folder / "keys"
    content["applications"][0]["args"]["ingress"]["api_keys_file"] = str(keys)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    return str(config), keys


def test_a_key_file_that_is_not_here_is_told_and_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, keys = _with_keys_file(tmp_path)
    assert check.main([config]) == 0
    assert f"warning: ingress.api_keys_file {keys} is not on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "status"), [("alice " + "0" * 64, 0), ("alice", 2), ("", 2)])
def test_a_key_file_that_is_here_is_read(
    line: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, keys = _with_keys_file(tmp_path)
    keys.write_text(line + "\n")
    assert check.main([config]) == status
    printed = capsys.readouterr()
    assert (str(keys) in printed.err) == (status == 2)
    assert ("are in order" in printed.out) == (status == 0)


def _with_store(folder: Path, **store: Any) -> str:
    content = yaml.safe_load((FOLDER / "local.yaml").read_text())
    content["applications"][0]["args"]["store"] = store
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    return str(config)


@pytest.mark.parametrize("folder", ["~nobody-has-this-name/kv", "a\0b"])
def test_a_folder_that_nobody_can_have_is_refused(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main([_with_store(tmp_path, disk={"folder": folder, "limit_gib": 1.0})]) == 2
    printed = capsys.readouterr()
    assert f"store.disk.folder: {folder!r}" in printed.err
    assert "are in order" not in printed.out
    assert check.main([_with_store(tmp_path, disk={"folder": folder, "limit_gib": 0.0})]) == 0, "it is not used"


@pytest.mark.parametrize("name", ["~nobody-has-this-name/policy", "a\0b", ".", "config.yaml"])
def test_a_policy_file_that_is_none_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = name if name[0] in "~a" else str(tmp_path / name)
    assert check.main([_with_store(tmp_path, policy_file=given)]) == 2
    assert "store.policy_file" in capsys.readouterr().err


def test_a_policy_file_that_is_not_here_is_told_and_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "policy.json"
    assert check.main([_with_store(tmp_path, policy_file=str(path))]) == 0
    assert f"warning: store.policy_file {path} is not on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "warning"),
    [
        ({}, ""),
        # 2 x 10 s for a link, 60 s for the move, 30 s for an answer and 10 s for an engine's turn.
        ({"moves": {"abandon_after_s": 120}}, "moves.abandon_after_s 120 s is no longer than the 120 s"),
        ({"moves": {"abandon_after_s": 121}}, ""),
        ({"mode": "static", "moves": {"abandon_after_s": 9}}, ""),
        (
            {"engine": {"device": "cuda"}, "prefill": {"num_gpus": 1}, "decode": {"num_gpus": 1}},
            "moves between workers on GPUs go through the host's memory",
        ),
    ],
)
def test_what_is_hardly_meant_of_moves_is_told_and_no_error(
    args: dict[str, Any], warning: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = yaml.safe_load((FOLDER / "local-balanced.yaml").read_text())
    content["applications"][0]["args"].update(args)
    del content["applications"][0]["deployments"]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(content))
    assert check.main([str(config)]) == 0
    printed = capsys.readouterr().err
    assert warning in printed
    assert bool(printed) == bool(warning)


@pytest.mark.parametrize("mode", ["static", "monolithic"])
def test_a_deployment_that_the_mode_does_not_have_is_refused(mode: str, tmp_path: Path) -> None:
    """As the file for `balanced` is with another mode: Serve would refuse all of it."""
    text = (FOLDER / "local-balanced.yaml").read_text()
    path = tmp_path / "config.yaml"
    path.write_text(text.replace("mode: balanced", f"mode: {mode}"))
    with pytest.raises(SettingsError, match=f"'ControllerServer' is none of an application in mode '{mode}'"):
        read_serve_config(path)


@pytest.mark.parametrize("mode", ["static", "balanced", "monolithic"])
def test_the_deployments_of_a_mode_are_those_that_are_built(mode: str) -> None:
    built = build_app(build({"mode": mode}), name="app", make_deployment_handle=lambda *_: None)
    assert sorted(deployment.name for deployment in built.deployments) == sorted(deployments_in(mode))
