"""The tests of onetrunk. A package, so that `tests.tiny` is this one whatever else is installed."""
