"""Everything that can be set, read once: command line over environment over file over default.

A key nobody knows is an error in each of the three, since a misspelled option that is silently ignored is found only in
production. The object is frozen: what is chosen automatically later on is recorded elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

ENV_PREFIX = "GRAFTSERVE_"
MEASURE_COSTS, NO_COSTS = "measure", "none"  # of the setting `costs`
AUTO, NONE = "auto", "none"  # of the settings `rule` and `selector`
EMBEDDED = "embedded"  # the default target, which an installed wheel brings along
CONFIG_VARIABLE = "GRAFTSERVE_CONFIG"  # names the file; not itself a setting
LEAST_KEY_LENGTH = 8  # characters of an API key
CACHE_VARIABLE = "GRAFTSERVE_CACHE"  # folder of converted models, read by models.embedded; not a setting either


class ScheduleDefinition(BaseModel):
    """A schedule of the user's own: see `scheduler.definitions`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: str
    options: dict[str, Any] = {}
    plan: str = Field(default="S*", pattern=r"^[NSMBV]+(\.*|\*)$")
    drafters: dict[str, str] = {}
    verifier: str = "walk"
    greedy_verifier: str = "greedy"
    auto: bool = False  # prices decide how much is drafted and verified, the policy's budget is the most
    description: str = ""


