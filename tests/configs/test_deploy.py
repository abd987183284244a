"""The files under configs/deploy: what they ask of us exists, and they agree with each other.

`python tests/configs/check_deploy.py` checks them with the tools of those they are written for.
"""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from deploy_files import (
    container,
    documents,
    serve_commands,
    stages,
    unit_lines,
    with_files_here,
)
from metric_names import metric_names, named_in
from places import DEPLOY, ROOT

from jitney.engine.cli import main
from jitney.engine.common.errors import ConfigError
from jitney.engine.config.layers import settings
from jitney.engine.fleet.command import ray_application
from jitney.engine.fleet.config import FleetConfig
from jitney.engine.fleet.ingress import _FLEET_ROUTES
from jitney.engine.fleet.sections import ReplicasSection
from jitney.engine.server.http.routes import ROUTES

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
COMMANDS = list(serve_commands())
MANIFESTS = ("kubernetes/gpu.yaml", "kubernetes/tpu.yaml")
COMMON, FLEET, RAY = (f"kubernetes/{name}.yaml" for name in ("common", "fleet", "ray"))
#: Of our images: targets of the Dockerfile, and what one is built with beside its own.
TAGS = ("cpu", "cuda12", "tpu", "fleet", "fleet-cuda12")
#: Settings that name the files of keys, and those that would hold keys themselves.
KEY_FILES = ("JITNEY_API_KEY_FILE", "JITNEY_ADMIN_KEY_FILE")
KEYS_IN_ENVIRONMENT = ("JITNEY_API_KEYS", "JITNEY_ADMIN_KEYS")
#: Seconds that preStop waits.
PRE_STOP_S = 5


def drain_s(words: list[str]) -> float:
    return float(words[words.index("--drain-s") + 1])


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITNEY_API_KEYS", "a-user-s-key")


@pytest.mark.parametrize("where, words", COMMANDS, ids=[where for where, _ in COMMANDS])
def test_every_command_is_one_that_serve_takes(
    where: str,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path,
):
    (tmp_path / "jitney.toml").write_text((ROOT / "configs" / "l4.toml").read_text())
    words = [word.replace("/etc/jitney/jitney.toml", f"{tmp_path}/jitney.toml") for word in words]
    assert words[0] == "serve"
    assert main([*with_files_here(words), "--print-config"]) == 0, capsys.readouterr().err
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["server"]["port"] == 8000
    assert printed["server"]["insecure"] is False


def test_commands_were_found_everywhere():
    assert {where for where, _ in COMMANDS} == {
        "Dockerfile",
        "compose.yaml",
        "compose.cuda12.yaml",
        *MANIFESTS,
        "jitney.service",
        "sky.yaml",
        "docs/deploy.md",
    }


def test_without_a_key_the_image_refuses_to_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("JITNEY_API_KEYS")
    words = dict(COMMANDS)["Dockerfile"]
    assert main([*words, "--print-config"]) == 2
    assert "no API key is set" in capsys.readouterr().err


def test_paths_that_are_asked_for_are_routes():
    asked = set(re.findall(r"127\.0\.0\.1:8000(/\w+)", (DEPLOY / "Dockerfile").read_text()))
    for file in MANIFESTS:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked.add(container(file)[probe]["httpGet"]["path"])
    (task,) = documents("sky.yaml")
    asked.add(task["service"]["readiness_probe"]["path"])
    (prometheus,) = documents("prometheus/prometheus.yml")
    asked.add(prometheus["scrape_configs"][0]["metrics_path"])
    monitor = next(
        part for part in documents("kubernetes/common.yaml") if part["kind"] == "PodMonitor"
    )
    asked.add(monitor["spec"]["podMetricsEndpoints"][0]["path"])
    assert asked == {"/startupz", "/livez", "/readyz", "/metrics"}
    assert not asked - {route.path for route in ROUTES if route.method == "GET"}


