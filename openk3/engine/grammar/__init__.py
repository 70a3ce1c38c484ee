"""Replies that keep to a grammar: JSON Schema, a regular expression, a choice of texts, Lark, or calls of tools.

`spec` is what a request asks for, `tools` how calls of tools are written and `reply` the form of a whole reply with
reasoning and calls; `schema` refuses the JSON Schemas that cannot be kept, `compiler` makes a grammar for a vocabulary,
and `matcher` says, token by token, how a reply may go on.
"""
