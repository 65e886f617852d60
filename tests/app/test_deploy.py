"""The files of deploy/: what they say to Ray and to us holds, and their versions are those that are tested."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cluster_check import needs_of
from app.serve_config import read_serve_config
from load_tests.server_process import RAY_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy"
SERVICE = FOLDER / "rayservice.yaml"


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(SERVICE.read_text())
    return loaded


def container(group: dict[str, Any]) -> dict[str, Any]:
    (only,) = group["template"]["spec"]["containers"]
    return dict(only)


def test_what_kuberay_serves_holds_and_is_the_file_for_the_same_model() -> None:
    served, shipped = read_serve_config(SERVICE), read_serve_config(ROOT / "serve_configs" / "llama13b.yaml")
    assert served.content["http_options"]["host"] == "0.0.0.0"
    assert served.settings.ingress.api_keys_file
    for name in ("model", "mode", "engine", "prefill", "decode"):
        assert getattr(served.settings, name) == getattr(shipped.settings, name), name
    assert served.settings.store.dram_gib == shipped.settings.store.dram_gib


def test_there_are_as_many_gpus_as_workers_want(service: dict[str, Any]) -> None:
    settings = read_serve_config(SERVICE).settings
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    gpus = group["replicas"] * int(container(group)["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus == sum(settings.role(role).replicas * settings.role(role).num_gpus for role in settings.roles)
    assert int(group["rayStartParams"]["object-store-memory"]) == settings.plan.object_store_gib * 2**30


def test_there_are_cpus_enough_on_the_workers_alone(service: dict[str, Any]) -> None:
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    (group,) = cluster["workerGroupSpecs"]
    cpus = group["replicas"] * int(container(group)["resources"]["limits"]["cpu"])
    assert cpus >= needs_of(read_serve_config(SERVICE).settings).num_cpus + 1  # one for all that wait for messages


def test_clients_are_led_to_both_ports(service: dict[str, Any]) -> None:
    content = read_serve_config(SERVICE).content
    ports = container(service["spec"]["rayClusterConfig"]["headGroupSpec"])["ports"]
    # KubeRay's service for clients has the head's ports of such names, and no others.
    led_to = {port["containerPort"] for port in ports if port["name"] == "serve" or port["name"].startswith("serve-")}
    assert led_to == {content["http_options"]["port"], content["grpc_options"]["port"]}


def test_the_key_file_is_where_the_ingress_looks(service: dict[str, Any]) -> None:
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        mounts = {mount["name"]: mount["mountPath"] for mount in container(group)["volumeMounts"]}
        assert mounts["keys"] == "/keys"
        assert mounts.keys() == {volume["name"] for volume in group["template"]["spec"]["volumes"]}


def test_the_version_of_ray_is_the_one_that_is_tested(service: dict[str, Any]) -> None:
    (pinned,) = re.findall(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M)
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == pinned


def test_the_launchers_file_is_one_for_the_launcher() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((FOLDER / "ray-cluster.yaml").read_text())
    validate_config(prepare_config(config))
    assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])


def test_the_image_copies_what_it_installs_from() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    assert "--constraint constraints.txt" in text
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"constraints.txt", "pyproject.toml", "app", "README.md"} & set(ignored)


def test_ray_is_set_up_alike_wherever_we_start_it_load_tests_included() -> None:
    makefile, image = ((ROOT / name).read_text() for name in ("Makefile", "deploy/Dockerfile"))
    cluster = yaml.safe_load((FOLDER / "ray-cluster.yaml").read_text())
    starts = [line for each in ("head", "worker") for line in cluster[f"{each}_start_ray_commands"]]
    for name, value in RAY_ENVIRONMENT.items():
        assert f"export {name} ?= {value}\n" in makefile
        for line in (*re.findall(r"^ENV (.*)$", image, flags=re.M)[-1:], *starts):
            assert f"{name}={value} " in line + " "


def test_models_are_kept_where_the_hub_looks(service: dict[str, Any]) -> None:
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        env = {each["name"]: each.get("value") for each in container(group)["env"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container(group)["volumeMounts"]}
        (volume,) = (each for each in group["template"]["spec"]["volumes"] if each["name"] == mounts[env["HF_HOME"]])
        assert "persistentVolumeClaim" in volume
        user = group["template"]["spec"]["securityContext"]["fsGroup"]
        assert f"--uid {user} " in (FOLDER / "Dockerfile").read_text()
