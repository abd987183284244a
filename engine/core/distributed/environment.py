"""Host id, count and coordinator of this host, from variables that cluster launchers set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from jitney.engine.common.errors import ConfigError
from jitney.engine.common.ports import HostAddress
from jitney.engine.config import AUTO, Config, EngineSection

#: Port at the first host.
_PORT = 8477
#: First node of a Slurm job such as gpu[01-04,07].
_SLURM_NODES = re.compile(r"(?P<prefix>[^\[,]+)(?:\[(?P<first>[0-9]+)[^\]]*\])?")


@dataclass(frozen=True, slots=True)
class _HostIdentity:
    """This host among the hosts of its engine."""

    first: str  #: name or address of the first host
    n_hosts: int
    host_id: int  #: from 0


def placed(config: Config, environ: Mapping[str, str]) -> Config:
    """The configuration with coordinator auto replaced by values from the environment. Raises
    ConfigError.
    """
    engine = config.engine
    if engine.coordinator != AUTO:
        return config
    identity = _find_identity(environ)
    if identity.n_hosts == 1:
        update: dict[str, object] = {"coordinator": ""}
    else:
        update = {
            "coordinator": str(HostAddress(identity.first, _PORT)),
            "n_hosts": identity.n_hosts,
            "host_id": identity.host_id,
        }
    try:
        engine = EngineSection.model_validate(engine.model_dump() | update)
    except ValidationError as error:
        reasons = [item["msg"].removeprefix("Value error, ") for item in error.errors()]
        raise ConfigError(f"coordinator auto: {'; '.join(reasons)}") from None
    return config.model_copy(update={"engine": engine})


def _find_identity(environ: Mapping[str, str]) -> _HostIdentity:
    """This host's identity. Raises ConfigError if variables are missing."""
    for find in (_from_leader_worker_set, _from_tpu_slice, _from_slurm):
        identity = find(environ)
        if identity is not None:
            return identity
    raise ConfigError(
        "coordinator auto: the environment names no hosts (TPU_WORKER_HOSTNAMES and TPU_WORKER_ID, "
        "LWS_LEADER_ADDRESS, or Slurm's): give coordinator, n_hosts and host_id"
    )


def _from_tpu_slice(environ: Mapping[str, str]) -> _HostIdentity | None:
    """The identity in a TPU slice on Google Kubernetes Engine."""
    names = [name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]
    if not names:
        return None
    return _HostIdentity(names[0], len(names), _number(environ, "TPU_WORKER_ID"))


def _from_leader_worker_set(environ: Mapping[str, str]) -> _HostIdentity | None:
    """The identity in a LeaderWorkerSet of Kubernetes."""
    leader = environ.get("LWS_LEADER_ADDRESS")
    if not leader:
        return None
    return _HostIdentity(
        leader, _number(environ, "LWS_GROUP_SIZE"), _number(environ, "LWS_WORKER_INDEX")
    )


def _from_slurm(environ: Mapping[str, str]) -> _HostIdentity | None:
    """The identity in a Slurm step with one task on each node."""
    nodes = _SLURM_NODES.match(environ.get("SLURM_STEP_NODELIST", ""))
    if nodes is None:
        return None
    if environ.get("SLURM_NTASKS") != environ.get("SLURM_STEP_NUM_NODES"):
        raise ConfigError("coordinator auto: start one task on each node: srun --ntasks-per-node=1")
    first = nodes["prefix"] + (nodes["first"] or "")
    return _HostIdentity(first, _number(environ, "SLURM_NTASKS"), _number(environ, "SLURM_PROCID"))


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ConfigError(f"coordinator auto: {name} must be a number") from None
