"""FullSpeed under the name `deepspeed`, for programs written for that library."""

import sys

from fullspeed.compat.modules import serve

serve(sys.modules[__name__])
