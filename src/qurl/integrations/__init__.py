"""Plug-ins for other frameworks: each module needs its host installed."""
