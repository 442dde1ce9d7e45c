"""Fixtures of the checkpoint tests."""

from __future__ import annotations

import os

from composer.testing import restore_signals
from composer.testing.servers import s3 as s3
from composer.testing.servers import s3_server as s3_server
from composer.testing.servers import sftp as sftp
from composer.testing.servers import stoppable_s3 as stoppable_s3
from composer.testing.servers import uninstall as uninstall

os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # else gcsfs asks Google, not the emulator, for some things
restore_signals()
