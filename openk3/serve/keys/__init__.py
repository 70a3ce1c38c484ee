"""API keys: made by `k3 keys`, checked at the door, with limits and a ledger of what each has used."""
