"""The serving side of lmpool: workers that fetch prompts, compute their rows and publish them.

The serving side imports the shared folders, never the client side. Only backends import torch.
"""
