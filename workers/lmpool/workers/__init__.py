"""The serving side of lmpool: workers that fetch prompts, compute their rows and publish them.

Imports the shared folders, never the client side. Only backends import torch.
"""
