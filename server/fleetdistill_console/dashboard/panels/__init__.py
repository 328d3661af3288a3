"""Parts of a run's page. Each is made where it is shown; `update` shows what has changed since."""
