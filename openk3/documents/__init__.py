"""Documents: the text of files people have, and finding a place in it.

`text` reads txt, md, html, docx and pdf; `passages` cuts a text into the pieces that are worth finding; `search` is a
full-text index over them. Everything heavy is imported where it is used.
"""
