"""Which host this is, by what those set in the environment who start a program on many at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from jitney.engine.common.errors import ConfigError
from jitney.engine.config import AUTO, Config, EngineSection

#: The port at the first host where the environment names none.
_PORT = 8477
#: Nodes of a Slurm job, such as gpu[01-04,07]: only the first one is needed.
_SLURM_NODES = re.compile(r"(?P<prefix>[^\[,]+)(?:\[(?P<first>[0-9]+)[^\]]*\])?")


@dataclass(frozen=True, slots=True)
class _HostPlace:
    """This host among those of its engine."""

    first: str  #: the first one's name or address
    n_hosts: int
    host_id: int  #: from 0


def placed(config: Config, environ: Mapping[str, str]) -> Config:
    """The configuration with the place that coordinator auto stands for. Raises ConfigError."""
    engine = config.engine
    if engine.coordinator != AUTO:
        return config
    place = _find_place(environ)
    if place.n_hosts == 1:
        update: dict[str, object] = {"coordinator": ""}
    else:
        # Only engines on several hosts connect to each other.
        from jitney.engine.core.distributed.connection import HostAddress

        update = {
            "coordinator": str(HostAddress(place.first, _PORT)),
            "n_hosts": place.n_hosts,
            "host_id": place.host_id,
        }
    try:
        engine = EngineSection.model_validate(engine.model_dump() | update)
    except ValidationError as error:
        reasons = [item["msg"].removeprefix("Value error, ") for item in error.errors()]
        raise ConfigError(f"coordinator auto: {'; '.join(reasons)}") from None
    return config.model_copy(update={"engine": engine})


def _find_place(environ: Mapping[str, str]) -> _HostPlace:
    """Raises ConfigError if the environment does not say, or not in whole."""
    for find in (_of_leader_worker_set, _of_tpu_slice, _of_slurm):
        place = find(environ)
        if place is not None:
            return place
    raise ConfigError(
        "coordinator auto: the environment names no hosts (TPU_WORKER_HOSTNAMES and TPU_WORKER_ID, "
        "LWS_LEADER_ADDRESS, or Slurm's): give coordinator, n_hosts and host_id"
    )


def _of_tpu_slice(environ: Mapping[str, str]) -> _HostPlace | None:
    """As Google's Kubernetes engine has it."""
    names = [name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    if not names:
        return None
    return _HostPlace(names[0], len(names), _number(environ, "TPU_WORKER_ID"))


def _of_leader_worker_set(environ: Mapping[str, str]) -> _HostPlace | None:
    """As Kubernetes' LeaderWorkerSet has it."""
    leader = environ.get("LWS_LEADER_ADDRESS")
    if not leader:
        return None
    return _HostPlace(
        leader, _number(environ, "LWS_GROUP_SIZE"), _number(environ, "LWS_WORKER_INDEX")
    )


def _of_slurm(environ: Mapping[str, str]) -> _HostPlace | None:
    """As srun has it, with one task on each node."""
    found = _SLURM_NODES.match(environ.get("SLURM_STEP_NODELIST", ""))
    if found is None:
        return None
    if environ.get("SLURM_NTASKS") != environ.get("SLURM_STEP_NUM_NODES"):
        raise ConfigError("coordinator auto: start one task on each node: srun --ntasks-per-node=1")
    first = found["prefix"] + (found["first"] or "")
    return _HostPlace(first, _number(environ, "SLURM_NTASKS"), _number(environ, "SLURM_PROCID"))


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ConfigError(f"coordinator auto: {name} must be a number") from None
