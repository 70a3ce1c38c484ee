"""The HTTP server: the protocols of OpenAI and Anthropic, status and metrics, the web chat in `web`. See `app`."""
