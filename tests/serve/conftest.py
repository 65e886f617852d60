from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ray import serve

from app import builder
from app.serve_config import GRPC_SERVICER
from tests.keyed_app import KeyedApp, Keys, deployed_with_keys
from tests.openai_app import ARGS as openai_app_args
from tests.openai_app import OpenAIApp
from tests.running_app import APP_NAME, Deploy, RunningApp, free_port

if TYPE_CHECKING:
    from tests.reference_text import ReferenceText

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of an app that several files share come one after the other, so that it is deployed once."""
    here = [number for number, item in enumerate(items) if item.path.parent == FOLDER]
    for number, item in zip(here, sorted((items[number] for number in here), key=shared_app), strict=True):
        items[number] = item


def shared_app(item: pytest.Item) -> int:
    """Which one a test uses, 0 for none. A file that deploys the OpenAI tests' app itself is last at it."""
    if getattr(getattr(item, "module", None), "ARGS", None) is openai_app_args:
        return 2
    fixtures = getattr(item, "fixturenames", ())
    return 3 if "openai_app" in fixtures else 1 if "keyed_app" in fixtures else 0


@dataclass(frozen=True)
class Ports:
    http: int
    grpc: int


@pytest.fixture(scope="session")
def ports(ray_cluster: None) -> Iterator[Ports]:
    """Serve's proxies on free ports, as the configurations start them."""
    ports = Ports(free_port(), free_port())
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": ports.http},
        grpc_options={"port": ports.grpc, "grpc_servicer_functions": [GRPC_SERVICER]},
    )
    yield ports
    serve.shutdown()


@pytest.fixture(scope="session")
def quick_stop() -> Iterator[None]:
    """A replica that is to stop looks at once whether it has requests left, and not after Serve's two seconds: as
    `deployments` in a configuration can say. Ingress and the others stop one after the other."""
    option = {"graceful_shutdown_wait_loop_s": 0.1}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ControlServer", "Ingress"):
            patch.setattr(builder, name, getattr(builder, name).options(**option))
        for role, deployment in list(builder._DEPLOYMENTS.items()):
            patch.setitem(builder._DEPLOYMENTS, role, deployment.options(**option))
        yield


@pytest.fixture(scope="session")
def deploy(ports: Ports, quick_stop: None) -> Deploy:
    """Deploys the app with given `args`; the same `args` again return the running one."""
    running: dict[str, RunningApp] = {}

    def run(args: Mapping[str, Any]) -> RunningApp:
        key = json.dumps(args, sort_keys=True, default=str)
        if key not in running:
            if running:
                serve.delete(APP_NAME)
                running.clear()
            serve.run(builder.build(dict(args)), name=APP_NAME, route_prefix="/")
            running[key] = RunningApp(f"http://127.0.0.1:{ports.http}", f"127.0.0.1:{ports.grpc}")
        running[key].wait_healthy()
        return running[key]

    return run


@pytest.fixture(scope="module")
def openai_app(deploy: Deploy) -> Iterator[OpenAIApp]:
    """The app that the OpenAI tests share, with the official client."""
    app = OpenAIApp.of(deploy(openai_app_args))
    with app.client:
        yield app


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys.made_in(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def keyed_app(deploy: Deploy, keys: Keys) -> Iterator[KeyedApp]:
    """The app that the tests of API keys share."""
    with deployed_with_keys(deploy, keys) as app:
        yield app


@pytest.fixture(scope="session")
def reference() -> ReferenceText:
    """The default model in transformers."""
    from tests.reference_text import ReferenceText

    return ReferenceText()
