"""HTTP servers of models: judges, reward models and vLLM."""
