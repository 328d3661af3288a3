"""`python -m fleetdistill.device`: the same as `fleetdistill device`."""

import sys

from fleetdistill.device.command import main

sys.exit(main())
