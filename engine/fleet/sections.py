"""Tables of fleet.toml: the fleet's own, and those of models that engines serve."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from jitney.engine.common.errors import unknown_word
from jitney.engine.common.requests import JsonDict
from jitney.engine.config import Section
from jitney.engine.fleet.rollout.comparison import FIGURES, Comparison
from jitney.engine.fleet.rollout.rollout import PromotionRule
from jitney.engine.fleet.routing import HashRing, RouterName

#: URL scheme for a DNS name whose addresses are engines: dns+http://NAME:PORT.
_FOUND = "dns+http"
#: Placeholder for the address that host 0 of a replica gets when it starts.
_SOME_COORDINATOR = "127.0.0.1:1"


def _tuple_from_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


_Texts = Annotated[tuple[str, ...], BeforeValidator(_tuple_from_list)]


class FleetSection(Section):
    """[fleet]: how engines are polled and called. Times in seconds."""

    engine_key_file: str = Field(
        default="",
        description=(
            "file with the API key that engines of `urls` are asked with, readable by its owner "
            "only: an administrator's, so that their load can be read and each client stays a "
            "tenant of its own there; empty: the client's own key is passed on"
        ),
    )
    engine_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="first port of the engines that are started here; 0: any free ones",
    )
    poll_s: float = Field(
        default=1.0, gt=0, le=60, description="seconds between two looks at a replica"
    )
    lost_after_s: float = Field(
        default=30.0,
        gt=0,
        description=(
            "seconds without a word after which a replica is given up, and its open requests go to "
            "another one"
        ),
    )
    attempts: int = Field(
        default=3,
        ge=1,
        le=16,
        description=(
            "replicas that a request is given to before it ends with an error because they died "
            "with it: one that ends engines must not end all of them"
        ),
    )
    resume_wait_s: float = Field(
        default=60.0,
        ge=0,
        description=(
            "seconds that a request whose replica died waits for a place at another one while all "
            "are full or away"
        ),
    )
    state_dir: str = Field(
        default="",
        description=(
            "folder in which rollouts of candidates are kept, one fleet's alone; empty: a restart "
            "of the fleet begins them anew"
        ),
    )
    price_per_hour: float = Field(
        default=0.0,
        ge=0,
        description="of one engine, in any unit, for the page's price of tokens; 0: none is shown",
    )
    repeat_streams: bool = Field(
        default=True,
        description=(
            "give requests without a seed one, so that a stream of chats or completions whose "
            "replica died goes on at another one with the same tokens"
        ),
    )


class _RaySection(Section):
    """[models.NAME.ray]: resources of an engine on a Ray cluster, and the number of engines."""

    cpus: float = Field(default=1.0, ge=0, description="CPUs of each engine, or each of its hosts")
    gpus: float = Field(
        default=0.0,
        ge=0,
        description=(
            "GPUs of each engine, or each of its hosts: as many as there are devices of its "
            "tensor_parallel"
        ),
    )
    resources: dict[str, float] = Field(
        default={},
        description=(
            "other resources of each engine, or each of its hosts, such as "
            '{ TPU = 4, "TPU-v5e-4-head" = 1 }'
        ),
    )
    max_replicas: int = Field(
        default=0,
        ge=0,
        le=1024,
        description=(
            "most engines; more than `replicas`: their number goes by the predicted wait; 0: there "
            "are always `replicas`"
        ),
    )
    target_wait_s: float = Field(
        default=2.0,
        gt=0,
        description="predicted wait, seconds, beyond which one more engine is started",
    )

    @property
    def actor_options(self) -> JsonDict:
        """Ray resources of the actor of an engine, or of one host of it."""
        options: JsonDict = {"num_cpus": self.cpus, "num_gpus": self.gpus}
        if self.resources:
            options["resources"] = self.resources
        return options


class ReplicasSection(Section):
    """[models.NAME] of kind "replicas": interchangeable engines, one of which answers each
    request.
    """

    kind: Literal["replicas"] = Field(default="replicas", description="engines that answer alike")
    replicas: int = Field(default=0, ge=0, le=1024, description="engines that are started here")
    urls: _Texts = Field(
        default=(),
        description=(
            "engines that run already, such as http://10.0.0.1:8000; dns+http://NAME:PORT: every "
            "address that NAME has, looked up every 5 s"
        ),
    )
    config: str = Field(
        default="",
        description="settings of the started engines: a file of `jitney serve --config`",
    )
    settings: dict[str, Any] = Field(
        default={},
        description=(
            'the same by their flat names, such as { model = "smollm2-135m", max_seats = 16 }; '
            "they override the file"
        ),
    )
    devices: _Texts = Field(
        default=(),
        description=(
            'which GPUs or TPU chips each started engine gets, such as ["0,1", "2,3"], and each '
            "host of one with n_hosts; empty: all the same"
        ),
    )
    upstream_model: str = Field(
        default="",
        description=(
            "what the engines of `urls` call the model; empty: as here. Answers call it as they do"
        ),
    )
    adapters: _Texts = Field(
        default=(),
        description=(
            "low-rank adapters that engines of `urls` hold, by the names that requests call them; "
            "each request goes to an engine that holds its own. Engines that are started here have "
            "theirs in `settings`"
        ),
    )
    router: RouterName = Field(
        default="prefix",
        description=(
            "who gets a request: prefix by the beginning of its prompt, so that turns of one "
            "conversation find their pages, with load as the brake; least-wait by the predicted "
            "wait; round-robin in turn"
        ),
    )
    prefix_chars: int = Field(
        default=1024,
        ge=1,
        le=1 << 20,
        description=(
            "characters of a prompt, or of a chat's first message behind the system's, that decide "
            "by router = prefix"
        ),
    )
    brake: float = Field(
        default=HashRing.brake,
        ge=1.0,
        le=100.0,
        description=(
            "times the mean load at which prompts that belong to a replica go elsewhere, by router "
            "= prefix"
        ),
    )

    ray: _RaySection = Field(
        default=_RaySection(),
        description="[models.NAME.ray]: what each started engine has under `--on ray`",
    )
    candidate: CandidateSection | None = Field(
        default=None,
        description="[models.NAME.candidate]: engines with another configuration, to be compared",
    )

    @property
    def n_hosts(self) -> int:
        """Processes of each replica. An invalid value is refused with the settings."""
        n_hosts = self.settings.get("n_hosts", 1)
        return n_hosts if type(n_hosts) is int and n_hosts > 0 else 1

    @property
    def checked_settings(self) -> JsonDict:
        """The settings of started engines, with a placeholder for the first host's address."""
        if self.n_hosts == 1:
            return self.settings
        return self.settings | {"coordinator": _SOME_COORDINATOR}

    @property
    def found_urls(self) -> tuple[str, ...]:
        """The URLs whose DNS names are looked up for engines."""
        return tuple(url for url in self.urls if url.startswith(_FOUND))

    @field_validator("urls")
    @classmethod
    def _urls_are_engines(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        plain = tuple(url.rstrip("/") for url in urls)
        for url in plain:
            _check_url(url)
        if len(set(plain)) < len(plain):
            raise ValueError("names one engine twice")
        return plain

    @model_validator(mode="after")
    def _has_engines(self) -> ReplicasSection:
        if bool(self.replicas) == bool(self.urls):
            raise ValueError("give either replicas, at least 1, or urls")
        for name in ("config", "settings", "devices"):
            if self.urls and getattr(self, name):
                raise ValueError(f"{name} is for engines that are started here, not for urls")
        for name in ("upstream_model", "adapters"):
            if getattr(self, name) and not self.urls:
                raise ValueError(f"{name} is for engines of urls")
        started = self.replicas * self.n_hosts
        if self.devices and len(self.devices) != started:
            each = "replicas" if self.n_hosts == 1 else "replicas and its n_hosts"
            raise ValueError(f"devices must name {started}, one for each of {each}")
        if 0 < self.ray.max_replicas < self.replicas:
            raise ValueError("ray.max_replicas must be 0, or at least replicas")
        if self.candidate is not None and set(self.urls) & set(self.candidate.urls):
            raise ValueError("candidate names an engine that the model has already")
        return self


class CandidateSection(ReplicasSection):
    """[models.NAME.candidate]: engines that get a share of the model's requests until a decision
    whether they get all. Its engines have the same fields as the model's.
    """

    name: str = Field(
        default="candidate",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
        description="its version: what is known belongs to it, and another name begins anew",
    )
    share: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="share of the keys (users, else conversations) that it gets, always the same",
    )
    min_requests: int = Field(
        default=500,
        ge=Comparison.least_requests,
        description="requests that it must have answered before the rule promotes it",
    )
    may_lose: dict[str, float] = Field(
        default_factory=lambda: dict(PromotionRule().may_lose),
        description=(
            "by how much its figures may be worse: a share of tokens_per_s, first_token_s and "
            "token_cost, a difference of errors; figures that are not named are shown alone"
        ),
    )
    promote: Literal["rule", "hand"] = Field(
        default="rule",
        description=(
            "rule: it gets every request once all intervals of these figures are within what is "
            "allowed; hand: when an administrator says so"
        ),
    )
    roll_back: Literal["rule", "hand"] = Field(
        default="rule",
        description=(
            "rule: it gets none as soon as one interval lies beyond what is allowed; hand: when an "
            "administrator says so"
        ),
    )
    timeout_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description=(
            "seconds that it may say nothing for, before an answer and in the middle of a stream, "
            "until the request has failed; at least three times as long as the model's other "
            "engines do"
        ),
    )
    undecided_after_h: float = Field(
        default=0.0,
        ge=0,
        description="hours after which a candidate without a decision is rolled back; 0: never",
    )
    price_per_hour: float = Field(
        default=1.0, gt=0, description="of one of its engines, for token_cost; in any unit"
    )
    stable_price_per_hour: float = Field(
        default=1.0, gt=0, description="of one of the model's other engines, in the same unit"
    )

    @field_validator("may_lose")
    @classmethod
    def _figures_are_known(cls, margins: dict[str, float]) -> dict[str, float]:
        for name, margin in margins.items():
            if name not in FIGURES:
                raise ValueError(unknown_word(name, list(FIGURES)))
            if not 0 < margin < 1:
                raise ValueError(f"{name} must be more than 0 and less than 1")
        return margins

    @model_validator(mode="after")
    def _is_one(self) -> CandidateSection:
        if self.candidate is not None:
            raise ValueError("a candidate has no candidate of its own")
        return self

    @property
    def rule(self) -> PromotionRule:
        return PromotionRule(
            share=self.share,
            min_requests=self.min_requests,
            may_lose=self.may_lose,
            promotes=self.promote == "rule",
            rolls_back=self.roll_back == "rule",
            undecided_after_h=self.undecided_after_h,
        )


ReplicasSection.model_rebuild()


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", _FOUND) or not parts.hostname:
        raise ValueError(f"{url!r} is not the URL of an engine: give http://HOST:PORT")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("the URL of an engine is http://HOST:PORT; a key stands in a file")
    if parts.scheme == _FOUND and parts.path:
        raise ValueError(f"{url!r}: engines behind a name are {_FOUND}://NAME:PORT, without a path")
