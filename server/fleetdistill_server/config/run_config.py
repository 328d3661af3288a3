"""The contents of run.toml, which are checked completely before a run starts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Collection, Mapping, Set
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    Field,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods import METHODS, config_class
from fleetdistill.methods.outside import import_modules
from fleetdistill.models import LIBRARIES, is_of_library
from fleetdistill.names import NAME
from fleetdistill_server.config import server_config
from fleetdistill_server.config.engine_config import EngineSection
from fleetdistill_server.config.limits import Limits
from fleetdistill_server.config.section import Section, Settings, read_toml, sentences
from fleetdistill_server.config.server_config import ServerSection

__all__ = ["ContractSection", "RunConfig", "check_settings", "load_run_config", "run_config", "with_features"]

OPERATORS = (
    "rounds",
    "min_devices",
    "devices_per_round",
    "over_selection",
    "quorum",
    "deadline_seconds",
    "min_round_seconds",
    "buffer_answers",
    "buffer_seconds",
    "staleness_limit",
    "staleness_exponent",
    "threads",
    "import",
)
"""Settings of [run] that may change between starts, because they do not identify the run."""


class RunSection(Section):
    """[run]: name, method and rounds of the run."""

    name: Annotated[str, Field(pattern=rf"^{NAME}\Z")]
    method: str = "classstats"
    rounds: Annotated[int, Field(ge=0, lt=2**32)] = 30
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    min_devices: Annotated[int, Field(ge=1)] = 2
    devices_per_round: Annotated[int, Field(ge=0, lt=2**32)] = 0
    over_selection: Annotated[float, Field(ge=1, le=10)] = 1.0
    quorum: Annotated[float, Field(gt=0, le=1)] = 2 / 3
    deadline_seconds: Annotated[float, Field(gt=0)] = 600.0
    min_round_seconds: Annotated[float, Field(ge=0, le=31_536_000)] = 0.0
    buffer_answers: Annotated[int, Field(ge=0, lt=2**32)] = 0
    buffer_seconds: Annotated[float, Field(ge=0)] = 0.0
    staleness_limit: Annotated[int, Field(ge=1, le=1000)] = 10
    staleness_exponent: Annotated[float, Field(ge=0, le=10)] = 0.5
    threads: Annotated[int, Field(ge=1, lt=2**32)] = 1
    start_from: Annotated[str, Field(pattern=rf"^({NAME})?\Z")] = ""
    modules: Annotated[list[str], Field(alias="import")] = []  # noqa: RUF012  (pydantic copies it)
    """Modules that register methods; `import` is a keyword in Python."""

    @model_validator(mode="after")
    def _check_start(self) -> RunSection:
        if self.start_from == self.name:
            raise ValueError(f"start_from names run {self.name!r} itself; name another run of the store")
        return self

    @model_validator(mode="after")
    def _check_buffer(self) -> RunSection:
        if self.buffer_seconds and not self.buffer_answers:
            raise ValueError("buffer_seconds needs buffer_answers, the number of answers that ends a round earlier")
        if self.buffer_answers and self.devices_per_round:
            raise ValueError("buffer_answers and devices_per_round both end a round; set one of them to 0")
        return self


class ContractSection(Section):
    """[contract]: classes and input shape, which every device must match."""

    classes: int | list[str]
    input_shape: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    knowledge_type: Literal["float16", "float32", "uint8"] = "float16"
    max_samples: Annotated[int, Field(ge=1, lt=2**63)] = 10_000_000

    @field_validator("classes", mode="before")
    @classmethod
    def _check_classes(cls, value: object) -> object:
        names = value if isinstance(value, list) and all(isinstance(name, str) for name in value) else []
        count = value if isinstance(value, int) and not isinstance(value, bool) else len(set(names))
        if count < 2 or len(set(names)) != len(names):
            raise ValueError("must be a number of classes or a list of distinct names, at least 2")
        if not all(name.isprintable() for name in names):
            raise ValueError("must be names without control characters")
        return value

    def class_names(self) -> list[str]:
        """Returns the names in label order; numbers if only a count is given."""
        return [str(label) for label in range(self.classes)] if isinstance(self.classes, int) else self.classes


class ModelSection(Section):
    """[model]: models by zoo name or as package.module:factory."""

    extractor: str = "digits_extractor"
    extractor_weights: str = ""
    server: str = "digits_server"
    device: str = ""

    @model_validator(mode="after")
    def _check_weights(self) -> ModelSection:
        if self.extractor_weights and not self.has_library_extractor:
            raise ValueError(
                f"extractor_weights is for an extractor {' or '.join(f'{name}:...' for name in LIBRARIES)}; a factory "
                "loads its weights itself"
            )
        return self

    @property
    def has_library_extractor(self) -> bool:
        """Whether a library of pretrained networks has the extractor."""
        return is_of_library(self.extractor)


class ProxySection(Section):
    """[proxy]: the labelled data set that devices download, for methods that need one."""

    data: str = ""
    name: Annotated[str, Field(max_length=64)] = ""
    licence: Annotated[str, Field(max_length=256)] = ""

    @model_validator(mode="after")
    def _check_complete(self) -> ProxySection:
        is_set = {name: bool(getattr(self, name)) for name in ("data", "name", "licence")}
        if any(is_set.values()) and not all(is_set.values()):
            lacking = ", ".join(name for name, there in is_set.items() if not there)
            raise ValueError(f"a proxy set needs data, name and licence (such as CC-BY-4.0); missing: {lacking}")
        return self


class EvaluationSection(Section):
    """[evaluation]: the operator's labelled data, on which the run's global model is scored after each round.

    Attributes:
        trusted_rows: Rows per class that are also used as trusted references to check devices' uploads; 0 for none.
        every: Rounds from one score to the next; the last round is always scored.
    """

    data: str = ""
    trusted_rows: Annotated[int, Field(ge=0, lt=2**32)] = 5
    every: Annotated[int, Field(ge=1, lt=2**32)] = 1


class RunConfig(Section):
    """A complete run.toml.

    Attributes:
        method: The method's settings, [method]; checked against its configuration class.
    """

    run: RunSection
    contract: ContractSection
    model: ModelSection = ModelSection()
    method: dict[str, Any] = Field(default_factory=dict)
    proxy: ProxySection = ProxySection()
    evaluation: EvaluationSection = EvaluationSection()
    server: ServerSection = ServerSection()
    engine: EngineSection = EngineSection()
    limits: Limits = Limits()

    @model_validator(mode="after")
    def _use_extractor(self) -> RunConfig:
        self.method.update(with_features(self.run.method, self.method, self.model.extractor))
        return self

    def method_config(self) -> Any:
        """Returns the method's configuration, completed for the contract's number of classes.

        Raises:
            ConfigurationError: The method or a setting is unknown, of the wrong type or out of range.
        """
        config = check_settings(self.run.method, self.method)
        try:
            return config.for_classes(len(self.contract.class_names()))
        except ConfigurationError as error:
            raise ConfigurationError(f"[method] {error}") from error

    def fixed_part(self) -> dict[str, Any]:
        """Returns the settings that the store keeps for a run: those that identify it, and all of [run].

        The path of the proxy set is left out, because the contract contains its digest.
        """
        operational: dict[str, Any] = dict.fromkeys(("server", "engine", "limits", "evaluation"), True)
        fixed = self.model_dump(mode="json", by_alias=True, exclude={**operational, "proxy": {"data"}})
        return {section: values for section, values in fixed.items() if section != "proxy" or self.proxy.data}

    def setup(self) -> dict[str, Any]:
        """Returns all settings as the store keeps them, with absolute paths, for an engine to start from."""
        whole = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        for section in ("proxy", "evaluation"):
            if whole[section]["data"]:
                whole[section]["data"] = str(Path(whole[section]["data"]).absolute())
        if Path(weights := whole["model"]["extractor_weights"]).is_file():
            whole["model"]["extractor_weights"] = str(Path(weights).absolute())
        return whole


def with_features(method: str, settings: Mapping[str, Any], extractor: str) -> dict[str, Any]:
    """Returns a method's settings with `features = "model"` if the extractor is one of a library.

    A method without this setting, and settings that have it, remain as they are.

    Args:
        method: Name of the method; an unknown one has no such setting.
        settings: The settings in [method].
        extractor: `[model] extractor`.
    """
    if is_of_library(extractor):
        with contextlib.suppress(ConfigurationError):
            if any(field.name == "features" for field in dataclasses.fields(config_class(method))):
                return {"features": "model", **settings}
    return dict(settings)


def check_settings(method: str, settings: Mapping[str, Any]) -> Any:
    """Returns a method's configuration from the operator's settings, before the number of classes is known.

    Args:
        method: Name of the method.
        settings: The settings in [method].

    Raises:
        ConfigurationError: The method or a setting is unknown, of the wrong type or out of range.
    """
    cls = _known(method)
    section = _section_of(cls)  # type: ignore[arg-type]  # mypy takes a class for one of its instances
    _check_names(method, section.model_fields, settings.keys())
    try:
        # In JSON mode, strict validation accepts 1 for a float but not for a bool.
        checked = section.model_validate_json(json.dumps(settings, default=str)).model_dump(exclude_unset=True)
        return cls.from_settings(checked)
    except ValidationError as error:
        raise ConfigurationError(sentences(error, {"method": list(section.model_fields)}, "method")) from error
    except ConfigurationError as error:
        raise ConfigurationError(f"[method] {error}") from error


def _known(method: str) -> type[Any]:
    """Returns the configuration class of the method in [run]. Raises ConfigurationError for an unknown one."""
    try:
        return config_class(method)
    except ConfigurationError as error:
        raise ConfigurationError(f"[run] method: {error}") from error


def _check_names(method: str, known: Collection[str], settings: Set[str]) -> None:
    """Raises ConfigurationError for settings that the method lacks and other built-in methods have."""
    lacking = settings - set(known)
    having = [item for item in METHODS if lacking <= {field.name for field in dataclasses.fields(config_class(item))}]
    if lacking and having:
        names, methods = ", ".join(sorted(lacking)), " or ".join(f'method = "{item}"' for item in having)
        raise ConfigurationError(
            f"[method] {names}: method {method} does not support {names}; set {methods} in [run], or remove {names}"
        )


@cache
def _section_of(cls: type[Any]) -> type[Settings]:
    """Returns the model that checks a method's settings, which takes milliseconds to make."""
    types, known = get_type_hints(cls), dict[str, Any]()
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING
        known[field.name] = (types[field.name], ... if required else field.default)
    return create_model(cls.__name__, __base__=Settings, **known)