@pytest.mark.parametrize("file", MANIFESTS)
def test_a_pod_gets_the_time_that_a_drain_takes(file: str):
    (document,) = documents(file)
    pod = document["spec"]["template"]["spec"]
    waits = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert waits == ["sleep", str(PRE_STOP_S)]
    assert pod["terminationGracePeriodSeconds"] > PRE_STOP_S + drain_s(container(file)["args"])


@pytest.mark.parametrize("file", MANIFESTS)
def test_a_pod_hears_of_no_service_by_the_names_of_our_settings(file: str):
    """A service named jitney would be JITNEY_PORT=tcp://... in the environment."""
    (document,) = documents(file)
    spec = document["spec"]
    assert spec["template"]["spec"]["enableServiceLinks"] is False
    named = {entry["name"] for entry in container(file)["env"]} - {"HF_TOKEN"}
    assert named <= {setting.env for setting in settings().values()}
    names = {part["metadata"]["name"] for part in documents("kubernetes/common.yaml")}
    assert spec["serviceName"] in names


def test_the_parts_of_the_manifests_find_each_other():
    common = {part["kind"]: part for part in documents("kubernetes/common.yaml")}
    scaled = common["ScaledObject"]["spec"]["scaleTargetRef"]
    for file in MANIFESTS:
        (document,) = documents(file)
        assert (document["kind"], document["metadata"]["name"]) == (scaled["kind"], scaled["name"])
        labels = document["spec"]["template"]["metadata"]["labels"]
        assert labels == document["spec"]["selector"]["matchLabels"] == {"app": "jitney"}
        (port,) = container(file)["ports"]
        assert (port["name"], port["containerPort"]) == ("http", 8000)
    for part in documents("kubernetes/common.yaml"):
        if part["kind"] == "Service":
            assert part["spec"]["selector"] == {"app": "jitney"}
            assert part["spec"]["ports"][0]["targetPort"] == "http"
    queries = " ".join(
        part["metadata"]["query"] for part in common["ScaledObject"]["spec"]["triggers"]
    )
    assert named_in(queries) and not named_in(queries) - metric_names()
    assert "jitney_predicted_wait_seconds" in queries


def test_the_unit_gives_a_drain_its_time_and_wrong_settings_no_second_try():
    service = dict(unit_lines("Service"))
    command = dict(COMMANDS)["jitney.service"]
    assert float(service["TimeoutStopSec"]) > drain_s(command)
    assert service["Restart"] == "on-failure" and service["RestartPreventExitStatus"] == "2"
    assert {"DynamicUser", "NoNewPrivileges"} <= {
        key for key, value in service.items() if value == "yes"
    }
    assert service["ProtectSystem"] == "strict" and service["MemoryMax"]
    assert "/var/cache/jitney" in service["Environment"] and service["CacheDirectory"] == "jitney"


def test_compose_gives_a_drain_its_time():
    services = documents("compose.yaml")[0]["services"]
    grace = int(services["jitney"]["stop_grace_period"].removesuffix("s"))
    assert grace > drain_s(services["jitney"]["command"])
    overlay = documents("compose.cuda12.yaml")[0]["services"]["jitney"]
    assert grace > drain_s(overlay["command"])
    assert overlay["build"]["target"] in stages()


def test_what_compose_mounts_is_there():
    for service in documents("compose.yaml")[0]["services"].values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), source
    (board,) = documents("grafana/provisioning/dashboards/jitney.yml")
    assert board["providers"][0]["options"]["path"] == "/var/lib/grafana/dashboards"
    assert json.loads((ROOT / "dashboard" / "grafana.json").read_text())["title"] == "Jitney"


def fleet_toml(file: str, folder: Path) -> Path:
    """What a file's ConfigMap holds, reading our own files in place of those of the image."""
    (text,) = (
        part["data"]["fleet.toml"] for part in documents(file) if part["kind"] == "ConfigMap"
    )
    written = folder / "fleet.toml"
    written.write_text(text.replace("/etc/jitney/", f"{ROOT}/configs/"))
    return written


