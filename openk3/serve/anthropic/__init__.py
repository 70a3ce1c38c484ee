"""Anthropic's Messages protocol, translated to and from chat completions."""
