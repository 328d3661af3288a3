"""Looks into a device that an app does not need, at one place."""

from __future__ import annotations

from typing import Any

from fleetdistill import Device


def state_of(device: Device) -> bytes | None:
    """The method's state, as it lies in the state directory; None before the first answer."""
    path = device.state_dir / "state.safetensors"
    return path.read_bytes() if path.exists() else None


def answer_waits(device: Device) -> bool:
    """Whether an answer lies in the outbox."""
    return (device.state_dir / "outbox" / "manifest.json").exists()


def compute_of(device: Device) -> Any:
    """What computes for the device, made if it is not there yet: the only way to a method's half in mid-run."""
    return device._check_in.ready_compute()  # private: an app gets models and events, and not what computes