def test_the_fleet_finds_the_pods_and_drains_in_its_time(tmp_path: Path):
    config = FleetConfig.read(fleet_toml(FLEET, tmp_path))
    (model,) = config.models.values()
    assert isinstance(model, ReplicasSection)
    (url,) = model.urls
    found = urlsplit(url)
    services = {part["metadata"]["name"]: part["spec"] for part in documents(COMMON)}
    assert services[found.hostname]["clusterIP"] == "None", "its addresses are the pods'"
    assert services[found.hostname]["publishNotReadyAddresses"]
    assert container(MANIFESTS[0])["ports"][0]["containerPort"] == found.port
    for file in MANIFESTS:
        words = with_files_here(container(file)["args"])
        settings_of_it = tomllib.loads(Path(words[words.index("--config") + 1]).read_text())
        assert settings_of_it["model"]["id"] in config.models, "what the engines call it"
    parts = {part["kind"]: part for part in documents(FLEET)}
    labels = {"app": "jitney-fleet"}
    assert parts["Service"]["spec"]["selector"] == labels
    assert parts["PodMonitor"]["spec"]["selector"]["matchLabels"] == labels
    pod = parts["Deployment"]["spec"]["template"]
    assert pod["metadata"]["labels"] == parts["Deployment"]["spec"]["selector"]["matchLabels"]
    assert pod["metadata"]["labels"] == labels
    grace_s = pod["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > PRE_STOP_S + config.server.drain_s
    (served,) = pod["spec"]["containers"]
    assert served["args"][-1] == mounted(served, "config") + "/fleet.toml"
    for probe in ("livenessProbe", "readinessProbe"):
        assert served[probe]["httpGet"]["path"] in {route.path for route in _FLEET_ROUTES}
    assert config.fleet.engine_key_file == config.server.admin_key_file, "engines accept it too"


def key_files(spec: dict[str, Any], file: str, folder: Path) -> set[str]:
    """The key files that the container of a pod is told of, by its environment or its ConfigMap."""
    (served,) = spec["containers"]
    told = {each["name"]: each.get("value") for each in served.get("env", ())}
    files = {told[name] for name in KEY_FILES if name in told}
    if any(part["kind"] == "ConfigMap" for part in documents(file)):
        config = FleetConfig.read(fleet_toml(file, folder))
        server, engine_key = config.server, config.fleet.engine_key_file
        paths = {server.api_key_file, server.admin_key_file, engine_key or server.admin_key_file}
        files |= {path.replace(f"{ROOT}/configs/", "/etc/jitney/") for path in paths}
    return files


@pytest.mark.parametrize("file", [*MANIFESTS, FLEET, RAY])
def test_keys_of_a_pod_are_files_that_follow_the_secret(file: str, tmp_path: Path):
    """And that only this user's group may read. Keys in the environment, or copies of a secret,
    would change at a restart alone.
    """
    for pod in pods(file):
        (served,) = pod["containers"]
        [secret] = [each["secret"] for each in pod["volumes"] if each["name"] == "keys"]
        assert secret == {"secretName": "jitney-keys", "defaultMode": 0o440}
        [mount] = [each for each in served["volumeMounts"] if each["name"] == "keys"]
        assert "subPath" not in mount, "such a file would stay as it was at the start"
        assert key_files(pod, file, tmp_path) == {
            f"{mount['mountPath']}/{key}" for key in ("api", "admin")
        }
        assert pod["securityContext"]["supplementalGroups"] == [0]
        assert not {each["name"] for each in served.get("env", ())} & set(KEYS_IN_ENVIRONMENT)


def pods(file: str) -> list[dict[str, Any]]:
    """The specifications of a file's pods."""
    for part in documents(file):
        if part["kind"] == "RayService":
            cluster = part["spec"]["rayClusterConfig"]
            groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
            return [group["template"]["spec"] for group in groups]
    return [
        part["spec"]["template"]["spec"]
        for part in documents(file)
        if part["kind"] in ("Deployment", "StatefulSet")
    ]


def test_keys_of_the_unit_and_of_compose_are_files_too():
    told = dict(
        word.split("=", 1)
        for name, value in unit_lines("Service")
        if name == "Environment"
        for word in value.split()
    )
    text = (ROOT / "docs" / "deploy.md").read_text()
    assert "/etc/jitney/$name.keys" in text and "useradd --system jitney" in text
    assert [told[name] for name in KEY_FILES] == [
        "/etc/jitney/api.keys",
        "/etc/jitney/admin.keys",
    ]
    service = dict(unit_lines("Service"))
    assert (service["User"], service["ExecReload"]) == ("jitney", "/bin/kill -HUP $MAINPID")
    assert "EnvironmentFile" not in service
    (compose,) = documents("compose.yaml")
    engine = compose["services"]["jitney"]
    assert {f"/run/secrets/{name}" for name in engine["secrets"]} == {
        engine["environment"][name] for name in KEY_FILES
    }
    assert not engine["environment"].keys() & set(KEYS_IN_ENVIRONMENT)
    for secret in compose["secrets"].values():
        assert secret["file"].startswith("${KEYS:?")
    user = next(stage for stage in stages().values() if stage.name == "cpu").all("USER")
    assert compose["services"]["prometheus"]["group_add"] == user


def mounted(container: dict[str, Any], volume: str) -> str:
    """Where a container has a volume."""
    return next(each["mountPath"] for each in container["volumeMounts"] if each["name"] == volume)


def test_ray_serve_is_told_of_an_application_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is built of the ConfigMap's fleet.toml, by what Serve reads in a RayService."""
    schema = pytest.importorskip("ray.serve.schema")
    (service,) = (part for part in documents(RAY) if part["kind"] == "RayService")
    told = schema.ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert (told.http_options.host, told.http_options.port) == ("0.0.0.0", 8000)
    (application,) = told.applications
    module, _, name = application.import_path.partition(":")
    build = getattr(importlib.import_module(module), name)
    cluster = service["spec"]["rayClusterConfig"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for pod in pods:
        (each,) = pod["template"]["spec"]["containers"]
        assert application.args == {"file": mounted(each, "config") + "/fleet.toml"}
    file = fleet_toml(RAY, tmp_path)
    for name in ("api", "admin"):
        (tmp_path / name).write_text(f"the-{name}-key")
        (tmp_path / name).chmod(0o400)
    file.write_text(file.read_text().replace(f"{ROOT}/configs/keys/", f"{tmp_path}/"))
    built = build({"file": str(file)})
    assert type(built).__name__ == "Application"
    config = FleetConfig.read(tmp_path / "fleet.toml")
    (model,) = config.models.values()
    assert isinstance(model, ReplicasSection)
    (workers,) = cluster["workerGroupSpecs"]
    (worker,) = workers["template"]["spec"]["containers"]
    asked = worker["resources"]["requests"]
    assert (float(asked["cpu"]), float(asked["nvidia.com/gpu"])) == (model.ray.cpus, model.ray.gpus)
    assert workers["maxReplicas"] == model.ray.max_replicas
    grace_s = workers["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > config.server.drain_s
    lowest = next(each for each in EXTRAS["ray"] if each.startswith("ray")).partition(">=")[2]
    assert cluster["rayVersion"].startswith(lowest)


def test_a_ray_service_that_is_told_more_says_so():
    with pytest.raises(ConfigError, match="args of jitney's application are"):
        ray_application({"file": "fleet.toml", "port": "1"})


def test_images_have_our_version_and_no_registry():
    texts = [file.read_text() for file in DEPLOY.rglob("*") if file.suffix in (".yaml", ".yml")]
    images = set(re.findall(r"image: (\S+)", "\n".join(texts)))
    ours = {image for image in images if image.startswith("jitney")}
    assert ours == {f"jitney:{VERSION}-{target}" for target in TAGS}
    assert all(
        re.fullmatch(r"(prom|grafana)/\w+:v?\d+\.\d+\.\d+", image) for image in images - ours
    )


def test_every_file_is_well_formed():
    files = [file for file in DEPLOY.rglob("*") if file.suffix in (".yaml", ".yml")]
    assert len(files) >= 10
    for file in files:
        assert all(isinstance(part, dict) for part in yaml.safe_load_all(file.read_text())), file
