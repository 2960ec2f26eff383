"""Episodes: a prompt, then turns that the policy samples and what answers them, in alternation."""
