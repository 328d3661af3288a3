"""The section `[engine]` of run.toml: how the engine computes, and on what."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fleetdistill_server.config.section import Section


class EngineSection(Section):
    """[engine]: hardware of the engine; may change between starts of a run."""

    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    micro_batch: Annotated[int, Field(ge=0, lt=2**32)] = 0
    resident_bytes: Annotated[int, Field(ge=0)] = 0
    processes: Annotated[int, Field(ge=1, le=1024)] = 1
    sharding: Literal["auto", "none", "full"] = "auto"
    checkpoint_seconds: Annotated[float, Field(ge=0)] = 60.0

    @model_validator(mode="after")
    def _check_sharding(self) -> EngineSection:
        if self.sharding == "full" and self.processes == 1:
            raise ValueError("sharding = 'full' needs several processes; set processes to at least 2")
        return self