def load_run_config(path: Path) -> RunConfig:
    """Reads and checks a run.toml.

    Raises:
        ConfigurationError: The file cannot be read, or a setting is unknown, of the wrong type or out of range. The
            message names its section and key.
    """
    values = read_toml(path)
    try:
        return run_config(values)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error


def run_config(values: dict[str, Any]) -> RunConfig:
    """Checks settings given as nested dicts, including the method's.

    Raises:
        ConfigurationError: As `load_run_config`.
    """
    try:
        checked = RunConfig.model_validate(values)
    except ValidationError as error:
        said = [*_unknown_method(values.get("run")), sentences(error, _SETTINGS)]
        raise ConfigurationError("; ".join(said)) from error
    import_modules(checked.run.modules, "[run] import")
    checked.method_config()
    return checked


def _unknown_method(run: Any) -> list[str]:
    """Returns the error of an unknown method in [run], which is named before those of settings; else nothing."""
    method, modules = (run.get("method"), run.get("import", [])) if isinstance(run, Mapping) else (None, [])
    if isinstance(method, str) and isinstance(modules, list) and all(isinstance(module, str) for module in modules):
        try:
            import_modules(modules, "[run] import")
            _known(method)
        except ConfigurationError as error:
            return [str(error)]
    return []


_SETTINGS = {
    "": list(RunConfig.model_fields),
    "run": [field.alias or name for name, field in RunSection.model_fields.items()],
    "contract": list(ContractSection.model_fields),
    "model": list(ModelSection.model_fields),
    "proxy": list(ProxySection.model_fields),
    "evaluation": list(EvaluationSection.model_fields),
    "engine": list(EngineSection.model_fields),
    **server_config.SETTINGS,
}
"""Known sections and the settings of each."""
