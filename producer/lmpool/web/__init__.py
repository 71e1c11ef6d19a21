"""`lmpool web`: a pool in the browser, live, and an explorer of what its models expect.

A process of its own that reads the server as `lmpool status` does and asks workers as any client does. It asks by
`lmpool.producer`; pages are files of the folder `static`, which need no build and ask no other host.
"""
