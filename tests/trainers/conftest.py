"""The tests of Ray and verl need packages that only `make test-trainers` installs."""

import os
import secrets
from importlib.util import find_spec

# Ray reads its token when it is imported; without a token, it would write one to the home folder.
os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})

collect_ignore = [] if find_spec("ray") else ["test_ray.py", "test_verl.py"]
