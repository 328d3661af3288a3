"""Class statistics, the server half: both forms, the merge, and the tests for hostile devices."""
