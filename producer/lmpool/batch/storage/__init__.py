"""Where inputs and answers lie: files and folders of this machine, and URLs by fsspec. It imports nothing of batch."""
