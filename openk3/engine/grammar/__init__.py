"""Replies that keep to a grammar: JSON Schema, a regular expression, a choice of texts, Lark, or calls of tools.

`spec` is what a request asks for and `tools` its form for calls of tools; `schema` refuses the JSON Schemas that cannot
be kept, `compiler` makes a grammar for a vocabulary, and `matcher` says, token by token, how a reply may go on. Only
`spec` and `tools` are imported before the first request that asks for a grammar.
"""
