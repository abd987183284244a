"""Which host this is, as others say it; and which settings of several hosts make sense."""

from __future__ import annotations

from typing import Any

import pytest

from jitney.engine import LLM
from jitney.engine.common.errors import ConfigError
from jitney.engine.common.ports import HostAddress
from jitney.engine.config.layers import ResolvedConfig
from jitney.engine.core.distributed.environment import _find_identity, _HostIdentity, placed

TPU = {"TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc,t-2.svc,t-3.svc", "TPU_WORKER_ID": "2"}
LWS = {"LWS_LEADER_ADDRESS": "v-0.v.ns", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
SLURM = {
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_PROCID": "0",
}


@pytest.mark.parametrize(
    ("environ", "identity"),
    [
        (TPU, _HostIdentity("t-0.svc", 4, 2)),
        (LWS, _HostIdentity("v-0.v.ns", 2, 1)),
        (LWS | TPU, _HostIdentity("v-0.v.ns", 2, 1)),
        (SLURM, _HostIdentity("gpu07", 3, 0)),
        (SLURM | {"SLURM_STEP_NODELIST": "a-b,c[1-2]"}, _HostIdentity("a-b", 3, 0)),
    ],
)
def test_the_environment_says_which_host_this_is(environ: dict[str, str], identity: _HostIdentity):
    assert _find_identity(environ) == identity


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "the environment names no hosts"),
        ({"TPU_WORKER_HOSTNAMES": ""}, "the environment names no hosts"),
        (TPU | {"TPU_WORKER_ID": "x"}, "TPU_WORKER_ID must be a number"),
        ({"LWS_LEADER_ADDRESS": "a", "LWS_GROUP_SIZE": "2"}, "LWS_WORKER_INDEX must be a number"),
        (SLURM | {"SLURM_NTASKS": "6"}, "start one task on each node"),
    ],
)
def test_an_environment_that_does_not_say(environ: dict[str, str], message: str):
    with pytest.raises(ConfigError, match=f"coordinator auto: {message}"):
        _find_identity(environ)


def auto(**more: Any) -> Any:
    return ResolvedConfig.load(flags={"coordinator": "auto", "tensor_parallel": 16, **more}).config


def test_auto_takes_the_place_of_the_environment():
    engine = placed(auto(), TPU).engine
    assert (engine.coordinator, engine.n_hosts, engine.host_id) == ("t-0.svc:8477", 4, 2)
    assert engine.devices_here == 4
    named = ResolvedConfig.load(flags={}).config
    assert placed(named, TPU) is named


def test_one_host_alone_is_one_host():
    engine = placed(auto(), {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}).engine
    assert (engine.coordinator, engine.n_hosts, engine.host_id) == ("", 1, 0)


def test_auto_must_fit_the_settings():
    with pytest.raises(ConfigError, match="auto: tensor_parallel 6 counts the devices of all"):
        placed(auto(tensor_parallel=6), TPU)
    with pytest.raises(ConfigError, match="auto: canary_every is for one host"):
        placed(auto(canary_every=5), TPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_hosts": 2}, "n_hosts 2 needs coordinator HOST:PORT"),
        ({"n_hosts": 2, "coordinator": "a.b"}, "n_hosts 2 needs coordinator HOST:PORT"),
        ({"n_hosts": 2, "coordinator": "a:1", "host_id": 2}, "host_id 2 must be less than n_hosts"),
        ({"n_hosts": 2, "coordinator": "a:1"}, "tensor_parallel 1 counts the devices of all hosts"),
        ({"coordinator": "a:1"}, "coordinator and host_id are for several hosts"),
        ({"host_id": 1}, "coordinator and host_id are for several hosts"),
        ({"coordinator": "auto", "n_hosts": 2}, "coordinator auto also finds n_hosts and host_id"),
        (
            {"n_hosts": 2, "coordinator": "a:1", "tensor_parallel": 2, "canary_every": 1},
            "canary_every is for one host",
        ),
        (
            {"n_hosts": 2, "coordinator": "a:1", "tensor_parallel": 4, "device": "0,1,2,3"},
            r"as many different chips as tensor_parallel \(4\) has on each of 2 hosts",
        ),
        (
            {"data_parallel": 2},
            "data_parallel 2 is one engine on each of as many hosts: n_hosts must be as many, not",
        ),
        (
            {"data_parallel": 2, "n_hosts": 4, "coordinator": "a:1", "tensor_parallel": 4},
            "data_parallel 2 is one engine on each of as many hosts: .* not 4",
        ),
        (
            {"data_parallel": 2, "n_hosts": 2, "coordinator": "a:1", "embedding_pooling": "last"},
            "embedding_pooling is not for several hosts",
        ),
        (
            {"data_parallel": 2, "n_hosts": 2, "coordinator": "a:1", "canary_every": 5},
            "canary_every is for one host",
        ),
        (
            {"data_parallel": 2, "n_hosts": 2, "coordinator": "a:1", "device": "0,1"},
            r"as many different chips as tensor_parallel \(1\)$",
        ),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        ResolvedConfig.load(flags=settings)
    assert "\n" not in str(caught.value)


def test_each_host_names_its_own_chips():
    several = {"n_hosts": 2, "coordinator": "[fe80::1]:9", "tensor_parallel": 4, "device": "0,1"}
    engine = ResolvedConfig.load(flags=several).config.engine
    assert engine.devices_here == 2
    assert HostAddress.read(engine.coordinator) == ("fe80::1", 9)


def test_engines_that_share_experts_have_no_leader():
    engine = placed(auto(data_parallel=4, tensor_parallel=2, device="1,3"), TPU).engine
    assert (engine.n_hosts, engine.host_id, engine.devices_here) == (4, 2, 2)
    assert not engine.follows
    assert placed(auto(), TPU).engine.follows
    with pytest.raises(ConfigError, match="auto: data_parallel 2 is one engine on each"):
        placed(auto(data_parallel=2), TPU)
    with pytest.raises(ConfigError, match="only jitney serve runs an engine"):
        LLM("tiny-random:mixtral", data_parallel=2, coordinator="auto")
