"""The HTTP edge: the only package that knows FastAPI, Prometheus, files and the environment."""
