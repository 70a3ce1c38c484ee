"""OpenAI's Responses protocol, translated to and from chat completions, with conversations kept on this machine."""
