"""What the server keeps beyond a restart, in one SQLite database and a folder of files beside it."""
