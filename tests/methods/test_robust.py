"""`robust` of every method: what the server does about devices that are far from the others."""

from __future__ import annotations

import pytest
from support.fleets import EVERY_METHOD

from fleetdistill.errors import ConfigurationError
from fleetdistill.methods import example_config
from fleetdistill.methods.local import ROBUST

every_method = pytest.mark.parametrize("method", EVERY_METHOD)


@every_method
def test_robust_is_gross_by_default_and_one_of_three(method: str) -> None:
    if method in ("classstats_secure", "classstats_summed"):  # a sum shows no single device
        assert example_config(method).robust == "off"
        return
    assert example_config(method).robust == "gross"
    assert [example_config(method, robust=item).robust for item in ROBUST] == ["gross", "strict", "off"]
    with pytest.raises(ConfigurationError, match="unknown robust 'loose', expected one of gross, strict, off"):
        example_config(method, robust="loose")
