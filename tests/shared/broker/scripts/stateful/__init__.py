"""Stateful tests of the Lua scripts, on a real server."""
