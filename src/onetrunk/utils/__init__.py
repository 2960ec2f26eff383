"""Helpers for all rooms: files, locks, random streams, secrets, output. Imports nothing else of onetrunk."""
