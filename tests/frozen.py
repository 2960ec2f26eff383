"""Imported last by the server that tests fork processes from: what it has loaded is visited by no collection."""

from onetrunk.utils.loading import leave_loaded_uncollected

leave_loaded_uncollected()
