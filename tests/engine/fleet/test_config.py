"""fleet.toml: what it may say, and the one line that a mistake gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from jitney.engine.common.errors import ConfigError
from jitney.engine.config.schema import ServerSection
from jitney.engine.fleet.config import _AS_OF_A_SERVER, _KINDS, FleetConfig
from jitney.engine.fleet.launchers.engine_process import engine_config
from jitney.engine.fleet.sections import FleetSection, ReplicasSection, _RaySection

GOOD = """
[fleet]
port = 9000
poll_s = 0.5
allowed_hosts = ["fleet.example"]

[models.small]
replicas = 2
settings = { model = "tiny-random", max_seats = 4 }
devices = ["0", "1"]

[models."org/large"]
urls = ["http://10.0.0.1:8000/", "https://gpu.example/jitney"]
router = "least-wait"
upstream_model = "large"
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "fleet.toml"
    file.write_text(text)
    return file


def test_a_file_is_read(tmp_path: Path):
    file = written(tmp_path, GOOD)
    config = FleetConfig.read(file, {"JITNEY_API_KEYS": "a,b", "HOME": "/"}, {"port": 9001})
    assert (config.server.port, config.fleet.poll_s) == (9001, 0.5)
    assert config.server.api_keys == ("a", "b") and "fleet.example" in config.server.allowed_hosts
    small, large = config.models["small"], config.models["org/large"]
    assert isinstance(small, ReplicasSection) and isinstance(large, ReplicasSection)
    assert small.replicas == 2 and small.router == "prefix"
    assert engine_config(file, "small", small).engine.max_seats == 4
    assert large.urls == ("http://10.0.0.1:8000", "https://gpu.example/jitney")


def test_adapters_are_those_that_started_engines_are_given_or_urls_are_said_to_hold(
    tmp_path: Path,
):
    text = """
    [models.small]
    replicas = 1
    settings = { model = "tiny-random", adapters = ["fr=/a/fr", "de=/a/de"] }
    [models.large]
    urls = ["http://10.0.0.1:8000"]
    adapters = ["legal"]
    """
    config = FleetConfig.read(written(tmp_path, text))
    assert config.adapters == {"fr": "small", "de": "small", "legal": "large"}
    small = config.models["small"]
    assert isinstance(small, ReplicasSection)
    words = config.engine_arguments("small", small, "small-1", 0, 9123)
    assert words[words.index("--adapters") + 1] == "fr=/a/fr,de=/a/de"


