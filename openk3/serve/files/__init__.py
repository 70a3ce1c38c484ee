"""The Files API: uploads on disk, their rows in the database, and the routes under ``/v1/files``."""
