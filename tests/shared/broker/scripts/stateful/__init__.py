"""Tests of the Lua scripts, on fakeredis and on a real server; only they use the helpers here."""
