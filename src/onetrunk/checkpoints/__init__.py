"""Folders that survive anything: written aside, durable, with a manifest; verified before they are used or replaced.

Knows files and folders; nothing of training.
"""