class Settings(BaseSettings):
    """The service's settings. Build with :func:`load_settings`, or directly from keywords in tests."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    target: str = Field(
        default=EMBEDDED, min_length=1, description="Target model: 'embedded', a folder or a hub id."
    )
    small: str | None = Field(
        default="auto",
        description="Small drafter: 'auto', 'ngram', 'pretrained', a folder, a hub id, or 'truncated:FIRST+LAST' layers.",
    )
    medium: str | None = Field(
        default="auto",
        description="Medium drafter: as the small one, and 'truncated'; none: no drafter.",
    )
    ngram_corpus: Path | None = Field(
        default=None, description="Other texts for prompt lookup: a file that `graftserve corpus` wrote."
    )
    plan: str = Field(
        default="auto",
        pattern=r"^(auto|[NSMB]+(\.*|\*))$",
        description="Who drafts at each step of 'treegraft': a word of N(gram), S, M and B(est); auto: whoever is worth most.",
    )
    rule: str = Field(
        default="auto",
        min_length=1,
        description="Rule of 'guided': a file of `fit-scheduler`; auto: the one for the shipped drafters; none: no rule.",
    )
    selector: str = Field(
        default="auto",
        min_length=1,
        description="Network of 'nde': file of `fit-scheduler`; auto: the shipped drafters' own; none: no 'nde'.",
    )
    schedule: str | None = Field(
        default=None, description="Schedule of requests that name none; none: chosen by the drafters."
    )
    define: dict[str, ScheduleDefinition] = Field(
        default={}, description="Further schedules by name, as a JSON object: {NAME: {policy, options, plan, verifier, …}}."
    )
    allow_lossy: bool = Field(
        default=False, description="Allow schedules whose verification changes the text; their answers say so."
    )
    budget: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto", description="Nodes verified per step, root included; auto: as many as pay at this machine's prices."
    )
    tune_talon: bool = Field(
        default=False, description="Let schedules that grow by TALON try budgets and gates, and keep to what is fastest."
    )
    costs: str = Field(
        default="measure",
        min_length=1,
        description="Prices for budget auto: 'measure' (at the first start, kept), 'none', or a file of `calibrate`.",
    )
    weights: Literal["auto", "fp16", "fp32", "bf16"] = Field(
        default="auto", description="Number format of the weights."
    )
    device: str = Field(
        default="auto", min_length=1, description="Torch device of all models; auto: a GPU if there is one."
    )
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads of a forward; none: torch's choice. Fewer if the cores are shared."
    )
    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address to listen on; one that other machines reach needs api_keys."
    )
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0: any free one.")
    max_num_seqs: int = Field(default=8, ge=1, description="Sequences decoded at the same time.")
    max_waiting: int = Field(
        default=64, ge=1, description="Requests that may wait for a place; more are refused with 429."
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="Longest prompt plus answer, in tokens; none: the model's."
    )
    kv_rows: int | None = Field(
        default=None, ge=2, description="Rows of the key-value pool; none: sized to the limits."
    )
    served_model_name: str | None = Field(
        default=None, min_length=1, description="Model name in the API; none: the target's own."
    )
    prefill_chunk: int = Field(default=256, ge=1, description="Prompt tokens processed per step, all sequences together.")
    prefix_cache: bool = Field(
        default=True, description="Keep the cache rows of finished texts for prompts that begin alike."
    )
    stall_s: float = Field(
        default=30.0, gt=0, allow_inf_nan=False, description="Seconds without a step that make /health 503."
    )
    state_dir: Path | None = Field(
        default=None, description="Folder for what must outlive a restart: experiments and promotions; none: memory only."
    )
    admin_key: SecretStr | None = Field(
        default=None,
        min_length=8,
        description="Key of the admin API, as a bearer token; none: it answers this machine only. Better set by environment.",
    )
    otlp_endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s/]+(/\S*)?$",
        description="Collector that gets a span per request and step, by OTLP over HTTP, as http://HOST:4318; none: no spans.",
    )
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        default=(), description="API keys, one of which every call must bring: a list, or a text with commas. None: no keys."
    )
    allow_keyless: bool = Field(
        default=False, description="Let other machines in without API keys, where something else keeps strangers out."
    )
    metrics_auth: bool = Field(default=False, description="Ask for an API key on /metrics too.")
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(),
        description="Origins of web pages that browsers let call the API: a list, or a text with commas; '*': all. None: none.",
    )
    request_timeout_s: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="Seconds after which an answer is given up; none: never."
    )
    drain_s: float = Field(
        default=30.0, ge=0, allow_inf_nan=False, description="Seconds that answers in flight may take when the server stops."
    )
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024, description="Largest body of a call.")
    log_format: Literal["text", "json"] = Field(
        default="text", description="Form of the log: lines for people, or a JSON object per line."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Lowest level that is logged."
    )

    @field_validator("define", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        # The command line has text only.
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("api_keys", "cors_origins", mode="before")
    @classmethod
    def _from_commas(cls, value: Any) -> Any:
        # Command line and environment have text only.
        if not isinstance(value, str):
            return value
        if value.lstrip().startswith("["):
            return json.loads(value)
        return [part.strip() for part in value.split(",") if part.strip()]

    @field_validator("api_keys")
    @classmethod
    def _check_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for key in map(SecretStr.get_secret_value, keys):
            if len(key) < LEAST_KEY_LENGTH or not re.fullmatch(r"[\x21-\x7e]+", key):
                raise ValueError(f"a key must have at least {LEAST_KEY_LENGTH} printable ASCII characters and no spaces")
            if not key.strip("*"):
                raise ValueError("a key of asterisks is one that was hidden when it was printed, and known to everybody")
        return keys

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ValueError(f"{origin!r} is no origin; one looks like https://example.com or http://localhost:3000")
        return origins

    @field_validator("small", "medium", mode="before")
    @classmethod
    def _no_drafter(cls, value: Any) -> Any:
        # TOML and the environment cannot say None.
        return None if value in ("none", "") else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Keywords (the command line), then the environment, then the TOML file; no dotenv, no secrets."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


def load_settings(file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Read the settings.

    ``file`` is a TOML file (none: the one named by ``GRAFTSERVE_CONFIG``, if any); ``overrides`` are values from the
    command line, where ``None`` means *not given*. Raises ValueError (pydantic's included) that names key and value,
    and FileNotFoundError for a file that is not there.
    """
    if file is None and os.environ.get(CONFIG_VARIABLE):
        file = Path(os.environ[CONFIG_VARIABLE])
    if file is not None:
        _check_file(file)
    _check_environment(os.environ)

    class FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=file)

    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    return FromFile(**given)


def _check_file(file: Path) -> None:
    """Say what is wrong with the file before pydantic does, which passes over a missing file in silence."""
    with file.open("rb") as stream:
        try:
            keys = tomllib.load(stream)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{file} is not a TOML file: {error}") from error
    unknown = sorted(set(keys) - set(Settings.model_fields))
    if unknown:
        raise ValueError(f"{file}: unknown key {unknown[0]!r}; known keys: {', '.join(Settings.model_fields)}")


def _check_environment(environment: Mapping[str, str]) -> None:
    known = {ENV_PREFIX + name.upper() for name in Settings.model_fields} | {CONFIG_VARIABLE, CACHE_VARIABLE}
    for name in sorted(environment):
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
            raise ValueError(f"unknown environment variable {name}; known ones: {', '.join(sorted(known))}")
