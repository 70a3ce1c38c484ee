"""Batches: files of requests that are worked off when nobody else needs the model, and several chats in one request."""
