"""The options of the command line: read, explained and checked before torch or transformers are imported."""
