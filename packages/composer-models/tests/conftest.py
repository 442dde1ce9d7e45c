from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torchmetrics 1.0 imports distutils
    import torchmetrics  # noqa: F401
