"""Replies that keep to a grammar: JSON Schema, a regular expression, a choice of texts, or a Lark grammar.

`spec` is what a request asks for, `schema` refuses the JSON Schemas that cannot be kept, and `matcher` compiles a
grammar for a vocabulary and says, token by token, what a reply may go on with. Only `spec` is imported before the
first request that asks for a grammar.
"""
