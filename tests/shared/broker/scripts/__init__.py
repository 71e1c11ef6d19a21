"""Tests of the Lua scripts, on fakeredis and on a real server, with helpers for these tests."""