MODEL = "[models.m]\nreplicas = 1\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no model: add a table"),
        ("[fleets]\n", "[fleets] is unknown; did you mean [fleet]?"),
        (MODEL + "[fleet]\nprot = 1\n", "[fleet] prot is unknown; did you mean port?"),
        (MODEL + "[fleet]\nport = 'x'\n", "[fleet] port: must be a valid integer, not 'x'"),
        (MODEL + "[fleet]\npoll_s = 0\n", "[fleet] poll_s: must be greater than 0"),
        (MODEL + "[fleet]\nhost = '0.0.0.0'\n", "is open to other machines and no API key is set"),
        ("[models.m]\n", "[models.m] give either replicas, at least 1, or urls"),
        (MODEL + "urls = ['http://a']\n", "give either replicas, at least 1, or urls"),
        (MODEL + "router = 'best'\n", "router: must be 'prefix', 'least-wait' or 'round-robin'"),
        (MODEL + "kind = 'replica'\n", "kind: replica is unknown; did you mean replicas?"),
        (MODEL + "devices = ['0', '1']\n", "devices must name 1"),
        (MODEL + "settings = { max_seat = 1 }\n", "max_seat is unknown; did you mean max_seats?"),
        (MODEL + "settings = { port = 1 }\n", "port is the fleet's to decide"),
        (
            MODEL + "settings = { n_hosts = 2, coordinator = '10.0.0.1:9000' }\n",
            "[models.m] settings: coordinator is the fleet's to decide; leave it out. An engine",
        ),
        (MODEL + "settings = { coordinator = 'auto' }\n", "does not start is one of urls"),
        (MODEL + "settings = { n_hosts = 2 }\n", "tensor_parallel 1 counts the devices of all"),
        (MODEL + "settings = { n_hosts = 'two' }\n", "--n-hosts: must be a whole number, not two"),
        (
            MODEL + "settings = { n_hosts = 2, data_parallel = 3 }\n",
            "n_hosts must be as many, not 2",
        ),
        (
            MODEL + "settings = { n_hosts = 2, tensor_parallel = 2 }\ndevices = ['0']\n",
            "devices must name 2, one for each of replicas and its n_hosts",
        ),
        (
            MODEL + "[models.m.candidate]\nreplicas = 1\n[models.'m.candidate']\nreplicas = 1\n",
            "[models.m.candidate]: engines of the candidate of 'm' are called so",
        ),
        (
            MODEL + "[models.m.candidate]\nreplicas = 1\nsettings = { host_id = 1 }\n",
            "[models.m.candidate] settings: host_id is the fleet's to decide",
        ),
        (MODEL + "settings = { max_seats = 0 }\n", "--max-seats: must be greater than or equal"),
        (MODEL + "config = 'no.toml'\n", "no.toml: cannot be read"),
        ("[models.m]\nurls = ['gpu:8000']\n", "'gpu:8000' is not the URL of an engine"),
        ("[models.m]\nurls = ['http://a', 'http://a/']\n", "names one engine twice"),
        ("[models.m]\nurls = ['http://u:p@a']\n", "a key stands in a file"),
        ("[models.m]\nurls = ['dns+http://pods:80/v1']\n", "dns+http://NAME:PORT, without a path"),
        ("[models.'a b']\nreplicas = 1\n", "a model's name has 1 to 128 characters"),
        ("[models]\nm = 1\n", "[models.m] must be a table"),
        (MODEL + "adapters = ['fr']\n", "adapters is for engines of urls"),
        (
            "[models.m]\nurls = ['http://a']\nadapters = ['fr', 'm']\n",
            "[models.m] adapters: two are called 'm'",
        ),
        ("[models.m\n", "not TOML"),
    ],
)
def test_a_mistake_is_one_line_that_names_its_place(tmp_path: Path, text: str, said: str):
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        FleetConfig.read(file)
    message = str(error.value)
    assert message.startswith(str(file)) and said in message and "\n" not in message


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("coordinator", "10.0.0.1:9000", "coordinator is the fleet's to decide"),
        ("host_id", 1, "host_id is the fleet's to decide"),
        ("n_hosts", 2, "n_hosts says how many processes a replica is: give it in settings"),
        ("data_parallel", 2, "data_parallel says how many processes a replica is: give it in"),
    ],
)
def test_hosts_are_no_matter_of_an_engines_own_file_or_of_the_environment(
    tmp_path: Path, setting: str, value: object, said: str
):
    """Every engine would be the same host of the same coordinator, and wait for ever."""
    (tmp_path / "engine.toml").write_text(f"[engine]\n{setting} = {value!r}\n")
    file = written(tmp_path, MODEL + "config = 'engine.toml'\n")
    with pytest.raises(ConfigError, match=rf"engine\.toml: {said}"):
        FleetConfig.read(file)
    file = written(tmp_path, MODEL)
    variable = f"JITNEY_{setting.upper()}"
    environ = {variable: str(value)}
    with pytest.raises(ConfigError, match=rf"^{variable}: {said}"):
        FleetConfig.read(file, environ)
    elsewhere = written(tmp_path, "[models.m]\nurls = ['http://a']\n")
    assert FleetConfig.read(elsewhere, environ).models  # they start nothing


def test_every_field_is_described():
    for kind in (FleetSection, _RaySection, *_KINDS.values()):
        for name, field in kind.model_fields.items():
            assert field.description, f"{kind.__name__}.{name}"
    assert set(_AS_OF_A_SERVER) <= set(ServerSection.model_fields)


def test_the_page_lists_every_field():
    page = (Path(__file__).parents[3] / "docs" / "fleet.md").read_text()
    for kind in (FleetSection, ReplicasSection, _RaySection):
        for name, field in kind.model_fields.items():
            assert f"| `{name}` | " in page and f" | {field.description} |" in page, name
    assert all(f"`{name}`" in page for name in _AS_OF_A_SERVER)
