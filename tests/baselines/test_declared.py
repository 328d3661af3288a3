"""Every method that a module of the baselines registers is declared as an entry point, and no other."""

from __future__ import annotations

import importlib
import pkgutil

from support.outside import fresh_process

import fleetdistill_lab.baselines as package
from fleetdistill import methods
from fleetdistill.methods.outside import installed_methods
from fleetdistill_server import methods as server_methods


def test_methods_that_modules_register_are_those_declared() -> None:
    with fresh_process():
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
        assert sorted(methods.registered) == sorted(server_methods.registered) == installed_methods()
