"""Imported last by the server that tests fork processes from: their collections skip what is loaded."""

from onetrunk.utils.startup import freeze_loaded

freeze_loaded()
