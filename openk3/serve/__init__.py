"""The HTTP server: OpenAI-compatible endpoints, status and metrics, and the web chat in `web`. Start with `app`."""
