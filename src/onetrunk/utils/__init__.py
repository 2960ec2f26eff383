"""What every room may use: files, locks, names, secrets, random streams. Imports nothing of ours but itself."""
