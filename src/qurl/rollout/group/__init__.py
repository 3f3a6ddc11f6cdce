"""Engines in other processes (`engine.EngineGroup`)."""
