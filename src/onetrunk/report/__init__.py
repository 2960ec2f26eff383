"""How a run went: its record while it runs, and the report that is made of it."""
